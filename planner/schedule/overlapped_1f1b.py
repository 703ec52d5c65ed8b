"""1F1B with overlap of backward and forward: the two actions of the steady state run side by side.

Source: Paddle's ``1f1b_backward_forward_overlap``: the backward and the forward of a steady pair are cut at their
tensor-parallel all-reduces and interleaved, so that one computes while the other communicates. The order of actions
is 1F1B's; each half hands its result on at its own end. Without communication to hide, nothing is gained.

P ranks, M >= P micro-batches, uniform F and B, pairs that save h (`Durations.overlap`), no transfer time:
    warm-up    P - 1 - r forwards on rank r
    makespan   (M + P - 1) (F + B) - (M - 1) h on one rank; with more, the h of the pairs on the longest path
    in flight  P - r micro-batches on rank r
    transfers  2 M (P - 1)
"""

from __future__ import annotations

from itertools import pairwise

from planner.schedule.actions import Action, ActionKind
from planner.schedule.closed_forms import family_1f1b, warm_up_per_rank
from planner.schedule.entry import ScheduleEntry, Shape
from planner.schedule.one_f_one_b import rank_actions


def paired(shape: Shape, rank: int) -> tuple[Action, ...]:
    """Every forward right after a backward."""
    neighbours = pairwise(rank_actions(shape, rank))
    return tuple(
        late
        for early, late in neighbours
        if (early.kind, late.kind) == (ActionKind.BACKWARD, ActionKind.FORWARD)
    )


OVERLAPPED_1F1B = ScheduleEntry(
    name="1f1b-overlap",
    summary="1f1b whose steady backward and forward run side by side, hiding tensor-parallel communication",
    rank_actions=rank_actions,
    forms=family_1f1b(warm_up_per_rank(1)),
    aliases=("1f1bbackwardforwardoverlap", "overlapped1f1b"),
    paired=paired,
    runnable=True,
)
