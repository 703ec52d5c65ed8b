"""Hanayo: the stages of a rank stand on waves; a micro-batch runs down and up several times, without second copies.

Source: Liu et al. 2023, "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
Efficiency": Chimera with its two directions folded into one. Rank r of Chimera on 2 P ranks has a stage of the way down
and one of the way up; when its micro-batches of the way up are the ones that came down, the upper P ranks need not be
there, nor their copies of the weights. W waves are V = 2 W stages per rank in snake placement.

P ranks, V stages per rank, S = P V stages, units of P micro-batches; uniform f and b of a stage, no transfer time:
    slots      of micro-batch j of unit u: F(s) = 2 S u + 2 j + s, B(s) = 2 S u + 2 j + 2 S - 1 - s; no two of a rank's
               actions share one, and a rank runs in their order. One wave and unit: Chimera's slots on 2 P ranks
    makespan   V M (f + b) + 2 (P - 1) (max(f, b) + (M / P - 1) |b - f|), M a multiple of P: each wave halves the bubble
    in flight  (V - 1) P + r + 1 units of 1 / V micro-batch on rank r, for M >= P
    transfers  2 M (P V - 1) less those inside a rank, where the way turns: 2 M V (P - 1)
"""

from __future__ import annotations

import numpy as np

from planner.schedule.closed_forms import HANAYO_FORMS, Mask, Shapes
from planner.schedule.entry import ScheduleEntry, Shape, needs_even, wave_placement
from planner.schedule.rows import BACKWARD, FORWARD, Row


def check(shape: Shape) -> None:
    """Raise `LayoutError` unless every wave has its two stages on each rank."""
    needs_even("hanayo", "virtual_stages", shape.virtual_stages)


def accepts(shapes: Shapes) -> Mask:
    """Return which shapes have an even number of stages per rank."""
    accepted: Mask = shapes.virtual_stages % 2 == 0
    return accepted


def rank_actions(shape: Shape, rank: int) -> Row:
    """The rank's actions by slot."""
    owners = wave_placement(shape)
    turn, each = 2 * len(owners), np.arange(shape.micro_batches)
    first = turn * (each // shape.ranks) + 2 * (each % shape.ranks)
    stages = np.flatnonzero(np.array(owners) == rank)[:, None]
    slots = np.concatenate([first + stages, first + (turn - 1 - stages)]).ravel()
    kinds = np.repeat([FORWARD, BACKWARD], len(slots) // 2)
    order = slots.argsort()
    both = np.tile(np.broadcast_to(stages, (len(stages), len(each))).ravel(), 2)
    return Row(both[order], kinds[order], np.tile(each, 2 * len(stages))[order])


HANAYO = ScheduleEntry(
    name="hanayo",
    summary="stages on waves, down and up in turn: a smaller bubble with every wave, without copies",
    rank_actions=rank_actions,
    accepts=accepts,
    forms=HANAYO_FORMS,
    aliases=("wave", "hanayowave"),
    stage_ranks=wave_placement,
    check=check,
    least_virtual_stages=2,
    most_virtual_stages=None,
    runnable=True,
)
