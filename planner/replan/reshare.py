"""Moves micro-batches away from replicas that are slow.

    (H1)  a micro-batch on data-parallel rank d takes t(d) = predicted seconds on its
          busiest pipeline rank x its slowdown
    (H2)  shares m(d) by equation (V7) of `planner.cost.mixed`: they minimize the largest
          (m(d) + P - 1) t(d), P pipeline ranks                    -> pipeline_seconds()
    (H3)  step = that + everything else the plan predicts: gradient reduction, optimizer
          and transfers                                            -> reshare_batch()

The cost model knows one speed per kind of device. So the new plan's profile has all its
seconds multiplied by one factor: the ratio of (H2) with and without the slowdown. The
plan's predicted step then holds for these replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.mixed import fair_shares
from planner.executor.elastic.weigh import Rebalanced
from planner.replan.variants import PlanVariants, partition_of
from planner.replan.work import micro_batch_seconds
from planner.spec import ModelProfile, Plan

NANOSECONDS = 1e9
"""Per second: shares are computed in whole nanoseconds."""


def reshare_batch(
    plan: Plan, profile: ModelProfile, slowdown: Sequence[float]
) -> Rebalanced | None:
    """Return faster shares of the batch for replicas of unequal speed; None if there are none.

    Args:
        plan: to change.
        profile: that the plan was made from.
        slowdown: of each data-parallel rank, 1 being the predicted speed.

    Raises:
        UnsupportedError: the layout does not support unequal shares.
    """
    pipeline_ranks = plan.layout.pipeline_parallel_degree
    shares = plan.layout.shares(plan.request.job.global_batch_size)
    predicted = [max(row) for row in micro_batch_seconds(plan, profile)]
    slowed = [time * factor for time, factor in zip(predicted, slowdown, strict=True)]

    nanoseconds = [max(round(seconds * NANOSECONDS), 1) for seconds in slowed]
    new_shares = fair_shares(nanoseconds, sum(shares), pipeline_ranks - 1)
    if new_shares == shares or min(new_shares) == 0:
        return None

    def pipeline_seconds(shares: Sequence[int], seconds: Sequence[float]) -> float:
        """Seconds until the last replica is done: equation (H2)."""
        return max(
            (share + pipeline_ranks - 1) * each
            for share, each in zip(shares, seconds, strict=True)
        )

    step_seconds = plan.prediction.step_seconds
    other_seconds = max(step_seconds - pipeline_seconds(shares, predicted), 0.0)
    slowed_seconds = pipeline_seconds(new_shares, slowed)
    factor = slowed_seconds / pipeline_seconds(new_shares, predicted)

    is_equal = len(set(new_shares)) == 1
    partition = partition_of(plan)
    reshared = PlanVariants(plan, profile).plan(
        partition,
        [factor] * len(partition),
        micro_batch_shares=None if is_equal else new_shares,
    )
    if reshared is None:
        return None
    return Rebalanced(
        reshared,
        seconds_now=pipeline_seconds(shares, slowed) + other_seconds,
        seconds_then=slowed_seconds + other_seconds,
    )
