"""Interleaved 1F1B with the shorter warm-up: less memory, but transfers are no longer hidden.

Source: MindSpore's interleaved scheduler (``MemoryOptimizedReorder``). The first group has P + M % P micro-batches,
the later ones P.

P ranks, V stages per rank, M >= P micro-batches, uniform F and B of one rank, no transfer time, M a multiple of P:
    warm-up    (V - 1) (P + M % P) + (P - 1 - r) units on rank r
    makespan   M (F + B) + (P - 1) (F + B) / V
    in flight  warm-up + 1 units of 1 / V micro-batch
    transfers  2 M (P V - 1)
"""

from __future__ import annotations

from planner.schedule.closed_forms import (
    Mask,
    Shapes,
    family_1f1b,
    longer_first_group,
    warm_up_over_stages,
)
from planner.schedule.entry import ScheduleEntry, Shape, needs_micro_batches
from planner.schedule.rows import Row
from planner.schedule.warm_up import grouped_units, one_forward_one_backward

NAME = "interleaved-memory-optimised"


def check(shape: Shape) -> None:
    """Raise `LayoutError` for fewer micro-batches than ranks."""
    needs_micro_batches(NAME, shape, shape.ranks, "pipeline ranks")


def accepts(shapes: Shapes) -> Mask:
    """Return which shapes have as many micro-batches as ranks."""
    accepted: Mask = shapes.micro_batches >= shapes.ranks
    return accepted


def rank_actions(shape: Shape, rank: int) -> Row:
    """All but the last chunk of the first group ahead, and one unit more per rank behind."""
    first = shape.ranks + shape.micro_batches % shape.ranks
    groups = (first, *(shape.ranks,) * (shape.micro_batches // shape.ranks - 1))
    forwards, backwards = grouped_units(shape, rank, groups)
    warm_up = (shape.virtual_stages - 1) * first + shape.ranks - 1 - rank
    return one_forward_one_backward(forwards, backwards, warm_up)


INTERLEAVED_MEMORY_OPTIMISED = ScheduleEntry(
    name=NAME,
    summary="interleaved-1f1b with the shorter warm-up: less memory, exposed transfers",
    rank_actions=rank_actions,
    accepts=accepts,
    forms=family_1f1b(warm_up_over_stages(1, longer_first_group), longer_first_group),
    aliases=("interleavedmemoryoptimized", "interleavedmemopt"),
    check=check,
    least_virtual_stages=2,
    most_virtual_stages=None,
    runnable=True,
)
