"""torchgpipe: GPipe with backwards in reverse, and recomputation while a rank waits for the gradient.

Source: Kim et al. 2020, "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models": forwards are issued by
deterministic clock cycles, in the order of micro-batch + rank, which on each rank is GPipe's order; the autograd graph
holds the backwards of a rank in reverse order; recomputation needs no gradient, so it runs ahead of one.

P ranks, M micro-batches, uniform F, B without recomputation, and R <= B, no transfer time:
    recompute  n micro-batches: all (``always``), all but the last, whose backward comes right after its forward
               (``except_last``, the default), or none (``never``)
    makespan   (M + P - 1) (F + B) + n R
    in flight  M micro-batches on every rank; those that recompute hold only their input until then
    transfers  2 M (P - 1)
"""

from __future__ import annotations

from planner.schedule.closed_forms import FORWARDS_FIRST
from planner.schedule.entry import ScheduleEntry, Shape
from planner.schedule.rows import Row
from planner.schedule.warm_up import micro_batches_in_order, one_forward_one_backward

MODES = ("except_last", "always", "never")


def rank_actions(shape: Shape, rank: int) -> Row:
    """All forwards, then all backwards, last in first out."""
    units = micro_batches_in_order(shape, rank)
    return one_forward_one_backward(
        units, units.reversed(), warm_up=shape.micro_batches
    )


def recompute_stop(shape: Shape) -> int:
    """Micro-batches below this one recompute (torchgpipe's ``checkpoint_stop``)."""
    return {
        "always": shape.micro_batches,
        "except_last": shape.micro_batches - 1,
        "never": 0,
    }[shape.recompute]


TORCHGPIPE = ScheduleEntry(
    name="torchgpipe",
    summary="gpipe with backwards in reverse and recomputation while waiting; keeps one micro-batch's activations",
    rank_actions=rank_actions,
    forms=FORWARDS_FIRST,
    recompute_modes=MODES,
    recompute_stop=recompute_stop,
    runnable=True,
)
