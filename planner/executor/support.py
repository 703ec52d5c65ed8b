"""What this executor can run, and the plan's grid of ranks. Torch-free, so that a launch fails before it starts.

Everything that a plan may say and that is not carried out here is refused: a run that leaves out half of a plan would
measure something else than the plan promised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from planner.errors import LayoutError, UnsupportedError
from planner.schedule.actions import Action
from planner.spec.job import WHOLE_PARAMETERS
from planner.spec.plan import Plan, RankPlacement
from planner.spec.profile import RecomputeMode

RECOMPUTE_MODES = get_args(RecomputeMode)
ACTION_KINDS = ("F", "B")


@dataclass(frozen=True, slots=True)
class Grid:
    """The plan's ranks as a full box: pipeline x data x tensor."""

    pipeline: int
    data: int
    tensor: int
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """Global rank at ``ranks[pipeline][data][tensor]``."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.data * self.tensor


def check_plan(plan: Plan) -> Grid:
    """The grid of a plan that this executor can run.

    Raises:
        UnsupportedError: the plan uses something that the executor does not carry out.
        LayoutError: degrees, stages, placement and batch do not fit together.
    """
    for field, value, known in _choices(plan):
        if value not in known:
            raise UnsupportedError(
                f"the executor cannot run {value!r}.",
                field=field,
                mend=f"plan with {' or '.join(repr(item) for item in known)}.",
            )
    grid = grid_of(plan)
    _check_stages(plan, grid)
    _check_batch(plan)
    return grid


def _choices(plan: Plan) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Field, value and what this executor knows of it."""
    layout = plan.layout
    yield "layout.context_parallel_degree", layout.context_parallel_degree, (1,)
    yield "layout.expert_parallel_degree", layout.expert_parallel_degree, (1,)
    yield "layout.virtual_stages_per_rank", layout.virtual_stages_per_rank, (1,)
    yield "layout.zero_stage", layout.zero_stage, (0,)
    if plan.request.job.optimizer in WHOLE_PARAMETERS:
        yield "layout.tensor_parallel_degree", layout.tensor_parallel_degree, (1,)
    yield "layout.sequence_parallel", layout.sequence_parallel, (False,)
    for stage in plan.stages:
        for index, layer in enumerate(stage.layers):
            yield f"stages[{stage.index}].layers[{index}].recompute", layer.recompute, RECOMPUTE_MODES
    for rank, actions in enumerate(plan.actions):
        for index, action in enumerate(actions):
            yield f"actions[{rank}][{index}]", Action.parse(action).kind.value, ACTION_KINDS


def grid_of(plan: Plan) -> Grid:
    """Place every global rank at its coordinate.

    Raises:
        LayoutError: the placement is not a full grid of the layout's degrees with ranks 0..n-1.
    """
    layout = plan.layout
    shape = (layout.pipeline_parallel_degree, layout.data_parallel_degree, layout.tensor_parallel_degree)
    placed = {_coordinate(row): row.rank for row in plan.placement}
    wanted = [(p, d, t) for p in range(shape[0]) for d in range(shape[1]) for t in range(shape[2])]
    complete = set(placed) == set(wanted) and len(plan.placement) == len(wanted)
    if not complete or set(placed.values()) != set(range(len(wanted))):
        raise LayoutError(
            f"{len(plan.placement)} rows do not fill the grid of pipeline {shape[0]} x data {shape[1]} x tensor "
            f"{shape[2]} = {len(wanted)} ranks, each coordinate and each rank once.",
            field="placement",
            mend="plan again; a placement has one row per rank, counted from 0.",
        )
    ranks = tuple(
        tuple(tuple(placed[p, d, t] for t in range(shape[2])) for d in range(shape[1])) for p in range(shape[0])
    )
    return Grid(*shape, ranks)


def _coordinate(row: RankPlacement) -> tuple[int, int, int]:
    return row.pipeline, row.data, row.tensor


def _check_stages(plan: Plan, grid: Grid) -> None:
    for position, stage in enumerate(plan.stages):
        if stage.index != position or stage.pipeline_rank != position:
            raise LayoutError(
                f"stage {stage.index} stands at position {position} on pipeline rank {stage.pipeline_rank}.",
                field=f"stages[{position}]",
                mend="list the stages in order, one per pipeline rank.",
            )
        held_by = {rank for row in grid.ranks[position : position + 1] for group in row for rank in group}
        if set(stage.ranks) != held_by:
            raise LayoutError(
                f"ranks {sorted(stage.ranks)} are not those placed on pipeline rank {position}: {sorted(held_by)}.",
                field=f"stages[{position}].ranks",
                mend="plan again; stages and placement come from one plan.",
            )
    if len(plan.stages) != grid.pipeline:
        raise LayoutError(
            f"{len(plan.stages)} stages on {grid.pipeline} pipeline ranks.",
            field="stages",
            mend="list one stage per pipeline rank.",
        )


def _check_batch(plan: Plan) -> None:
    batch = plan.request.job.global_batch_size
    micro_batches = plan.layout.micro_batches(batch)
    if micro_batches != plan.micro_batches:
        raise LayoutError(
            f"{plan.micro_batches} micro-batches of {plan.layout.micro_batch_size} samples on "
            f"{plan.layout.data_parallel_degree} data-parallel ranks do not make the global batch of {batch} samples.",
            field="micro_batches",
            mend=f"write {micro_batches}, or plan again.",
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
            mend=f"start {wanted} processes (torchrun --nproc-per-node, --nnodes), or plan for {world_size} devices.",
        )
