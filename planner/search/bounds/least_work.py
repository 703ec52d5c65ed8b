"""What layers that are split in one way take at least, whatever the schedule, the stage map and the rest.

w(l) are the fewest ticks of layer l for one micro-batch, f(l) those of its forward. On P pipeline ranks that all run M
micro-batches:

    (K1)  T >= M times the longest w(l): the rank that holds the layer does that
    (K2)  T >= (M sum of w(l) + sum over k < P of D(k)) / P, with D(k) the forwards of the first k layers. It is a mean
          over the P ranks: each has a lowest stage of its own, so the k-th of these stands behind k layers at least;
          its rank begins once the first micro-batch has come down to it, and then does all of its work
    (K3)  T >= sum of w(l) less its weight gradients: one way down and up, equation (B4)           -> LeastWork.step()

With Q sequence chunks f(l), and what (K3) counts, are those of the first one, as in (Q2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayerCost
from planner.search.bounds.layout import first_chunk, work_of
from planner.spec.profile import RecomputeMode

Ticks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LeastWork:
    """Fewest ticks of all layers for one micro-batch."""

    forward: int
    total: int
    """Forward and backward."""
    longest: int
    passing: int
    """What (K3) counts."""
    down: Ticks
    """By number of pipeline ranks, from 1: the sum of D(k) in (K2)."""

    @classmethod
    def of(cls, rows: Ticks) -> Self:
        """Of the rows of `by_layer`."""
        forward, work, passing = rows
        down = np.concatenate([[0], forward[:-1]]).cumsum().cumsum()
        return cls(
            int(forward.sum()),
            int(work.sum()),
            int(work.max()),
            int(passing.sum()),
            down,
        )

    def step(self, pipeline: int, micro_batches: int) -> int:
        """Ticks of a step on so many pipeline ranks: the largest of (K1) to (K3)."""
        mean = -(
            -(micro_batches * self.total + int(self.down[pipeline - 1])) // pipeline
        )
        return max(micro_batches * self.longest, mean, self.passing)

    def steps(self, pipeline: int, micro_batches: Ticks) -> Ticks:
        """`step` by number of micro-batches."""
        mean = -(-(micro_batches * self.total + self.down[pipeline - 1]) // pipeline)
        bound: Ticks = np.maximum(
            np.maximum(micro_batches * self.longest, mean), self.passing
        )
        return bound


def by_layer(layers: Sequence[Mapping[RecomputeMode, LayerCost]], chunks: int) -> Ticks:
    """By layer: the first forward, all work of a micro-batch, and what layers before it wait for, each at its least.

    Args:
        layers: cost of every layer in its modes; identical layers share one.
        chunks: of every sequence.
    """
    least = {
        id(options): _least(options.values(), chunks)
        for options in {id(each): each for each in layers}.values()
    }
    return np.array([least[id(options)] for options in layers], dtype=np.int64).T


def _least(costs: Iterable[LayerCost], chunks: int) -> tuple[int, int, int]:
    choices = tuple(costs)
    return min(first_chunk(cost, chunks)[0] for cost in choices), *work_of(
        choices, chunks
    )
