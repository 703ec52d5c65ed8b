"""SeqSmartVPP: SeqVPP with the shorter warm-up: the least memory, but transfers are no longer hidden.

Source: see `planner.schedule.sequence`; MindSpore asks for an even number of ranks.

As SeqVPP, but
    warm-up    (P - 1 - r) + (V - 1) P + Q - 1 units on rank r
    in flight  min(M V Q, warm-up + 1) units of 1 / (V Q) micro-batch
"""

from __future__ import annotations

from planner.schedule.closed_forms import (
    Mask,
    Shapes,
    family_1f1b,
    fills_ranks,
    small_groups,
    warm_up_over_stages,
)
from planner.schedule.entry import ScheduleEntry, Shape, needs_even
from planner.schedule.rows import Row
from planner.schedule.sequence import equal_groups, sequence_actions
from planner.schedule.seqvpp import check_chunks


def check(shape: Shape) -> None:
    """Raise `LayoutError` for an odd number of ranks, or numbers that do not fill the groups."""
    needs_even("seqsmartvpp", "ranks", shape.ranks)
    check_chunks("seqsmartvpp", shape)


def accepts(shapes: Shapes) -> Mask:
    """Return which shapes `check` does not refuse."""
    accepted: Mask = fills_ranks(shapes) & (shapes.ranks % 2 == 0)
    return accepted


def rank_actions(shape: Shape, rank: int) -> Row:
    """SeqVPP's units, half as many ahead per rank behind."""
    groups = equal_groups(shape.micro_batches, shape.ranks // shape.sequence_chunks)
    return sequence_actions(shape, rank, groups, ahead_per_rank=1)


SEQSMARTVPP = ScheduleEntry(
    name="seqsmartvpp",
    summary="seqvpp with the shorter warm-up: the least memory, exposed transfers",
    rank_actions=rank_actions,
    accepts=accepts,
    forms=family_1f1b(
        warm_up_over_stages(1, small_groups, all_chunks=True), small_groups
    ),
    check=check,
    least_virtual_stages=2,
    most_virtual_stages=None,
    takes_sequence_chunks=True,
    runnable=True,
)
