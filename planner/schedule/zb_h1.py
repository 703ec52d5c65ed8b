"""ZB-H1: 1F1B with the backward split, weight gradients fill the cool-down; the memory of 1F1B's first rank.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1; torch's ScheduleInterleavedZeroBubble with one
stage per rank.

P ranks, M >= P micro-batches, uniform F, I, W, no transfer time:
    warm-up    P - 1 - r forwards, and weight gradients put off by r
    span       M (F + I + W) + (P - 1) max(I, F + I - W)
    in flight  P micro-batches on every rank until W, P - r until I
"""

from __future__ import annotations

from planner.schedule.actions import Action
from planner.schedule.entry import ScheduleEntry, Shape, needs_micro_batches
from planner.schedule.warm_up import micro_batches_in_order, one_forward_one_backward, split_backwards


def check(shape: Shape) -> None:
    """Raise `LayoutError` for fewer micro-batches than ranks."""
    needs_micro_batches("zb-h1", shape, shape.ranks, "pipeline ranks")


def rank_actions(shape: Shape, rank: int) -> tuple[Action, ...]:
    """1F1B, weight gradients put off by one for every rank before."""
    units = micro_batches_in_order(shape, rank)
    return split_backwards(one_forward_one_backward(units, units, shape.ranks - 1 - rank), delay=rank)


ZB_H1 = ScheduleEntry(
    name="zb-h1",
    summary="1f1b with split backwards: a third of the bubble for the memory of its first rank",
    rank_actions=rank_actions,
    aliases=("zb1p", "zerobubbleh1"),
    check=check,
)
