"""Interleaved 1F1B (virtual pipeline): several stages per rank make the bubble smaller, for more transfers.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
section 2.2; Megatron-LM's ``forward_backward_pipelining_with_interleaving``; torch's ScheduleInterleaved1F1B, whose
group size we take: micro-batches run in groups of G = M / max(1, M // P), chunk by chunk inside a group.

P ranks, V stages per rank, M micro-batches, uniform F and B of one rank (F / V and B / V of a stage), no transfer time,
M a multiple of P:
    warm-up    (V - 1) G + 2 (P - 1 - r) units on rank r
    makespan   M (F + B) + (P - 1) (F + B) / V
    in flight  min(M V, warm-up + 1) units of 1 / V micro-batch
    transfers  2 M (P V - 1)
"""

from __future__ import annotations

from planner.errors import LayoutError
from planner.schedule.closed_forms import (
    Mask,
    Shapes,
    family_1f1b,
    has_equal_groups,
    rounds_of_ranks,
    warm_up_over_stages,
)
from planner.schedule.entry import ScheduleEntry, Shape
from planner.schedule.rows import Row
from planner.schedule.warm_up import grouped_units, one_forward_one_backward


def check(shape: Shape) -> None:
    """Raise `LayoutError` unless the micro-batches make whole groups."""
    check_groups("interleaved-1f1b", shape)


def check_groups(name: str, shape: Shape) -> None:
    """Raise `LayoutError` unless the micro-batches make equal groups."""
    rounds = _rounds(shape)
    if shape.micro_batches % rounds == 0:
        return
    below = shape.micro_batches // shape.ranks * shape.ranks
    raise LayoutError(
        f"{name} runs {shape.micro_batches} micro-batches on {shape.ranks} pipeline ranks in {rounds} equal groups, "
        f"and {shape.micro_batches} % {rounds} = {shape.micro_batches % rounds}.",
        field="micro_batches",
        hint=f"use a multiple of {shape.ranks}, e.g. {below} or {below + shape.ranks}.",
    )


def group_size(shape: Shape) -> int:
    """Micro-batches of a group."""
    return shape.micro_batches // _rounds(shape)


def accepts(shapes: Shapes) -> Mask:
    """Return which shapes make equal groups."""
    accepted: Mask = has_equal_groups(shapes)
    return accepted


def rank_actions(shape: Shape, rank: int) -> Row:
    """All but the last chunk of a group ahead, and two units more per rank behind: one each way hides transfers."""
    group = group_size(shape)
    forwards, backwards = grouped_units(shape, rank, (group,) * _rounds(shape))
    warm_up = (shape.virtual_stages - 1) * group + 2 * (shape.ranks - 1 - rank)
    return one_forward_one_backward(forwards, backwards, warm_up)


def _rounds(shape: Shape) -> int:
    return max(1, shape.micro_batches // shape.ranks)


INTERLEAVED_1F1B = ScheduleEntry(
    name="interleaved-1f1b",
    summary="1f1b over several stages per rank: a smaller bubble, more transfers",
    rank_actions=rank_actions,
    accepts=accepts,
    forms=family_1f1b(warm_up_over_stages(2, rounds_of_ranks), rounds_of_ranks),
    aliases=("interleaved", "vpp"),
    check=check,
    least_virtual_stages=2,
    most_virtual_stages=None,
    runnable=True,
)
