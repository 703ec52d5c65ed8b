"""GPipe: all forwards, then all backwards.

Source: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism". The
backwards run in the order of the forwards, as in torch's ScheduleGPipe, Paddle's FThenB and picotron's AFAB
(torchgpipe runs them in reverse: the same seconds, another order of summation).

P ranks, M micro-batches, uniform F and B, no transfer time:
    makespan   (M + P - 1) (F + B)
    in flight  M micro-batches on every rank
    transfers  2 M (P - 1)
"""

from __future__ import annotations

from planner.schedule.closed_forms import every_unit, family_1f1b
from planner.schedule.entry import ScheduleEntry, Shape
from planner.schedule.rows import Row
from planner.schedule.warm_up import micro_batches_in_order, one_forward_one_backward


def rank_actions(shape: Shape, rank: int) -> Row:
    """All forwards, then all backwards, first in first out."""
    units = micro_batches_in_order(shape, rank)
    return one_forward_one_backward(units, units, warm_up=shape.micro_batches)


GPIPE = ScheduleEntry(
    name="gpipe",
    summary="all forwards, then all backwards; holds every micro-batch",
    rank_actions=rank_actions,
    forms=family_1f1b(every_unit),
    aliases=("fthenb", "afab"),
    runnable=True,
)
