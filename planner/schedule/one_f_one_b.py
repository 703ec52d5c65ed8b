"""1F1B: after a short warm-up, one forward and one backward in turn.

Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush); DAPPLE;
Megatron-LM without interleaving; torch's Schedule1F1B, whose loop runs the same actions (it and Paddle refuse M < P,
Megatron-LM does not). It needs the seconds of GPipe, and less memory: that it allows more micro-batches is its gain.

P ranks, M micro-batches (any number), uniform F and B, no transfer time:
    warm-up    P - 1 - r forwards on rank r
    makespan   (M + P - 1) (F + B)
    in flight  min(M, P - r) micro-batches on rank r
    transfers  2 M (P - 1), of c each: 2 c (M + P - 3 - floor((M - 2) / P)) longer for M >= P
"""

from __future__ import annotations

from planner.schedule.closed_forms import family_1f1b, warm_up_per_rank
from planner.schedule.entry import ScheduleEntry, Shape
from planner.schedule.rows import Row
from planner.schedule.warm_up import micro_batches_in_order, one_forward_one_backward


def rank_actions(shape: Shape, rank: int) -> Row:
    """As many forwards ahead as there are ranks behind, then one forward and one backward in turn."""
    units = micro_batches_in_order(shape, rank)
    return one_forward_one_backward(units, units, warm_up=shape.ranks - 1 - rank)


ONE_F_ONE_B = ScheduleEntry(
    name="1f1b",
    summary="one forward and one backward in turn; holds no more micro-batches than ranks",
    rank_actions=rank_actions,
    forms=family_1f1b(warm_up_per_rank(1)),
    aliases=("pipedreamflush", "dapple", "onefoneb"),
    runnable=True,
)
