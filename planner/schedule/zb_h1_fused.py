"""Paddle's ZBH1: ZB-H1 with full backwards wherever weight gradients are not put off.

Source: Paddle's ``ZBH1`` pipeline pass. On the way back the full backwards hand their gradients on late, so its bubble
is larger than that of ZB-H1 (Qi et al. 2023), whose memory it has.

P ranks, M >= P micro-batches, uniform F, I, W, no transfer time:
    span       M (F + I + W) + max((P - 2) F + (P - 1) I, (P - 1) (F + I - W))
    in flight  P micro-batches on every rank until W
    transfers  2 M (P - 1)
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.schedule.actions import Action, ActionKind
from planner.schedule.entry import ScheduleEntry, Shape, needs_micro_batches

NAME = "zb-h1-fused"


def check(shape: Shape) -> None:
    """Raise `LayoutError` for fewer micro-batches than ranks."""
    needs_micro_batches(NAME, shape, shape.ranks, "pipeline ranks")


def rank_actions(shape: Shape, rank: int) -> tuple[Action, ...]:
    """Split the first r backwards and the last one; the weight gradients of the first r stand at the end."""
    return tuple(Action(rank, ActionKind(kind), micro_batch) for kind, micro_batch in _order(shape, rank))


def _order(shape: Shape, rank: int) -> Iterator[tuple[str, int]]:
    ahead, last = shape.ranks - rank, shape.micro_batches - 1
    yield from (("F", micro_batch) for micro_batch in range(ahead))
    for micro_batch in range(ahead, shape.micro_batches):
        backward = micro_batch - ahead
        yield ("I" if backward < rank else "B"), backward
        yield "F", micro_batch
    yield from (("B", micro_batch) for micro_batch in range(last - ahead + 1, last))
    yield from (("I", last), ("W", last)) if rank else (("B", last),)
    yield from (("W", micro_batch) for micro_batch in range(rank))


ZB_H1_FUSED = ScheduleEntry(
    name=NAME,
    summary="Paddle's zb-h1, which splits few backwards: a larger bubble for the same memory",
    rank_actions=rank_actions,
    aliases=("zbh1paddle", "paddlezbh1"),
    check=check,
    runnable=True,
)
