"""ZB-H2: eager 1F1B with the backward split; no bubble between steps, for twice the memory.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.2. Its span is ideal for F = I = W; its makespan
is not, so it pays only when no rank waits for a barrier between steps (the paper validates the optimizer step later).

P ranks, M >= 2 P - 1 micro-batches, uniform F, I, W, no transfer time:
    warm-up    2 (P - 1 - r) forwards, and weight gradients put off by 2 r
    span       M (F + I + W) + (P - 1) max(0, I - F, F + I - 2 W)
    in flight  2 P - 1 micro-batches on every rank until W, 2 (P - r) - 1 until I
    transfers  2 M (P - 1)
"""

from __future__ import annotations

from planner.schedule.closed_forms import Mask, Shapes, family_1f1b, warm_up_per_rank
from planner.schedule.entry import ScheduleEntry, Shape, needs_micro_batches
from planner.schedule.rows import Row
from planner.schedule.warm_up import (
    micro_batches_in_order,
    one_forward_one_backward,
    split_backwards,
)


def check(shape: Shape) -> None:
    """Raise `LayoutError` for fewer micro-batches than twice the ranks, less one."""
    needs_micro_batches("zb-h2", shape, 2 * shape.ranks - 1, "2 * pipeline ranks - 1")


def accepts(shapes: Shapes) -> Mask:
    """Return which shapes have enough micro-batches."""
    accepted: Mask = shapes.micro_batches >= 2 * shapes.ranks - 1
    return accepted


def rank_actions(shape: Shape, rank: int) -> Row:
    """Eager 1F1B, weight gradients put off by two for every rank before."""
    units = micro_batches_in_order(shape, rank)
    return split_backwards(
        one_forward_one_backward(units, units, 2 * (shape.ranks - 1 - rank)),
        delay=2 * rank,
    )


ZB_H2 = ScheduleEntry(
    name="zb-h2",
    summary="eager-1f1b with split backwards: no bubble between steps without a barrier, twice the memory",
    rank_actions=rank_actions,
    accepts=accepts,
    forms=family_1f1b(warm_up_per_rank(2), delay=lambda place: 2 * place.rank),
    aliases=("zb2p", "zerobubbleh2"),
    check=check,
    runnable=True,
)
