"""DualPipeV: two stages per rank in a V, forwards of one paired with backwards of the other.

Source: see `planner.schedule.dual`; torch's ScheduleDualPipeV. MindSpore's ``zero_bubble_v`` is this order too, not
ZB-V's. The V folds DualPipe in the middle, which saves its second copy of the weights.

P ranks, M >= 2 P micro-batches, stages with equal f, i, w (half a rank's), pairs that save nothing, no transfer time:
    makespan   2 M (f + i + w) + bubble, with bubble = the largest of (P - 2) f + (P - 1) i,
               (P - 2) f + 2 (P - 1) i - (P - 1) w, 2 (P - 1) f, 2 (P - 1) f + (P - 1) (i - w)
    in flight  2 P + 1 units of half a micro-batch on every rank
    transfers  4 M (P - 1)
"""

from __future__ import annotations

from planner.schedule.actions import Action
from planner.schedule.closed_forms import DUALPIPEV_FORMS, Mask, Shapes
from planner.schedule.dual import Way, Written, eight_phases
from planner.schedule.entry import (
    ScheduleEntry,
    Shape,
    needs_micro_batches,
    v_placement,
)


def check(shape: Shape) -> None:
    """Raise `LayoutError` for fewer micro-batches than twice the ranks."""
    needs_micro_batches("dualpipev", shape, 2 * shape.ranks, "2 * pipeline ranks")


def accepts(shapes: Shapes) -> Mask:
    """Return which shapes have enough micro-batches."""
    accepted: Mask = shapes.micro_batches >= 2 * shapes.ranks
    return accepted


def rank_actions(shape: Shape, rank: int) -> tuple[Action, ...]:
    """The eight phases, down and up the V."""
    return tuple(action for action, _ in _written(shape, rank))


def paired(shape: Shape, rank: int) -> tuple[Action, ...]:
    """Backwards beside a forward."""
    return tuple(action for action, is_paired in _written(shape, rank) if is_paired)


def _written(shape: Shape, rank: int) -> tuple[Written, ...]:
    ways = Way(rank, 0), Way(2 * shape.ranks - 1 - rank, 0)
    return tuple(eight_phases(ways, shape.ranks, rank, shape.micro_batches))


DUALPIPEV = ScheduleEntry(
    name="dualpipev",
    summary="a V whose forwards and backwards run side by side, hiding communication; little bubble",
    rank_actions=rank_actions,
    accepts=accepts,
    forms=DUALPIPEV_FORMS,
    aliases=("zerobubblev", "cutinhalf"),
    stage_ranks=v_placement,
    check=check,
    least_virtual_stages=2,
    most_virtual_stages=2,
    paired=paired,
    joint_pairs=True,
    runnable=True,
)
