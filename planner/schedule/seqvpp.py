"""SeqVPP: SeqPipe over several stages per rank with small groups, which hold less.

Source: see `planner.schedule.sequence`. A group has P / Q micro-batches, that is P units, instead of P Q.

P ranks, V >= 2 stages per rank, Q <= P chunks of equal cost, M Q >= P; closed forms for P % Q == 0, M Q % P == 0,
uniform F and B of one rank, no transfer time:
    warm-up    2 (P - 1 - r) + (V - 1) P + Q - 1 units on rank r
    makespan   M (F + B) + (P - 1) (F + B) / (V Q)
    in flight  min(M V Q, warm-up + 1) units of 1 / (V Q) micro-batch
    transfers  2 M Q (P V - 1)
"""

from __future__ import annotations

from planner.errors import LayoutError
from planner.schedule.closed_forms import (
    Mask,
    Shapes,
    comes_round,
    family_1f1b,
    fills_ranks,
    small_groups,
    warm_up_over_stages,
)
from planner.schedule.entry import ScheduleEntry, Shape
from planner.schedule.rows import Row
from planner.schedule.sequence import equal_groups, sequence_actions


def check_chunks(name: str, shape: Shape) -> None:
    """Raise `LayoutError` for more chunks than ranks, or too few units to fill the pipeline."""
    if shape.sequence_chunks > shape.ranks:
        raise LayoutError(
            f"{name} needs sequence_chunks <= pipeline ranks = {shape.ranks}, got {shape.sequence_chunks}.",
            field="sequence_chunks",
            hint=f"use at most {shape.ranks} sequence chunks, or seqpipe, which takes any number.",
        )
    units = shape.micro_batches * shape.sequence_chunks
    if units < shape.ranks:
        raise LayoutError(
            f"{name} needs micro_batches({shape.micro_batches}) * sequence_chunks({shape.sequence_chunks}) >= pipeline "
            f"ranks({shape.ranks}), got {units}.",
            field="micro_batches",
            hint=f"use at least {-(-shape.ranks // shape.sequence_chunks)} micro-batches.",
        )


def check(shape: Shape) -> None:
    """Raise `LayoutError` for numbers that do not fill the groups, or groups that dead-lock.

    A group that is two units or more shorter than the pipeline ends before its first unit has come round to the first
    rank's next stage, which may then wait for a backward that waits for it.
    """
    check_chunks("seqvpp", shape)
    groups = equal_groups(shape.micro_batches, shape.ranks // shape.sequence_chunks)
    units = min(groups) * shape.sequence_chunks
    if len(groups) > 1 and units < shape.ranks - 1:
        raise LayoutError(
            f"seqvpp runs groups of {units} units on {shape.ranks} ranks with sequence_chunks({shape.sequence_chunks}),"
            " too few to come round in time.",
            field="sequence_chunks",
            hint="use a number of sequence chunks that divides the pipeline ranks, or seqsmartvpp.",
        )


def accepts(shapes: Shapes) -> Mask:
    """Return which shapes `check` does not refuse."""
    accepted: Mask = fills_ranks(shapes) & comes_round(shapes)
    return accepted


def rank_actions(shape: Shape, rank: int) -> Row:
    """Micro-batches in groups whose chunks are as many as the ranks."""
    groups = equal_groups(shape.micro_batches, shape.ranks // shape.sequence_chunks)
    return sequence_actions(shape, rank, groups, ahead_per_rank=2)


SEQVPP = ScheduleEntry(
    name="seqvpp",
    summary="seqpipe over several stages per rank, in small groups: less memory than seqpipe there",
    rank_actions=rank_actions,
    accepts=accepts,
    forms=family_1f1b(
        warm_up_over_stages(2, small_groups, all_chunks=True), small_groups
    ),
    check=check,
    least_virtual_stages=2,
    most_virtual_stages=None,
    takes_sequence_chunks=True,
    runnable=True,
)
