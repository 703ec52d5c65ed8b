"""Eager 1F1B: 1F1B with twice the warm-up, so that transfers hide behind compute.

Source: Zhuang et al. 2022, "On Optimizing the Communication of Model Parallelism" (Alpa's overlap-friendly 1F1B);
Paddle's Eager1F1B, which asks for M >= 2 P - 1; here, as in Alpa, a shorter step caps the warm-up.

P ranks, M micro-batches, uniform F and B:
    warm-up    2 (P - 1 - r) forwards on rank r
    makespan   (M + P - 1) (F + B), and with transfers of c <= (F + B) / 2: 2 (P - 1) c more
    in flight  min(M, 2 (P - r) - 1) micro-batches on rank r
    transfers  2 M (P - 1)
"""

from __future__ import annotations

from planner.schedule.closed_forms import family_1f1b, warm_up_per_rank
from planner.schedule.entry import ScheduleEntry, Shape
from planner.schedule.rows import Row
from planner.schedule.warm_up import micro_batches_in_order, one_forward_one_backward


def rank_actions(shape: Shape, rank: int) -> Row:
    """Twice as many forwards ahead as there are ranks behind."""
    units = micro_batches_in_order(shape, rank)
    return one_forward_one_backward(units, units, warm_up=2 * (shape.ranks - 1 - rank))


EAGER_1F1B = ScheduleEntry(
    name="eager-1f1b",
    summary="1f1b with twice the warm-up: hides transfers, holds about twice the micro-batches",
    rank_actions=rank_actions,
    forms=family_1f1b(warm_up_per_rank(2)),
    aliases=("1f1boverlapfriendly",),
    runnable=True,
)
