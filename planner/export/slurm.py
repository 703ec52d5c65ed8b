"""A batch script for Slurm that starts the planner's own executor under torchrun, one task per node.

Nodes of several kinds are a heterogeneous job: a component per kind, one step over all of them. A task's SLURM_PROCID
counts through all components, in their order, and with one task per node it is the node's rank
(slurm.schedmd.com/heterogeneous_jobs.html).

Before the time limit Slurm signals the batch shell (``--signal=B:``), which hands SIGTERM to the step: what `scancel`
sends reaches steps, and not the shell (scancel(1), ``--batch``). The executor keeps a checkpoint, and the job is queued
again. A job that is preempted, or that loses a node, is queued again by Slurm itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.export.launcher import (
    MASTER_PORT,
    WORKER,
    Nodes,
    bash_plan_and_model,
    bash_ranks,
    bash_threads,
    count_of,
    model_warnings,
    nodes_of,
)
from planner.export.target import Export, Target, header
from planner.spec import Plan
from planner.spec.words import counted

_VERSION = "23.11"
_GRACE_SECONDS = 120
"""From the signal to the time limit, at least: for the step at hand and its checkpoint."""


def write(plan: Plan) -> Export:
    """The batch script.

    Raises:
        UnsupportedError: the placement does not count the ranks node by node.
    """
    nodes = nodes_of(plan, "Slurm")
    warnings = (*model_warnings(plan), *_warnings(nodes))
    text = f"""\
#!/bin/bash
{header(plan, "Slurm", _VERSION, warnings)}#
# sbatch --time=TIME SCRIPT [--steps N and further options of {WORKER}]
# PLAN (plan.json), MODEL, CHECKPOINTS and CHECKPOINT_EVERY may come from the environment. The working directory is on a
# file system that all nodes share.
#SBATCH --job-name=planner-{plan.id[:12]}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{_GRACE_SECONDS}
{_components(nodes)}
set -euo pipefail

{bash_plan_and_model(plan)}{bash_threads(plan)}CHECKPOINTS=${{CHECKPOINTS:-checkpoints-{plan.id[:12]}}}
mapfile -t hosts < <(scontrol show hostnames "${{SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}}")
export MASTER_ADDR=${{hosts[0]}}
export MASTER_PORT=$(({MASTER_PORT} + SLURM_JOB_ID % 1000)) # of its own, where jobs share a node
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={_GRACE_SECONDS}

time_is_over=
trap 'time_is_over=yes; scancel --signal=TERM "$SLURM_JOB_ID" || true' USR1

{_srun(nodes)}
srun=$!
code=0
wait "$srun" || code=$?
if [[ $time_is_over ]]; then
  wait "$srun" || true # the trap ended the first wait
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
    return Export(text, warnings)


def _components(nodes: Sequence[Nodes]) -> str:
    """What is asked for, kind by kind."""
    return "\n#SBATCH hetjob\n".join(_component(each) for each in nodes)


def _component(nodes: Nodes) -> str:
    """All of a node where the plan uses all of its devices, its CPUs and its memory too."""
    wanted = [f"--nodes={nodes.count}", "--ntasks-per-node=1"]
    wanted += [f"--gpus-per-node={nodes.ranks}"] if nodes.vendor else []
    wanted += ["--exclusive", "--mem=0"] if _has_whole_nodes(nodes) else []
    return f"# {nodes}\n" + "\n".join(f"#SBATCH {each}" for each in wanted)


def _has_whole_nodes(nodes: Nodes) -> bool:
    return nodes.ranks == nodes.group.devices_per_node


def _srun(nodes: Sequence[Nodes]) -> str:
    components = f"--het-group=0-{len(nodes) - 1} " if len(nodes) > 1 else ""
    line, ranks = bash_ranks(nodes, "SLURM_PROCID")
    return f"""\
srun {components}--kill-on-bad-exit=1 --cpu-bind=none bash -c '{line}
  exec torchrun --nnodes={count_of(nodes)} --node-rank="$SLURM_PROCID" --nproc-per-node={ranks} \\
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"
' torchrun -m {WORKER} "$PLAN" --model "$MODEL" --output measured.json \\
  --checkpoint-dir "$CHECKPOINTS" --checkpoint-every "${{CHECKPOINT_EVERY:-100}}" --resume \\
  --grace-seconds {_GRACE_SECONDS} "$@" &"""


def _warnings(nodes: Sequence[Nodes]) -> Iterator[str]:
    if len(nodes) > 1:
        yield (
            f"Slurm does not know which nodes are meant by {', '.join(each.name for each in nodes)}: add a --partition "
            "or --constraint to each component of the job that only its nodes meet."
        )
    for each in nodes:
        if not _has_whole_nodes(each):
            whole = counted(each.group.devices_per_node, "device")
            yield (
                f"The plan uses {each.ranks} of {whole} of a node of {each.name}, and other jobs may use the rest: add "
                "the --cpus-per-task and --mem that the ranks of a node may take."
            )


TARGET = Target(
    name="slurm",
    title="a batch script for Slurm, with the planner's own executor",
    version=f"Slurm {_VERSION}",
    suffix=".slurm",
    media_type="application/x-sh",
    write=write,
)
