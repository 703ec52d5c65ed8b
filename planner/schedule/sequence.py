"""What the sequence-chunk schedules share: 1F1B over chunks of each micro-batch's sequence.

Under causal attention a chunk's forward reads the keys and values of the chunks before it, and its backward gathers
the gradients of the chunks after it: forwards run the chunks in order, backwards in reverse. Chunks of equal length
do not last equally long, so give `Durations` per chunk, or cut the sequence by cost.

Source: Sun et al. 2024, "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training";
MindSpore's seqpipe scheduler, whose groups and warm-ups we take.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.schedule.entry import Shape
from planner.schedule.rows import Row
from planner.schedule.warm_up import grouped_units, one_forward_one_backward


def equal_groups(micro_batches: int, size: int) -> tuple[int, ...]:
    """Groups of `size` micro-batches, or one smaller one; what is left over goes to the first groups in turn."""
    groups = max(1, micro_batches // size)
    each, more = divmod(micro_batches, groups)
    return tuple(each + (index < more) for index in range(groups))


def sequence_actions(
    shape: Shape, rank: int, groups: Sequence[int], ahead_per_rank: int
) -> Row:
    """1F1B over sequence chunks, micro-batches in groups, inside a group virtual stage by virtual stage.

    Args:
        shape: the numbers.
        rank: whose actions.
        groups: micro-batches of each group.
        ahead_per_rank: forwards of warm-up per rank behind: 2 hides transfers, 1 holds less.
    """
    forwards, backwards = grouped_units(shape, rank, groups)
    chunks, virtual = shape.sequence_chunks, shape.virtual_stages
    behind = shape.ranks - 1 - rank
    return one_forward_one_backward(
        forwards,
        backwards,
        behind * ahead_per_rank + (virtual - 1) * groups[0] * chunks + chunks - 1,
    )
