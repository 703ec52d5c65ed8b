"""The pattern behind the 1F1B family: some forwards ahead, then one forward and one backward in turn, then the rest.

Schedules of the family differ only in three things: how many forwards a rank runs ahead (its warm-up), in which order
it takes its units, and how long it puts off weight gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby

import numpy as np

from planner.schedule.entry import Shape
from planner.schedule.rows import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Numbers,
    Row,
    Units,
)


def micro_batches_in_order(shape: Shape, rank: int) -> Units:
    """The units of a rank with one stage."""
    return Units(np.full(shape.micro_batches, rank), np.arange(shape.micro_batches))


def grouped_units(
    shape: Shape, rank: int, groups: Iterable[int]
) -> tuple[Units, Units]:
    """Forward and backward order of a rank with several stages, in loop placement.

    Micro-batches run in groups of the given sizes; inside a group stage by stage, backwards from the last stage. With
    sequence chunks, those of a micro-batch run one after the other, backwards from the last one.
    """
    forwards, backwards = _loops(
        shape.virtual_stages, shape.sequence_chunks, tuple(groups)
    )

    def on_rank(units: Units) -> Units:
        return Units(rank + shape.ranks * units.stages, units.micro_batches)

    return on_rank(forwards), on_rank(backwards)


@lru_cache(maxsize=8)
def _loops(
    virtual_stages: int, chunks: int, groups: tuple[int, ...]
) -> tuple[Units, Units]:
    """`grouped_units` with stages counted on their rank; kept, since they are the same on every rank."""
    stages = np.arange(virtual_stages)[:, None, None]
    runs: list[tuple[Numbers, Numbers]] = []
    first = 0
    for size, same in groupby(groups):
        # By group, stage, micro-batch and chunk.
        units = np.arange(
            first, stop := first + size * chunks * len(list(same))
        ).reshape(-1, 1, size, chunks)
        shape_of_run = np.broadcast_shapes(stages.shape, units.shape)
        runs.append(
            (
                np.broadcast_to(stages, shape_of_run),
                np.broadcast_to(units, shape_of_run),
            )
        )
        first = stop
    forwards = Units(
        *(
            np.concatenate([run.ravel() for run in parts])
            for parts in zip(*runs, strict=True)
        )
    )
    turned = [
        [run[:, ::-1, :, ::-1].ravel() for run in parts]
        for parts in zip(*runs, strict=True)
    ]
    return forwards, Units(*map(np.concatenate, turned))


def one_forward_one_backward(forwards: Units, backwards: Units, warm_up: int) -> Row:
    """Actions of one rank: `warm_up` forwards, then forward and backward in turn, then the remaining backwards.

    A warm-up longer than the number of units is all forwards, then all backwards.
    """
    count = len(forwards)
    ahead = min(warm_up, count)
    each = np.arange(count)
    forward_places = each + np.maximum(0, each - ahead)
    backward_places = each + np.minimum(count, ahead + 1 + each)
    return Row.of(
        [(forward_places, FORWARD, forwards), (backward_places, BACKWARD, backwards)]
    )


def split_backwards(row: Row, delay: int) -> Row:
    """Split every full backward, and put weight gradients off by `delay` backwards.

    The k-th input gradient is followed by the weight gradient of the (k - delay)-th; what is left stands at the end.
    """
    is_backward = row.kinds == BACKWARD
    before = np.cumsum(is_backward) - is_backward
    places = np.arange(len(row)) + np.maximum(
        0, before - delay
    )  # moved behind the weight gradients between
    split, backwards = (
        places[is_backward],
        Units(row.stages[is_backward], row.units[is_backward]),
    )
    behind = len(row) + np.arange(len(split))
    weights = np.append(split[delay:] + 1, behind[max(0, len(split) - delay) :])
    others = Units(row.stages[~is_backward], row.units[~is_backward])
    return Row.of(
        [
            (places[~is_backward], row.kinds[~is_backward], others),
            (split, BACKWARD_INPUT, backwards),
            (weights, BACKWARD_WEIGHT, backwards),
        ]
    )
