"""Hanayo: the stages of a rank stand on waves; a micro-batch runs down and up several times, without second copies.

Source: Liu et al. 2023, "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
Efficiency". W waves are V = 2 W stages per rank in snake placement. The paper gives no formula for the order; here
every rank runs what is ready, backwards first, with at most 2 P micro-batches under way and B = 2 F.

P ranks, M = P micro-batches, one wave, uniform f and b = 2 f of a stage, no transfer time:
    makespan   2 M (f + b) + 4 (P - 1) f: two thirds of the bubble of 1F1B
    in flight  at most M V units of 1 / V micro-batch
    transfers  2 M (P V - 1) less those inside a rank, where the way turns: 2 M V (P - 1)
"""

from __future__ import annotations

from functools import lru_cache

from planner.schedule.actions import Action
from planner.schedule.entry import ScheduleEntry, Shape, needs_even, wave_placement
from planner.schedule.greedy import backward_first


def check(shape: Shape) -> None:
    """Raise `LayoutError` unless every wave has its two stages on each rank."""
    needs_even("hanayo", "virtual_stages", shape.virtual_stages)


def rank_actions(shape: Shape, rank: int) -> tuple[Action, ...]:
    """This rank's part of the order."""
    return _orders(shape)[rank]


@lru_cache(maxsize=4)
def _orders(shape: Shape) -> tuple[tuple[Action, ...], ...]:
    return backward_first(wave_placement(shape), shape.micro_batches, limit=2 * shape.ranks)


HANAYO = ScheduleEntry(
    name="hanayo",
    summary="stages on waves, down and up in turn: a smaller bubble with every wave, without copies",
    rank_actions=rank_actions,
    aliases=("wave", "hanayowave"),
    stage_ranks=wave_placement,
    check=check,
    least_virtual_stages=2,
    most_virtual_stages=None,
)
