"""Other shares of the batch, for replicas of unequal speed.

    (H1)  a micro-batch on data rank d lasts t(d) = predicted seconds on its busiest pipeline rank x its drift
    (H2)  shares m(d) by equation (V7) of `planner.cost.mixed`: the largest (m(d) + P - 1) t(d) is as small as it can be
    (H3)  step = that + what the plan predicts besides: reductions, updates, transfers

The cost model knows one speed of a device, so the new plan carries the profile with all seconds times one factor: that
by which (H2) is longer than for replicas that do not drift. Its predicted step then holds for these replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.cli.rebalance import priced_rows, slowed
from planner.executor.elastic.weigh import Rebalanced
from planner.spec import ModelProfile, Plan, PredictionLayout

_TICKS = 1e9
"""Of a second, for shares by whole numbers."""


def replica_seconds(plan: Plan, profile: ModelProfile) -> tuple[float, ...]:
    """Predicted seconds of every data-parallel rank's actions in one step, the mean over its pipeline ranks."""
    shares = plan.layout.shares(plan.request.job.global_batch_size)
    rows = _micro_batch_seconds(plan, profile)
    return tuple(
        share * sum(row) / len(row) for share, row in zip(shares, rows, strict=True)
    )


def stage_seconds(plan: Plan, profile: ModelProfile) -> tuple[float, ...]:
    """Predicted seconds of every pipeline rank's actions in one step, the mean over its data-parallel ranks."""
    shares = plan.layout.shares(plan.request.job.global_batch_size)
    columns = zip(*_micro_batch_seconds(plan, profile), strict=True)
    return tuple(
        sum(share * each for share, each in zip(shares, of, strict=True)) / len(shares)
        for of in columns
    )


def reshared(
    plan: Plan, profile: ModelProfile, slowdown: Sequence[float]
) -> Rebalanced | None:
    """Shares by the speed of the replicas, if they are faster.

    Args:
        profile: the plan's.
        slowdown: of every data-parallel rank.

    Raises:
        UnsupportedError: the layout does not go with unequal shares.

    Returns:
        None: the plan's shares are the best.
    """
    from planner.cost.mixed import fair_shares
    from planner.search import make_request, plan_layout

    fill = plan.layout.pipeline_parallel_degree - 1
    now = plan.layout.shares(plan.request.job.global_batch_size)
    alike = [max(row) for row in _micro_batch_seconds(plan, profile)]
    drifted = [
        seconds * factor for seconds, factor in zip(alike, slowdown, strict=True)
    ]
    then = fair_shares(
        [max(round(seconds * _TICKS), 1) for seconds in drifted], sum(now), fill
    )
    if then == now or min(then) == 0:
        return None
    rest = max(plan.prediction.step_seconds - _slowest(now, alike, fill), 0.0)
    factor = _slowest(then, drifted, fill) / _slowest(then, alike, fill)
    counts = tuple(len(stage.layers) for stage in plan.stages)
    chosen = slowed(priced_rows(profile, plan), counts, [factor] * len(counts))
    shares = then if len(set(then)) > 1 else None
    fields = {
        **plan.layout.model_dump(),
        "micro_batch_shares": shares,
        "layers_per_stage": counts,
    }
    found = plan_layout(
        make_request(chosen, plan.cluster, plan.request.job),
        chosen,
        PredictionLayout(**fields),
    )
    if not isinstance(found, Plan):
        return None
    return Rebalanced(
        found, _slowest(now, drifted, fill) + rest, _slowest(then, drifted, fill) + rest
    )


def _slowest(shares: Sequence[int], seconds: Sequence[float], fill: int) -> float:
    """Of the replica that is done last: equation (H2)."""
    return max(
        (share + fill) * each for share, each in zip(shares, seconds, strict=True)
    )


def _micro_batch_seconds(plan: Plan, profile: ModelProfile) -> list[list[float]]:
    """Predicted seconds of one micro-batch, of every data rank, of every pipeline rank of it."""
    from planner.cost import (
        TICK_SECONDS,
        choose,
        durations,
        layout_costs,
        schedule_of,
        workload,
    )
    from planner.cost.mixed import columns_of
    from planner.cost.step import per_column

    work = workload(profile, plan.cluster, plan.request.job)
    costs = layout_costs(work, plan.layout)
    order = {layer.name: index for index, layer in enumerate(profile.layers)}
    stage_map = [
        [(order[layer.name], layer.recompute) for layer in stage.layers]
        for stage in plan.stages
    ]
    schedule = schedule_of(costs)

    def rows() -> Iterator[list[float]]:
        for column, _, stages in per_column(costs, schedule, choose(costs, stage_map)):
            spent = durations(column, stages)
            seconds = [0.0] * schedule.ranks
            for stage, rank in enumerate(schedule.stage_ranks):
                parts = (
                    spent.forward,
                    spent.backward_input,
                    spent.backward_weight,
                    spent.recompute,
                )
                seconds[rank] += (
                    sum(part[stage] for part in parts if part) * TICK_SECONDS
                )
            yield seconds

    found = list(rows())
    if not costs.columns:
        return found * plan.layout.data_parallel_degree
    by_data = {
        data: row
        for column, row in zip(columns_of(work, plan.layout), found, strict=True)
        for data in column.data_ranks
    }
    return [by_data[data] for data in range(plan.layout.data_parallel_degree)]
