"""ZB-H1: 1F1B with the backward split, weight gradients fill the cool-down; the memory of 1F1B's first rank.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1; torch's ScheduleInterleavedZeroBubble, which
gives it several stages per rank too: micro-batches then run in the groups of interleaved 1F1B.

P ranks, M >= P micro-batches, one stage per rank, uniform F, I, W, no transfer time:
    warm-up    P - 1 - r forwards, and weight gradients put off by r
    span       M (F + I + W) + (P - 1) max(I, F + I - W)
    in flight  P micro-batches on every rank until W, P - r until I
    transfers  2 M (P - 1)
V stages per rank: the warm-up is (V - 1) G longer, with G micro-batches in a group.
"""

from __future__ import annotations

from planner.schedule.closed_forms import (
    Mask,
    Shapes,
    family_1f1b,
    has_equal_groups,
    rounds_of_ranks_or_one,
    warm_up_over_stages,
)
from planner.schedule.entry import ScheduleEntry, Shape, needs_micro_batches
from planner.schedule.interleaved_1f1b import check_groups, group_size
from planner.schedule.rows import Row
from planner.schedule.warm_up import (
    grouped_units,
    one_forward_one_backward,
    split_backwards,
)


def check(shape: Shape) -> None:
    """Raise `LayoutError` for fewer micro-batches than ranks, or, with several stages per rank, unequal groups."""
    needs_micro_batches("zb-h1", shape, shape.ranks, "pipeline ranks")
    if shape.virtual_stages > 1:
        check_groups("zb-h1", shape)


def accepts(shapes: Shapes) -> Mask:
    """Return which shapes `check` does not refuse."""
    accepted: Mask = (shapes.micro_batches >= shapes.ranks) & (
        (shapes.virtual_stages == 1) | has_equal_groups(shapes)
    )
    return accepted


def rank_actions(shape: Shape, rank: int) -> Row:
    """1F1B, weight gradients put off by one for every rank before."""
    group = group_size(shape) if shape.virtual_stages > 1 else shape.micro_batches
    forwards, backwards = grouped_units(
        shape, rank, (group,) * (shape.micro_batches // group)
    )
    warm_up = (shape.virtual_stages - 1) * group + shape.ranks - 1 - rank
    return split_backwards(
        one_forward_one_backward(forwards, backwards, warm_up), delay=rank
    )


ZB_H1 = ScheduleEntry(
    name="zb-h1",
    summary="1f1b with split backwards: a third of the bubble for the memory of its first rank",
    rank_actions=rank_actions,
    accepts=accepts,
    forms=family_1f1b(
        warm_up_over_stages(1, rounds_of_ranks_or_one),
        rounds_of_ranks_or_one,
        delay=lambda place: place.rank,
    ),
    aliases=("zb1p", "zerobubbleh1", "interleavedzerobubble"),
    check=check,
    most_virtual_stages=None,
    runnable=True,
)
