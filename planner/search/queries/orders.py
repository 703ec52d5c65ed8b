"""What another order of the micro-batches could save on the plan's own stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cost import (
    LayoutCosts,
    StageLayers,
    choose,
    durations,
    stage_memory,
    tail_ticks,
)
from planner.cost.memory import unit_bytes
from planner.cost.step import by_rank
from planner.schedule import Schedule
from planner.schedule.greedy import backward_first
from planner.schedule.order_problem import OrderProblem
from planner.schedule.room import Room
from planner.search.result import Solution


def order_gap(best: Solution) -> float | None:
    """Return the largest part of the step that another order may save.

    It is (step - bound) / step, with a bound on all orders that fit in memory. None: one
    pipeline rank has nothing to order, and ranks that differ have no bound.
    """
    costs = best.costs
    has_one_rank = costs.layout.pipeline_parallel_degree == 1
    if has_one_rank or costs.columns or costs.ranks or costs.layout.activation_offload:
        return None
    stages = choose(costs, best.stage_map)
    modes = {mode for stage in best.stage_map for _, mode in stage}
    tails = tail_ticks(costs, by_rank(best.schedule, stages))
    problem = OrderProblem(
        shape=best.schedule,
        durations=durations(costs, stages),
        room=_free_memory(costs, stages, best.schedule),
        tails=tuple(map(sum, tails)),
        is_split=modes == {"none"},
    )
    return max(0.0, 1 - problem.bound() / best.total)


def _free_memory(
    costs: LayoutCosts, stages: Sequence[StageLayers], shape: Schedule
) -> Room:
    """Return the bytes of a unit of every stage, and those that every rank has for units.

    A rank whose states overflow its host has none.
    """
    units = [unit_bytes(costs, stages, stage) for stage in range(shape.stages)]
    once = replace(
        shape,
        micro_batches=1,
        sequence_chunks=1,
        actions=backward_first(shape.stage_ranks, 1, limit=1),
    )
    free = []
    for row in stage_memory(costs, stages, once):
        mine = shape.stages_of(row.pipeline_rank)
        held = sum(units[stage] for stage in mine)
        spare = row.capacity_bytes - row.peak_bytes + held
        free.append(spare if row.fits_host else -1)
    return Room(tuple(units), tuple(free))
