"""What this executor can run, and the plan's grid of ranks. Torch-free, so that a launch fails before it starts.

Everything that a plan may say and that is not carried out here is refused: a run that leaves out half of a plan would
measure something else than the plan promised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import get_args

from planner.errors import LayoutError, UnsupportedError
from planner.executor.parallel.shares import check_shares
from planner.profiler.low_bit import require_torchao
from planner.schedule import (
    ActionKind,
    Requirement,
    Schedule,
    ScheduleEntry,
    build,
    find,
    names,
    requirements,
)
from planner.spec.job import WHOLE_PARAMETERS
from planner.spec.layout import RankOrder
from planner.spec.plan import Plan, RankPlacement
from planner.spec.recompute import EXECUTED


@dataclass(frozen=True, slots=True)
class Grid:
    """The plan's ranks as a full box: pipeline x data x context x tensor."""

    pipeline: int
    data: int
    context: int
    tensor: int
    ranks: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    """Global rank at ``ranks[pipeline][data][context][tensor]``."""
    expert: int = 1
    """Neighbours among the data- and context-parallel ranks that share out the experts."""
    shards: int | None = None
    """Neighbours likewise that share out ZeRO's states; None: all of them do."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.data * self.context * self.tensor

    def ranks_of(self, pipeline: int) -> tuple[int, ...]:
        """Global ranks of one pipeline rank, lowest first."""
        return tuple(
            sorted(
                rank
                for replica in self.ranks[pipeline]
                for shards in replica
                for rank in shards
            )
        )


def check_plan(plan: Plan) -> Grid:
    """The grid of a plan that this executor can run.

    Raises:
        UnsupportedError: the plan uses something that the executor does not carry out, or that is not installed.
        LayoutError: degrees, stages, actions, placement and batch do not fit together.
        ScheduleError: a text is no action.
    """
    for field, value, known in _choices(plan):
        if value not in known:
            raise UnsupportedError(
                f"the executor cannot run {value!r}.",
                field=field,
                hint=f"plan with {' or '.join(repr(item) for item in known)}.",
            )
    _check_installed(plan)
    grid = grid_of(plan)
    _check_rank_order(plan, grid)
    _check_stages(plan, grid)
    _check_batch(plan)
    check_shares(plan)
    _check_pieces(plan)
    _check_sequence(plan)
    _check_experts(plan)
    _check_schedule(plan, schedule_of(plan))
    plan.layout.check_offload()
    return grid


def _choices(plan: Plan) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Field, value and what this executor knows of it."""
    layout = plan.layout
    if (
        plan.request.job.optimizer in WHOLE_PARAMETERS
    ):  # a rank would have to see whole matrices
        yield "layout.tensor_parallel_degree", layout.tensor_parallel_degree, (1,)
        yield "layout.zero_stage", layout.zero_stage, (0,)
        yield "layout.expert_parallel_degree", layout.expert_parallel_degree, (1,)
    modes = ("none",) if layout.activation_offload else EXECUTED
    for stage in plan.stages:
        for index, layer in enumerate(stage.layers):
            yield (
                f"stages[{stage.index}].layers[{index}].recompute",
                layer.recompute,
                modes,
            )


def _check_installed(plan: Plan) -> None:
    job = plan.request.job
    if job.optimizer == "adam-8bit":
        require_torchao("adam-8bit", field="request.job.optimizer", instead="adamw")
    if job.precision == "fp8":
        require_torchao("fp8", field="request.job.precision", instead="bf16-mixed")


def grid_of(plan: Plan) -> Grid:
    """Place every global rank at its coordinate.

    Raises:
        LayoutError: the placement is not a full grid of the layout's degrees with ranks 0..n-1.
    """
    layout = plan.layout
    pipeline, data = layout.pipeline_parallel_degree, layout.data_parallel_degree
    context, tensor = layout.context_parallel_degree, layout.tensor_parallel_degree
    placed = {_coordinate(row): row.rank for row in plan.placement}
    wanted = list(product(range(pipeline), range(data), range(context), range(tensor)))
    complete = set(placed) == set(wanted) and len(plan.placement) == len(wanted)
    if not complete or set(placed.values()) != set(range(len(wanted))):
        raise LayoutError(
            f"{len(plan.placement)} rows do not fill the grid of pipeline {pipeline} x data {data} x context "
            f"{context} x tensor {tensor} = {len(wanted)} ranks, each coordinate and each rank once.",
            field="placement",
            hint="plan again; a placement has one row per rank, counted from 0.",
        )
    ranks = tuple(
        tuple(
            tuple(
                tuple(placed[p, d, c, t] for t in range(tensor)) for c in range(context)
            )
            for d in range(data)
        )
        for p in range(pipeline)
    )
    shards = layout.zero_shard_degree if layout.zero_stage else None
    return Grid(
        pipeline, data, context, tensor, ranks, layout.expert_parallel_degree, shards
    )


def _coordinate(row: RankPlacement) -> tuple[int, int, int, int]:
    return row.pipeline, row.data, row.context, row.tensor


def _check_rank_order(plan: Plan, grid: Grid) -> None:
    """The ranks stand as the layout says. torch numbers the members of a group by their ranks, so that these must grow
    along every axis; each order of a layout does."""
    rows, columns = range(grid.pipeline), range(grid.data)
    by_stage = [(row, column) for row in rows for column in columns]
    by_replica = [(row, column) for column in columns for row in rows]
    cells = by_stage if plan.layout.rank_order == "tp-cp-dp-pp" else by_replica
    found = [
        rank
        for row, column in cells
        for shards in grid.ranks[row][column]
        for rank in shards
    ]
    wrong = next(
        ((rank, stands) for rank, stands in enumerate(found) if rank != stands), None
    )
    if wrong is not None:
        raise LayoutError(
            f"rank {wrong[1]} of the placement stands where the order {plan.layout.rank_order!r} has rank {wrong[0]}.",
            field="layout.rank_order",
            hint=f"write {' or '.join(map(repr, get_args(RankOrder)))}, whichever the placement has, or plan again.",
        )


def _check_stages(plan: Plan, grid: Grid) -> None:
    for position, stage in enumerate(plan.stages):
        if stage.index != position or stage.pipeline_rank >= grid.pipeline:
            raise LayoutError(
                f"stage {stage.index} stands at position {position} on pipeline rank {stage.pipeline_rank} of "
                f"{grid.pipeline}.",
                field=f"stages[{position}]",
                hint="list the stages in the order of their layers, on pipeline ranks counted from 0.",
            )
        held_by = set(grid.ranks_of(stage.pipeline_rank))
        if set(stage.ranks) != held_by:
            raise LayoutError(
                f"ranks {sorted(stage.ranks)} are not those placed on pipeline rank {stage.pipeline_rank}: "
                f"{sorted(held_by)}.",
                field=f"stages[{position}].ranks",
                hint="plan again; stages and placement come from one plan.",
            )
    each = plan.layout.virtual_stages_per_rank
    held = [
        sum(stage.pipeline_rank == rank for stage in plan.stages)
        for rank in range(grid.pipeline)
    ]
    if set(held) != {each}:
        raise LayoutError(
            f"the pipeline ranks hold {held} stages, virtual_stages_per_rank is {each}.",
            field="stages",
            hint=f"give every pipeline rank {each}, or another virtual_stages_per_rank.",
        )


def schedule_of(plan: Plan) -> Schedule:
    """The plan's schedule: its actions, or built from its name where the plan does not list them.

    Raises:
        ScheduleError: a text is no action, or a stage has none.
        LayoutError: the schedule cannot be built for the plan's numbers.
        UnknownNameError: no schedule has this name.
    """
    layout = plan.layout
    if plan.actions:
        return Schedule.from_text(
            plan.actions, name=layout.schedule, sequence_chunks=layout.sequence_chunks
        )
    return build(
        layout.schedule,
        ranks=layout.pipeline_parallel_degree,
        micro_batches=plan.micro_batches,
        virtual_stages=layout.virtual_stages_per_rank,
        sequence_chunks=layout.sequence_chunks,
        # The layers say what recomputes.
        recompute="never" if find(layout.schedule).recompute_modes else "",
    )


def _check_schedule(plan: Plan, schedule: Schedule) -> None:
    """Refuse what the runtime cannot do, and actions that do not belong to the stages."""
    entry = find(plan.layout.schedule)
    if not entry.runnable:
        raise UnsupportedError(
            f"the executor does not run the schedule {entry.name!r}: {_why_not(entry)}.",
            field="layout.schedule",
            hint=f"use one of {', '.join(names(runnable_only=True))}.",
        )
    _check_owners(plan, schedule)
    _check_chunks(plan, schedule)
    if Requirement.SPLIT_BACKWARD in requirements(schedule):
        _refuse_recompute(plan, "I and W would each run the forward of a layer again")
        _refuse_activation_offload(plan)
    if entry.recompute_modes:
        _refuse_recompute(
            plan,
            "it is to run while a rank waits, but the executor recomputes inside the backward",
        )


def _why_not(entry: ScheduleEntry) -> str:
    """The reason why the executor does not run a schedule."""
    if entry.is_asynchronous:
        return "its backwards use the weights of earlier steps"
    return "every stage has a copy on a second pipeline rank"


def _check_chunks(plan: Plan, schedule: Schedule) -> None:
    """A stage runs the chunks of a micro-batch forward in order and backward in reverse: later ones read the keys and
    values of earlier ones, and give them gradients."""
    chunks = plan.layout.sequence_chunks
    if chunks == 1:
        return
    entry = find(plan.layout.schedule)
    if not entry.takes_sequence_chunks:
        raise LayoutError(
            f"the schedule {entry.name!r} does not cut the sequence, got {chunks} chunks.",
            field="layout.sequence_chunks",
            hint="write 1, or use a schedule of sequence chunks, such as seqpipe.",
        )
    for rank, row in enumerate(schedule.actions):
        runs: dict[tuple[int, int, bool], list[int]] = {}
        for stage, kind, unit in row:
            runs.setdefault(
                (stage, unit // chunks, kind is ActionKind.FORWARD), []
            ).append(unit)
        for (stage, micro_batch, is_forward), units in runs.items():
            if units != sorted(units, reverse=not is_forward):
                raise LayoutError(
                    f"stage {stage} runs the chunks of micro-batch {micro_batch} in the order {units}; forwards run "
                    "them in order, backwards in reverse.",
                    field=f"actions[{rank}]",
                    hint="plan again, or correct the order.",
                )


def _refuse_recompute(plan: Plan, reason: str) -> None:
    for stage in plan.stages:
        for index, layer in enumerate(stage.layers):
            if layer.recompute != "none":
                raise UnsupportedError(
                    f"the executor does not recompute under the schedule {plan.layout.schedule!r}: {reason}.",
                    field=f"stages[{stage.index}].layers[{index}].recompute",
                    hint="write none, or use a schedule of F and B alone, such as gpipe, 1f1b or interleaved-1f1b.",
                )


def _refuse_activation_offload(plan: Plan) -> None:
    if plan.layout.activation_offload:
        raise UnsupportedError(
            f"the executor does not offload activations under the schedule {plan.layout.schedule!r}: I and W would "
            "each have to bring them back.",
            field="layout.activation_offload",
            hint="write false, or use a schedule of F and B alone, such as gpipe, 1f1b or interleaved-1f1b.",
        )


def _check_owners(plan: Plan, schedule: Schedule) -> None:
    """Every action is one of a stage and micro-batch of its rank."""
    rank_of = [stage.pipeline_rank for stage in plan.stages]
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            held = action.stage < len(rank_of) and rank_of[action.stage] == rank
            if (
                not held
                or action.micro_batch
                >= plan.micro_batches * plan.layout.sequence_chunks
            ):
                raise LayoutError(
                    f"{action} is no action of pipeline rank {rank}, which holds the stages "
                    f"{[stage for stage, owner in enumerate(rank_of) if owner == rank]}, for {plan.micro_batches} "
                    "micro-batches.",
                    field=f"actions[{rank}][{index}]",
                    hint="plan again; stages and actions come from one plan.",
                )


def _check_batch(plan: Plan) -> None:
    batch = plan.request.job.global_batch_size
    micro_batches = plan.layout.micro_batches(batch)
    shares = plan.layout.micro_batch_shares
    told = "" if shares is None else f", the largest of the shares {list(shares)},"
    if micro_batches != plan.micro_batches:
        raise LayoutError(
            f"{plan.micro_batches} micro-batches of {plan.layout.micro_batch_size} samples on "
            f"{plan.layout.data_parallel_degree} data-parallel ranks{told} do not make the global batch of {batch} "
            "samples.",
            field="micro_batches",
            hint=f"write {micro_batches}, or plan again.",
        )


def _check_pieces(plan: Plan) -> None:
    """Sequences are cut into equal pieces."""
    layout, length = plan.layout, plan.request.job.sequence_length
    chunks, ranks = layout.sequence_chunks, layout.context_parallel_degree
    if chunks * ranks == 1:
        return
    field = "layout.sequence_chunks" if chunks > 1 else "layout.context_parallel_degree"
    if length == 0 or length % (chunks * ranks):
        raise LayoutError(
            f"a sequence of {length} tokens does not divide into sequence_chunks({chunks}) * context_parallel_degree"
            f"({ranks}) = {chunks * ranks} equal pieces.",
            field=field,
            hint="choose numbers whose product divides the job's sequence_length.",
        )


def _check_experts(plan: Plan) -> None:
    """Groups that share out the experts, or ZeRO's states, fill the data- and context-parallel ranks."""
    layout = plan.layout
    if layout.folds_experts:
        raise UnsupportedError(
            f"this executor splits experts over all {layout.tensor_parallel_degree} tensor-parallel ranks, and the "
            f"plan has expert_tensor_parallel_degree {layout.expert_tensor_degree}.",
            field="layout.expert_tensor_parallel_degree",
            hint="remove it, or export the plan to Megatron-Core.",
        )
    layout.check_shards()
    replicas, degree = (
        layout.data_parallel_degree * layout.context_parallel_degree,
        layout.expert_parallel_degree,
    )
    if (
        degree > 1
        and layout.tensor_parallel_degree > 1
        and not layout.sequence_parallel
    ):
        raise UnsupportedError(
            "beside experts the tensor-parallel ranks share out the tokens, which is sequence parallelism.",
            field="layout.sequence_parallel",
            hint="write true, or a tensor_parallel_degree of 1.",
        )
    if replicas % degree:
        raise LayoutError(
            f"expert_parallel_degree({degree}) does not divide data_parallel_degree({layout.data_parallel_degree}) * "
            f"context_parallel_degree({layout.context_parallel_degree}) = {replicas}.",
            field="layout.expert_parallel_degree",
            hint=f"use a divisor of {replicas}.",
        )


def _check_sequence(plan: Plan) -> None:
    """Sequence parallelism shares the tokens out over a tensor-parallel group."""
    layout, length = plan.layout, plan.request.job.sequence_length
    degree = layout.tensor_parallel_degree
    if not layout.sequence_parallel:
        return
    if degree == 1:
        raise LayoutError(
            "there is no tensor-parallel group to share tokens out over: tensor_parallel_degree is 1.",
            field="layout.sequence_parallel",
            hint="write false, or a greater tensor_parallel_degree.",
        )
    pieces = degree * layout.context_parallel_degree * layout.sequence_chunks
    if length % pieces:
        raise LayoutError(
            f"a sequence of {length} tokens does not divide by {pieces}: tensor_parallel_degree({degree}) * "
            f"context_parallel_degree({layout.context_parallel_degree}) * sequence_chunks({layout.sequence_chunks}).",
            field="layout.sequence_parallel",
            hint="write false, or choose a sequence length that it divides.",
        )


def check_started(plan: Plan, environment: Mapping[str, str]) -> None:
    """Refuse a rank that torchrun has put on a node of another size than the plan has. One node may play several.

    Args:
        environment: of the process; without torchrun's variables something else has started it.

    Raises:
        LayoutError: telling where the rank stands, and where it should.
    """
    if int(environment.get("GROUP_WORLD_SIZE", "1")) == 1:
        return
    rank = int(environment["RANK"])
    mine = next(row for row in plan.placement if row.rank == rank)
    wanted = (mine.device, sum(row.node == mine.node for row in plan.placement))
    stands = (int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"]))
    if stands != wanted:
        raise LayoutError(
            f"rank {rank} is process {stands[0]} of {stands[1]} on its node; the plan has it on device {wanted[0]} of "
            f"{wanted[1]}, on node {mine.node}.",
            field="placement",
            hint="start every node by its own command, which planner run prints, with its --nproc-per-node.",
        )


def check_world(plan: Plan, world_size: int) -> None:
    """Refuse a number of processes that the plan was not made for.

    Raises:
        LayoutError: naming both numbers.
    """
    wanted = len(plan.placement)
    if world_size != wanted:
        raise LayoutError(
            f"WORLD_SIZE is {world_size}, but the plan places {wanted} ranks.",
            field="WORLD_SIZE",
            hint=f"start {wanted} processes (torchrun --nproc-per-node, --nnodes), or plan for {world_size} devices.",
        )
