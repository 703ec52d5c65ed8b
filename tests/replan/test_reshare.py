"""Shares of the batch for replicas of unequal speed, against all shares played by the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from planner.check import check
from planner.errors import UnsupportedError
from planner.replan.replanner import PlanRebalancer
from planner.replan.reshare import reshare_batch
from planner.replan.work import data_rank_seconds, pipeline_rank_seconds
from planner.schedule import Durations, build, simulate
from planner.search import make_request, plan_layout
from planner.spec import Plan, PredictionLayout
from tests.cli.support import tiny_cluster, tiny_job, tiny_profile

LAYERS, BATCH = 4, 15
FORWARD, BACKWARD = 1e-3, 2e-3
"""Seconds of one layer and micro-batch."""


def plan_of(pipeline: int, shares: Sequence[int], **fields: object) -> Plan:
    """Equal layers, in equal stages."""
    profile, data = tiny_profile(layers=LAYERS), len(shares)
    job = tiny_job().model_copy(
        update={"global_batch_size": sum(shares), "constraints": {}}
    )
    layout = PredictionLayout(
        data_parallel_degree=data,
        pipeline_parallel_degree=pipeline,
        micro_batch_size=1,
        schedule="1f1b",
        micro_batch_shares=shares if len(set(shares)) > 1 else None,
        **fields,  # type: ignore[arg-type]
    )
    found = plan_layout(
        make_request(profile, tiny_cluster(devices=pipeline * data), job),
        profile,
        layout,
    )
    assert isinstance(found, Plan)
    return found


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to share out so many micro-batches, at least one to each."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for others in compositions(total - first, parts - 1):
            yield first, *others


def played(pipeline: int, shares: Sequence[int], slowdown: Sequence[float]) -> float:
    """Seconds until the last replica has run its schedule."""
    layers = LAYERS / pipeline

    def seconds(share: int, factor: float) -> float:
        schedule = build("1f1b", ranks=pipeline, micro_batches=share)
        weight = {"backward_weight": BACKWARD * layers * factor / 2}
        times = {
            "forward": FORWARD * layers * factor,
            "backward_input": BACKWARD * layers * factor / 2,
            **weight,
        }
        return float(simulate(schedule, Durations.uniform(pipeline, **times)).makespan)

    return max(map(seconds, shares, slowdown))


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("slowdown", [(1, 1, 2), (3, 1, 1), (1, 1.5, 2.5)])
def test_as_fast_as_the_best_of_all_shares(
    pipeline: int, slowdown: tuple[float, ...]
) -> None:
    """And its plan promises what these replicas do."""
    plan = plan_of(pipeline, (5, 5, 5))
    profile = plan.request.profile
    assert profile is not None
    found = reshare_batch(plan, profile, slowdown)
    assert found is not None
    shares = found.plan.layout.shares(BATCH)
    best = min(played(pipeline, each, slowdown) for each in compositions(BATCH, 3))
    assert played(pipeline, shares, slowdown) == pytest.approx(best)
    rest = plan.prediction.step_seconds - played(pipeline, (5, 5, 5), (1, 1, 1))
    assert found.seconds_now == pytest.approx(
        played(pipeline, (5, 5, 5), slowdown) + rest
    )
    assert found.seconds_then == pytest.approx(best + rest)
    assert found.plan.prediction.step_seconds == pytest.approx(
        found.seconds_then, rel=0.01
    )
    carried = found.plan.request.profile
    assert carried is not None
    assert check(found.plan, carried).ok


def test_shares_that_are_the_best_stay() -> None:
    """Of a replica that takes twice as long; when it does not any more, they become equal again."""
    plan = plan_of(1, (6, 6, 3))
    assert plan.request.profile is not None
    assert reshare_batch(plan, plan.request.profile, (1, 1, 2)) is None
    found = reshare_batch(plan, plan.request.profile, (1, 1, 1))
    assert found is not None
    assert found.plan.layout.micro_batch_shares is None


def test_a_plan_says_how_long_its_replicas_work() -> None:
    """By their shares; and pipeline ranks in the mean over them."""
    plan = plan_of(2, (6, 6, 3))
    assert plan.request.profile is not None
    once = (FORWARD + BACKWARD) * LAYERS / 2
    assert data_rank_seconds(plan, plan.request.profile) == pytest.approx(
        [6 * once, 6 * once, 3 * once], rel=0.01
    )
    assert pipeline_rank_seconds(plan, plan.request.profile) == pytest.approx(
        [5 * once] * 2, rel=0.01
    )
    assert PlanRebalancer(plan).busy_seconds(plan) == pipeline_rank_seconds(
        plan, plan.request.profile
    )
    equal = plan_of(2, (5, 5, 5))
    assert equal.request.profile is not None
    assert PlanRebalancer(equal).busy_seconds(equal) == pytest.approx(
        pipeline_rank_seconds(equal, equal.request.profile)
    )


def test_layouts_of_equal_shares_stay_so() -> None:
    """ZeRO 3 gathers in every micro-batch, so that replicas meet; that is told."""
    plan = plan_of(1, (5, 5, 5), zero_stage=3)
    assert plan.request.profile is not None
    with pytest.raises(UnsupportedError, match="zero_stage"):
        reshare_batch(plan, plan.request.profile, (1, 1, 2))
