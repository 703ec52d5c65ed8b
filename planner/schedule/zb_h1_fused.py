"""Paddle's ZBH1: ZB-H1 with full backwards wherever weight gradients are not put off.

Source: Paddle's ``ZBH1`` pipeline pass. On the way back the full backwards hand their gradients on late, so its bubble
is larger than that of ZB-H1 (Qi et al. 2023), whose memory it has.

P ranks, M >= P micro-batches, uniform F, I, W, no transfer time:
    span       M (F + I + W) + max((P - 2) F + (P - 1) I, (P - 1) (F + I - W))
    in flight  P micro-batches on every rank until W
    transfers  2 M (P - 1)
"""

from __future__ import annotations

import numpy as np

from planner.schedule.closed_forms import Mask, Shapes, family_1f1b, warm_up_per_rank
from planner.schedule.entry import ScheduleEntry, Shape, needs_micro_batches
from planner.schedule.rows import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, Row
from planner.schedule.warm_up import micro_batches_in_order, one_forward_one_backward

NAME = "zb-h1-fused"


def check(shape: Shape) -> None:
    """Raise `LayoutError` for fewer micro-batches than ranks."""
    needs_micro_batches(NAME, shape, shape.ranks, "pipeline ranks")


def accepts(shapes: Shapes) -> Mask:
    """Return which shapes have as many micro-batches as ranks."""
    accepted: Mask = shapes.micro_batches >= shapes.ranks
    return accepted


def rank_actions(shape: Shape, rank: int) -> Row:
    """1F1B with the first r backwards and the last one split; the weight gradients of the first r stand at the end."""
    units = micro_batches_in_order(shape, rank)
    plain = one_forward_one_backward(units, units, warm_up=shape.ranks - 1 - rank)
    last = shape.micro_batches - 1
    late = np.array([last, *range(rank)] if rank else [], dtype=np.int64)
    kinds = np.where(
        (plain.kinds == BACKWARD) & np.isin(plain.units, late),
        BACKWARD_INPUT,
        plain.kinds,
    )
    kinds = np.append(kinds, np.full(len(late), BACKWARD_WEIGHT))
    return Row(np.full(len(kinds), rank), kinds, np.append(plain.units, late))


ZB_H1_FUSED = ScheduleEntry(
    name=NAME,
    summary="Paddle's zb-h1, which splits few backwards: a larger bubble for the same memory",
    rank_actions=rank_actions,
    accepts=accepts,
    forms=family_1f1b(warm_up_per_rank(1), delay=lambda place: place.rank),
    aliases=("zbh1paddle", "paddlezbh1"),
    check=check,
    runnable=True,
)
