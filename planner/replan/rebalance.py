"""Moves layers away from pipeline ranks that are slow.

Local search over the layers per stage: in each round the best move of one layer from a
stage to another, until no move makes the step shorter. Every partition is priced with the
slowdown of the ranks that would hold its layers. Which stage belongs to which rank is the
schedule's choice and does not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations
from math import inf

from planner.errors import LayoutError
from planner.executor.elastic.weigh import Rebalanced
from planner.replan.variants import LayersPerStage, PlanVariants, partition_of
from planner.spec import ModelProfile, Plan


def rebalance_layers(
    plan: Plan, profile: ModelProfile, slowdown: Sequence[float]
) -> Rebalanced | None:
    """Return a faster partition for ranks of unequal speed; None if there is none.

    Args:
        plan: with one or several stages per pipeline rank.
        profile: that the plan was made from.
        slowdown: of each pipeline rank, 1 being the predicted speed.
    """
    variants = PlanVariants(plan, profile)
    stage_ranks = [stage.pipeline_rank for stage in plan.stages]
    stage_slowdown = [slowdown[rank] for rank in stage_ranks]

    @cache
    def step_seconds(partition: LayersPerStage) -> float:
        try:
            forecast = variants.predict(partition, stage_slowdown)
        except LayoutError:
            return inf
        # A synthesized order may place the stages on other ranks, whose slowdown differs.
        keeps_ranks = [each.pipeline_rank for each in forecast.stages] == stage_ranks
        if not forecast.fits or not keeps_ranks:
            return inf
        return forecast.prediction.step_seconds

    current = partition_of(plan)
    best = current
    while True:
        neighbour = min(_neighbours(best), key=step_seconds, default=best)
        if step_seconds(neighbour) >= step_seconds(best):
            break
        best = neighbour
    if best == current or step_seconds(current) == inf:
        return None
    rebalanced = variants.plan(best, stage_slowdown)
    if rebalanced is None:
        return None
    return Rebalanced(rebalanced, step_seconds(current), step_seconds(best))


def _neighbours(partition: LayersPerStage) -> Iterator[LayersPerStage]:
    """Every partition with one layer less in a stage and one more in another.

    Stages are contiguous: those in between pass a layer on.
    """
    for giver, taker in permutations(range(len(partition)), 2):
        if partition[giver] > 1:
            counts = list(partition)
            counts[giver] -= 1
            counts[taker] += 1
            yield tuple(counts)
