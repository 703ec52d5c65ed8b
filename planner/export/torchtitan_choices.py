"""A plan as torchtitan's choices, which its release reads from TOML and its main branch from Python.

Sources, in both: `torchtitan/distributed/pipeline_parallel.py` (stages by names of modules, schedules by torch's names
or from a file), `parallel_dims.py` (ranks: pipeline, replicate, shard, context, tensor, outermost first) and `fsdp.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.export import pipelining
from planner.export.demands import demand, demand_equal_shares, known
from planner.export.order import schedule_of
from planner.export.target import refuse
from planner.export.transformer import Transformer
from planner.runtimes import planned
from planner.schedule import Schedule, canonical_name
from planner.schedule.entry import Shape, loop_placement
from planner.spec import Plan
from planner.spec.profile import RecomputeMode

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Those of torch that run the planner's actions, by their names in `torch.distributed.pipelining`."""
PRECISIONS = {"bf16-mixed": "float32", "bf16": "bfloat16", "fp32": "float32"}
"""Data type of parameters between steps."""
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam"}


class Choices(NamedTuple):
    """What both dialects write."""

    replicate: int
    shard: int
    """Of data-parallel ranks; context-parallel ones shard too."""
    reshard: str
    """``always`` gathers parameters for every pass, ``never`` once."""
    schedule: str
    schedule_csv: str
    """File of actions, for schedules without a name in torch; empty: none."""
    parts: tuple[tuple[str, ...], ...]
    """Names of every stage's modules; empty: one stage."""
    recompute: RecomputeMode
    dtype: str
    """Of parameters between steps."""
    compute_dtype: str
    optimizer: str
    warnings: tuple[str, ...]


def choose(plan: Plan, target: str, head: tuple[str, ...]) -> Choices:
    """The choices for a plan of a transformer.

    Args:
        plan: of any model.
        target: the runtime, as it calls itself.
        head: its names of the modules behind the last block.

    Raises:
        UnsupportedError: torchtitan cannot do what the plan says.
    """
    demand(
        plan,
        target,
        sequence_chunks=1,
        activation_offload=False,
        optimizer_offload=False,
    )
    demand_equal_shares(plan, target)
    layout = plan.layout
    if layout.pipeline_parallel_degree > 1 and layout.data_parallel_degree > 1:
        demand(plan, target, rank_order="tp-cp-dp-pp")
    transformer = Transformer.of(plan, target)
    replicate, shard = _sharding(plan, target)
    schedule, schedule_csv = _schedule(plan, target)
    recompute, recomputes_more = _recompute(transformer)
    dtype = known(plan, target, "precision", PRECISIONS)
    told = (
        *_told(plan),
        (
            recompute == "selective" and not _is_for_torchtitan(plan),
            "recomputes every second matrix product of a block too",
        ),
        (
            recomputes_more,
            f"recomputes all blocks in mode {recompute}; the plan recomputes less",
        ),
        (
            bool(schedule_csv),
            f"reads the actions from {schedule_csv}: `planner export --to torch-pipelining` writes it",
        ),
    )
    return Choices(
        replicate,
        shard,
        "always" if layout.zero_stage == 3 else "never",
        schedule,
        schedule_csv,
        _parts(transformer, head) if len(transformer.stages) > 1 else (),
        recompute,
        dtype,
        "float32" if plan.request.job.precision == "fp32" else "bfloat16",
        known(plan, target, "optimizer", OPTIMIZERS),
        tuple(f"torchtitan {clause}." for holds, clause in told if holds),
    )


def _is_for_torchtitan(plan: Plan) -> bool:
    """Return whether the plan's selective mode is torchtitan's."""
    return planned(plan.request.job.runtime).selective == "alternate"


def _sharding(plan: Plan, target: str) -> tuple[int, int]:
    """Replicating and sharding data-parallel ranks: context-parallel ranks are always among those that shard."""
    layout, context = plan.layout, plan.layout.context_parallel_degree
    if layout.zero_stage > 1 and layout.pipeline_parallel_degree > 1:
        why = "keeps parameters and gradients whole from the first micro-batch of a pipeline's step to the last"
        refuse(
            target, why, field="layout.zero_stage", hint="plan with --fix zero_stage=1"
        )
    if layout.zero_stage and layout.zero_shards % context:
        why = f"shards over context-parallel ranks first, {context}, and the plan over {layout.zero_shards} in all"
        refuse(
            target,
            why,
            field="layout.zero_shard_degree",
            hint=f"plan with a multiple of {context}",
        )
    shard = layout.zero_shards // context if layout.zero_stage else 1
    expert = layout.expert_parallel_degree
    if (shard * context) % expert:
        why = f"takes expert-parallel ranks from those that shard, {shard * context}, and the plan has {expert}"
        refuse(
            target, why, field="layout.zero_stage", hint="plan with --fix zero_stage=1"
        )
    return layout.data_parallel_degree // shard, shard


def _schedule(plan: Plan, target: str) -> tuple[str, str]:
    """torch's name of the schedule and the file of its actions, if it has to be told them."""
    layout, ranks = plan.layout, plan.layout.pipeline_parallel_degree
    if ranks == 1:
        demand(plan, target, virtual_stages_per_rank=1)
        return "1F1B", ""
    name = SCHEDULES.get(canonical_name(layout.schedule), "")
    if (
        name == "1F1B" and plan.micro_batches < ranks
    ):  # which torch refuses, and its runtime for actions does not
        name = ""
    if not name and not _loops(schedule_of(plan)):
        refuse(
            target,
            f"has no schedule {layout.schedule}, and runs lists of actions only of stages s on rank s % {ranks}",
            field="layout.schedule",
            hint="plan with --fix schedule=1f1b",
        )
    return name or "PipelineScheduleMulti", "" if name else pipelining.TARGET.file_name(
        plan
    )


def _loops(schedule: Schedule) -> bool:
    """Is stage s on rank s % ranks, and nowhere else?"""
    runs = sum(len({action.stage for action in row}) for row in schedule.actions)
    shape = Shape(schedule.ranks, schedule.micro_batches, schedule.virtual_stages)
    return runs == schedule.stages and schedule.stage_ranks == loop_placement(shape)


def _parts(
    transformer: Transformer, head: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    parts, first = [], 0
    for stage in transformer.stages:
        blocks = (f"layers.{number}" for number in range(first, first + stage.blocks))
        parts.append(
            (
                *("tok_embeddings",) * stage.has_embedding,
                *blocks,
                *head * stage.has_head,
            )
        )
        first += stage.blocks
    return tuple(parts)


def _recompute(transformer: Transformer) -> tuple[RecomputeMode, bool]:
    """The mode of all blocks that keeps no more of any, and whether some run more again than planned."""
    modes = {mode for stage in transformer.stages for mode in stage.recompute}
    most: RecomputeMode = "none" if modes <= {"none"} else "selective"
    if not modes <= {"none", "selective"}:
        most = "full"
    return most, not modes <= {most}


def _told(plan: Plan) -> tuple[tuple[bool, str], ...]:
    """What torchtitan does otherwise, as clauses behind its name."""
    layout = plan.layout
    zero, pipelined = layout.zero_stage, layout.pipeline_parallel_degree > 1
    half = plan.request.job.precision == "bf16-mixed"
    return (
        (
            half and not zero,
            "keeps parameters and gradients in fp32 and casts to bf16: two bytes more per parameter",
        ),
        (
            half and zero > 0 and pipelined,
            "adds up the gradients of a pipeline's step in fp32, four bytes each instead of two",
        ),
        (
            zero in (1, 2) and not pipelined,
            "gathers parameters and scatters gradients in every micro-batch, not once per step",
        ),
        (
            layout.context_parallel_degree > 1,
            "balances causal attention over context-parallel ranks, and shards parameters over them",
        ),
    )
