"""How long the ranks of a plan should work in one step, as the cost model predicts it.

The executor compares these seconds with what it measures: a rank whose ratio is larger
than that of the others is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from planner.cost import (
    TICK_SECONDS,
    LayoutCosts,
    choose,
    durations,
    layout_costs,
    order_of,
    workload,
)
from planner.cost.mixed import columns_of
from planner.schedule import Durations, Schedule, find
from planner.spec import ModelProfile, Plan
from planner.spec.profile import RecomputeMode

WorkTable = list[list[float]]
"""Seconds by data-parallel rank, then by pipeline rank."""


def pipeline_rank_seconds(plan: Plan, profile: ModelProfile) -> tuple[float, ...]:
    """Return the seconds that each pipeline rank works in one step.

    Data-parallel ranks may differ; the figure is the mean over them.
    """
    columns = zip(*_step_seconds(plan, profile), strict=True)
    return tuple(fmean(column) for column in columns)


def data_rank_seconds(plan: Plan, profile: ModelProfile) -> tuple[float, ...]:
    """Return the seconds that each data-parallel rank works in one step.

    The figure is the mean over the pipeline ranks of the replica.
    """
    return tuple(fmean(row) for row in _step_seconds(plan, profile))


def micro_batch_seconds(plan: Plan, profile: ModelProfile) -> WorkTable:
    """Return the seconds of the forward and backward passes of one micro-batch."""
    request = plan.request
    work = workload(profile, plan.cluster, request.job, calibration=request.calibration)
    costs = layout_costs(work, plan.layout)
    # Only a synthesized order must be read from the plan's actions. They do not show
    # which copy of a stage a bidirectional schedule runs.
    is_synthesized = find(plan.layout.schedule).needs_durations
    schedule = order_of(costs, plan.actions if is_synthesized else ())
    stage_map = _stage_map(plan, profile)

    def row(column: LayoutCosts) -> list[float]:
        spent = durations(column, choose(column, stage_map))
        return _rank_seconds(schedule, spent)

    degree = plan.layout.data_parallel_degree
    if not costs.columns:
        return [row(costs)] * degree
    by_data_rank: dict[int, list[float]] = {}
    columns = columns_of(work, plan.layout)
    for members, column in zip(columns, costs.columns, strict=True):
        by_data_rank |= dict.fromkeys(members.data_ranks, row(column))
    return [by_data_rank[data_rank] for data_rank in range(degree)]


def _step_seconds(plan: Plan, profile: ModelProfile) -> WorkTable:
    table = []
    shares = plan.layout.shares(plan.request.job.global_batch_size)
    for share, row in zip(shares, micro_batch_seconds(plan, profile), strict=True):
        table.append([share * seconds for seconds in row])
    return table


def _stage_map(
    plan: Plan, profile: ModelProfile
) -> list[list[tuple[int, RecomputeMode]]]:
    index_of = {layer.name: index for index, layer in enumerate(profile.layers)}
    stages = []
    for stage in plan.stages:
        layers = [(index_of[layer.name], layer.recompute) for layer in stage.layers]
        stages.append(layers)
    return stages


def _rank_seconds(schedule: Schedule, spent: Durations) -> list[float]:
    """The seconds of one micro-batch on each pipeline rank.

    In a bidirectional schedule each of the two copies of a stage runs half of the
    micro-batches.
    """
    copies = 2 if schedule.replica_ranks else 1
    seconds = []
    for rank in range(schedule.ranks):
        stages = schedule.stages_of(rank)
        ticks = sum(_stage_ticks(spent, stage) for stage in stages)
        seconds.append(ticks * TICK_SECONDS / copies)
    return seconds


def _stage_ticks(spent: Durations, stage: int) -> float:
    """The ticks of all sequence chunks of one micro-batch on a stage."""
    chunks = spent.sequence_chunks
    first = stage * chunks
    phases: list[Sequence[float]] = [
        spent.forward,
        spent.backward_input,
        spent.backward_weight,
        spent.recompute,
    ]
    return sum(sum(phase[first : first + chunks]) for phase in phases)
