"""SeqPipe (Seq1F1B): 1F1B over sequence chunks; a bubble and a memory smaller by their number.

Source: see `planner.schedule.sequence`. Groups have P micro-batches; one stage per rank needs the warm-up of 1F1B,
several the longer one of interleaved 1F1B.

P ranks, V stages per rank, Q chunks of equal cost, M a multiple of P for V > 1, uniform F and B of one rank, no
transfer time:
    warm-up    (P - 1 - r) + Q - 1 units on rank r; for V > 1: 2 (P - 1 - r) + (V - 1) P Q + Q - 1
    makespan   M (F + B) + (P - 1) (F + B) / (V Q)
    in flight  min(M V Q, warm-up + 1) units of 1 / (V Q) micro-batch
    transfers  2 M Q (P V - 1)
"""

from __future__ import annotations

import numpy as np

from planner.schedule.closed_forms import (
    Place,
    family_1f1b,
    groups_of_ranks,
    warm_up_over_stages,
)
from planner.schedule.entry import ScheduleEntry, Shape
from planner.schedule.rows import Numbers, Row
from planner.schedule.sequence import equal_groups, sequence_actions


def rank_actions(shape: Shape, rank: int) -> Row:
    """Micro-batches in groups of the ranks."""
    groups = equal_groups(shape.micro_batches, shape.ranks)
    return sequence_actions(
        shape, rank, groups, ahead_per_rank=1 if shape.virtual_stages == 1 else 2
    )


_short = warm_up_over_stages(1, groups_of_ranks, all_chunks=True)
_long = warm_up_over_stages(2, groups_of_ranks, all_chunks=True)


def _warm_up(place: Place) -> Numbers:
    """The warm-up of 1F1B with one stage per rank, else that of interleaved 1F1B."""
    return np.where(place.shapes.virtual_stages == 1, _short(place), _long(place))


SEQPIPE = ScheduleEntry(
    name="seqpipe",
    summary="1f1b over sequence chunks: bubble and memory smaller by their number",
    rank_actions=rank_actions,
    forms=family_1f1b(_warm_up, groups_of_ranks),
    aliases=("seq1f1b", "sequencepipe"),
    most_virtual_stages=None,
    takes_sequence_chunks=True,
    runnable=True,
)
