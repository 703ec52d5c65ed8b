"""Start torchrun for a plan on this machine, or say how to start it on every node. Imports torch only to check."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import (
    DocumentError,
    LayoutError,
    PlannerError,
    RunError,
    StoppedError,
    UnsupportedError,
)
from planner.executor.checkpoint.folder import (
    Trained,
    check_policy,
    refuse_finished,
    used_alone,
)
from planner.executor.elastic.supervisor import Elastic, ElasticPolicy
from planner.executor.failures.failure import read_failure
from planner.executor.failures.unfinished import why_of
from planner.executor.settings import (
    DEFAULT_GRACE_SECONDS,
    RunSettings,
)
from planner.executor.support import check_plan
from planner.executor.torchrun import (
    RESUME,
    Log,
    Torchrun,
    grace,
    interpreter,
    passing_on,
    started,
    stoppable,
)
from planner.spec.job import Precision
from planner.spec.measured import MeasuredRun
from planner.spec.plan import Plan

if TYPE_CHECKING:
    from planner.profiler.models import ModelSource

MASTER_PORT = 29500
"""torchrun's default port."""
TOLERANCES: dict[Precision, float] = {
    "fp32": 1e-4,
    "fp16-mixed": 1e-2,
    "bf16-mixed": 5e-2,
    "bf16": 5e-2,
    "fp8": 5e-2,
}
"""Greatest difference of a step's loss from the single process that counts as the same. A split adds up in another
order, and every sum is rounded: to 11 bits in fp16, to 8 in bf16, and in fp8 too, whose products add up in fp32."""


def run_plan(
    plan: Plan,
    plan_path: str | Path | None = None,
    *,
    output: str | Path | None = None,
    metrics: str | Path | None = None,
    log: Log = lambda line: None,
    reference_steps: int = 0,
    elastic: ElasticPolicy | None = None,
    unfinished: Callable[[MeasuredRun], None] | None = None,
    **choices: Any,
) -> MeasuredRun:
    """Train with torchrun on this machine and return what happened.

    Args:
        plan_path: the plan's file; None: a temporary one is written.
        output: where to write the report too.
        metrics: file for one JSON line per step.
        log: takes one line of text per step.
        reference_steps: train this many steps in a single process first and compare the losses.
        elastic: go on when ranks are killed, and grow again when their devices come back; None: fail.
        unfinished: takes the report of a run that fails or is stopped after its first step, before the error is raised.
        choices: `model`, and further fields of `RunSettings`.

    Raises:
        MismatchError: a plan of another model.
        FinishedError: the checkpoint to go on from is of the last step.
        UnsupportedError: the plan needs several nodes, or something that the executor does not carry out.
        DocumentError: the checkpoint folder cannot be used, or the job's optimizer does not have one of its options.
        RunError: a rank failed, or the losses are not those of the single process.
        StoppedError: the run was told to stop (SIGTERM), and did.
    """
    settings = RunSettings(**choices)
    _check_resume(settings, reference_steps)
    check_plan(plan)
    settings.optimizer_options.check(plan.request.job.optimizer)
    _check_one_node(plan)
    source = _check_model(plan, settings.model)
    kept = settings.checkpoints
    with (
        stoppable(),
        nullcontext() if kept is None else used_alone(kept.directory),
        tempfile.TemporaryDirectory(prefix="planner-run-") as name,
    ):
        refuse_finished(
            kept, settings.steps, Trained.of(plan, source.digest, settings.seed)
        )
        folder = Path(name)
        path = Path(plan_path) if plan_path is not None else _write_plan(plan, folder)
        expected = (
            _reference(path, settings, reference_steps, plan, log)
            if reference_steps
            else ()
        )
        launch: Elastic | Torchrun
        if elastic is not None:
            launch = Elastic(plan, settings, folder, elastic, metrics=metrics, log=log)
        else:
            launch = Torchrun(plan, path, settings, folder, metrics=metrics)
        with _telling(launch, unfinished):
            measured = (
                launch.run() if isinstance(launch, Elastic) else _torchrun(launch, log)
            )
    measured = measured.model_copy(update={"reference_losses": expected})
    if output is not None:
        Path(output).write_text(measured.model_dump_json(indent=1), encoding="utf-8")
    try:
        _compare(measured, TOLERANCES[plan.request.job.precision], log)
    except RunError:
        if unfinished is not None:
            unfinished(measured)
        raise
    return measured


@contextmanager
def _telling(
    launch: Elastic | Torchrun, take: Callable[[MeasuredRun], None] | None
) -> Iterator[None]:
    """What was trained when an error ends it."""
    try:
        yield
    except (PlannerError, KeyboardInterrupt) as error:
        if take is not None and (found := launch.unfinished(why_of(error))) is not None:
            take(found)
        raise


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """What to start on one node of a plan."""

    node: int
    """Its number through all node groups of the plan's cluster."""
    group: str
    """Name of its node group."""
    processes: int
    """Ranks on it, one per device that the plan uses."""
    text: str
    """Of the shell; MASTER_ADDR is for the shell to fill in."""


def node_commands(
    plan: Plan, plan_path: str | Path, **choices: Any
) -> tuple[NodeCommand, ...]:
    """The command of every node of the plan, in the order of their ranks: the first one's address is MASTER_ADDR.

    Nodes may have different numbers of devices. torchrun counts the ranks by ``--node-rank``, each node with as many as
    it starts; under a c10d rendezvous it would number the nodes as it likes.

    Args:
        choices: `model`, and further fields of `RunSettings`.

    Raises:
        LayoutError: the placement does not number the ranks node by node, as torchrun does, or names a node that the
            cluster does not have.
        DocumentError: the job's optimizer does not have one of its options.
    """
    check_plan(plan)
    ranks = _ranks_per_node(plan)
    chosen = RunSettings(**choices)
    chosen.optimizer_options.check(plan.request.job.optimizer)
    arguments = chosen.to_arguments()
    is_usual = chosen.grace_seconds == DEFAULT_GRACE_SECONDS
    variables = (
        ""
        if is_usual
        else "".join(f"{name}={value} " for name, value in grace(chosen).items())
    )
    worker = [
        "-m",
        "planner.executor.worker",
        str(plan_path),
        *arguments,
        "--output",
        "measured.json",
    ]
    groups = _groups_of_nodes(plan)
    lines = []
    for number, (node, processes) in enumerate(ranks.items()):
        torchrun = [
            "torchrun",
            f"--nnodes={len(ranks)}",
            f"--node-rank={number}",
            f"--nproc-per-node={processes}",
        ]
        # The one word that the shell must expand stays unquoted.
        master = f'--master-addr="$MASTER_ADDR" --master-port={MASTER_PORT}'
        text = f"{variables}{shlex.join(torchrun)} {master} {shlex.join(worker)}"
        lines.append(NodeCommand(node, groups[node], processes, text))
    return tuple(lines)


def _groups_of_nodes(plan: Plan) -> list[str]:
    """Name of every node's group."""
    names = [
        group.name
        for group in plan.request.cluster.node_groups
        for _ in range(group.nodes)
    ]
    last = max(row.node for row in plan.placement)
    if last >= len(names):
        raise LayoutError(
            f"a rank stands on node {last}, and the cluster has {len(names)}, counted from 0 through all groups.",
            field="placement",
            hint="plan again; placement and request come from one plan.",
        )
    return names


def nodes(plan: Plan) -> int:
    """Number of nodes that the plan needs."""
    return len({row.node for row in plan.placement})


def _ranks_per_node(plan: Plan) -> dict[int, int]:
    """Ranks on every node, by its number, in the order of use."""
    rows = sorted(plan.placement, key=lambda row: row.rank)
    counts = Counter(row.node for row in rows)  # in the order in which the nodes come
    numbered = [
        (node, device) for node, count in counts.items() for device in range(count)
    ]
    if [(row.node, row.device) for row in rows] != numbered:
        raise LayoutError(
            "torchrun numbers the ranks node by node and device by device; this placement does not.",
            field="placement",
            hint="number the ranks of one node after the other, each from device 0 on.",
        )
    return dict(counts)


def _check_one_node(plan: Plan) -> None:
    if nodes(plan) > 1:
        raise UnsupportedError(
            f"the plan needs {nodes(plan)} nodes, and torchrun starts processes on one.",
            field="placement",
            hint="start the command of every node there: planner.executor.launch.node_commands lists them.",
        )


def _check_resume(settings: RunSettings, reference_steps: int) -> None:
    if settings.resume and reference_steps:
        raise DocumentError(
            "are the first ones of a training, which a run that resumes does not make.",
            field="reference_steps",
            hint="compare a run from the start.",
        )
    if settings.checkpoints is not None:
        check_policy(settings.checkpoints)


def _check_model(plan: Plan, model: str) -> ModelSource:
    from planner.executor.executor import check_model
    from planner.profiler.models import load_model

    source = load_model(model)
    check_model(plan, source)
    return source


def _write_plan(plan: Plan, folder: Path) -> Path:
    path = folder / "plan.json"
    path.write_text(plan.model_dump_json(by_alias=True), encoding="utf-8")
    return path


def _torchrun(launch: Torchrun, log: Log) -> MeasuredRun:
    ended = launch.run(lambda line: log(str(line)), log)
    if ended.measured is None:
        assert ended.error is not None
        raise ended.error
    return ended.measured


def _reference(
    path: Path, settings: RunSettings, steps: int, plan: Plan, log: Log
) -> tuple[float, ...]:
    """Losses of the single process, which gets all cores: it runs alone."""
    steps = min(steps, settings.steps)
    log(f"training {steps} steps in a single process, to compare")
    command = [
        *interpreter(),
        "-m",
        "planner.executor.reference",
        str(path),
        *settings.to_arguments(),
    ]
    with tempfile.TemporaryDirectory(prefix="planner-reference-") as name:
        folder = Path(name)
        command += ["--reference-steps", str(steps), "--failures", name]
        # Threads that spin while they wait take the core from one that works, where cores are shared.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        with (
            started(command, environment, folder / "stderr.txt") as process,
            passing_on(process) as signals,
        ):
            assert process.stdout is not None
            text = process.stdout.read()
        if signals:
            raise StoppedError(
                "SIGTERM stopped the run before its first step.",
                hint=RESUME,
            )
        if process.returncode != 0:
            raise read_failure(
                folder,
                (folder / "stderr.txt").read_text(encoding="utf-8", errors="replace"),
            )
    return tuple(json.loads(text))


def _compare(measured: MeasuredRun, tolerance: float, log: Log) -> None:
    if not measured.reference_losses:
        return
    worst = 0.0
    log("step   this run   single process   difference")
    trained = measured.losses_by_step
    for step, theirs in enumerate(measured.reference_losses):
        ours = trained[step]
        log(f"{step:4d}   {ours:8.5f}   {theirs:14.5f}   {ours - theirs:+.1e}")
        worst = max(worst, abs(ours - theirs))
    if worst > tolerance:
        raise RunError(
            f"the losses differ from the single process by up to {worst:.1e}, more than {tolerance:.0e}.",
            field="losses",
            hint="report this plan: a split must not change what is computed.",
        )
