"""DualPipe: two pipelines in opposite directions, forwards of one paired with backwards of the other.

Source: see `planner.schedule.dual`. Stage s stands on rank s for the way down and again on rank P - 1 - s for the way
up; the later half of the micro-batches goes up. Two copies of the weights, whose gradients are added up after the step.

P ranks and M micro-batches, both even, M >= 2 P, uniform F, I, W, pairs that save nothing, no transfer time:
    makespan   M (F + I + W) + bubble, with H = P / 2 and bubble = the largest of (H - 2) F + (H - 1) I,
               (H - 2) F + 2 (H - 1) I - (H - 1) W, 2 (H - 1) F, 2 (H - 1) F + (H - 1) (I - W)
    in flight  P + 1 micro-batches on every rank
    transfers  2 M (P - 1)
"""

from __future__ import annotations

from planner.schedule.actions import Action
from planner.schedule.closed_forms import Mask, Shapes
from planner.schedule.dual import Way, Written, eight_phases
from planner.schedule.entry import (
    ScheduleEntry,
    Shape,
    needs_even,
    needs_micro_batches,
    opposite_ranks,
)


def check(shape: Shape) -> None:
    """Raise `LayoutError` for odd numbers, or fewer micro-batches than twice the ranks."""
    needs_even("dualpipe", "ranks", shape.ranks)
    needs_even("dualpipe", "micro_batches", shape.micro_batches)
    needs_micro_batches("dualpipe", shape, 2 * shape.ranks, "2 * pipeline ranks")


def accepts(shapes: Shapes) -> Mask:
    """Return which shapes have even numbers and enough micro-batches."""
    accepted: Mask = (
        (shapes.ranks % 2 == 0)
        & (shapes.micro_batches % 2 == 0)
        & (shapes.micro_batches >= 2 * shapes.ranks)
    )
    return accepted


def rank_actions(shape: Shape, rank: int) -> tuple[Action, ...]:
    """The eight phases, from both ends to the middle."""
    return tuple(action for action, _ in _written(shape, rank))


def paired(shape: Shape, rank: int) -> tuple[Action, ...]:
    """Backwards beside a forward."""
    return tuple(action for action, is_paired in _written(shape, rank) if is_paired)


def _written(shape: Shape, rank: int) -> tuple[Written, ...]:
    each, opposite = shape.micro_batches // 2, shape.ranks - 1 - rank
    down, up = Way(rank, 0), Way(opposite, each)
    ways = (down, up) if rank < opposite else (up, down)
    return tuple(eight_phases(ways, shape.ranks // 2, min(rank, opposite), each))


DUALPIPE = ScheduleEntry(
    name="dualpipe",
    summary="two opposite pipelines whose forwards and backwards run side by side; two copies of the weights",
    rank_actions=rank_actions,
    accepts=accepts,
    check=check,
    replica_ranks=opposite_ranks,
    paired=paired,
    joint_pairs=True,
)
