"""What a rank has left to do when its first gradient comes: a bound on layouts whose stages are dealt.

The first backward of a rank, of its stage s, waits for all forwards of that micro-batch and for its backwards above s.
Before it the rank runs n(k) forwards of its own stages k, which the schedule's row tells, and everything else after it:

    (E9)  T >= sum of F(k) + sum of B(k) above s + M w(rank) - sum of n(k) F(k) over its stages + tail(rank)
                                                                                     -> FirstGradients.least_ticks()
    (E10) where the rank's row ends with a backward of its lowest stage, that gradient still has the way up: the same
          with the sum of B(k) below that stage + tail(rank 0) in place of tail(rank)   -> FirstGradients.least_ticks()

Transfers count for nothing. Full backwards, whole sequences and one rank per stage only. A few ranks, from the first to
the last, are asked: neighbours hardly differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayoutCosts
from planner.schedule import find
from planner.schedule.entry import Shape, no_copies
from planner.schedule.rows import BACKWARD, FORWARD, Row
from planner.search.stage_maps.dealt import Uniform

_Numbers = NDArray[np.int64]
_ASKED = 5
"""Ranks, of all."""


@dataclass(frozen=True, slots=True)
class FirstGradients:
    """When the ranks of a schedule turn to their first backwards, and how they end."""

    ranks: _Numbers
    """That were asked."""
    stages: _Numbers
    """By rank asked: of the first backward."""
    forwards: _Numbers
    """By stage of these ranks: that its rank runs before."""
    lowest: _Numbers
    """By rank asked: its lowest stage."""
    ends_low: NDArray[np.bool_]
    """By rank asked: its last action is a backward of that."""

    def least_ticks(
        self,
        layers: Uniform,
        sizes: tuple[int, ...],
        ranks: tuple[int, ...],
        again: NDArray[np.float64],
    ) -> int:
        """Ticks that the step takes at least: equations (E9) and (E10).

        Args:
            layers: of the layout.
            sizes: layers of every stage.
            ranks: pipeline rank of every stage.
            again: by rank: ticks that a micro-batch's backwards take more than the layers tell.
        """
        starts = np.cumsum((0, *sizes[:-1]))
        per_layer = layers.forward, layers.backward, layers.tail
        forward, backward, tail = (np.add.reduceat(each, starts) for each in per_layer)
        left = layers.micro_batches * (forward + backward) - self.forwards * forward
        below = np.concatenate([[0], np.cumsum(backward)])
        work, tails = (np.bincount(ranks, weights=each) for each in (left, tail))
        mine = (work + layers.micro_batches * again)[self.ranks]
        done = forward.sum() + below[-1] - below[self.stages + 1] + mine
        up = np.where(self.ends_low, below[self.lowest] + tails[0], 0.0)
        return (
            int((done + np.maximum(tails[self.ranks], up)).max()) + layers.latency_ticks
        )


def layout_first_gradients(costs: LayoutCosts) -> FirstGradients | None:
    """Of a layout's schedule; None where the equations do not hold."""
    layout = costs.layout
    if (
        layout.sequence_chunks > 1
        or find(layout.schedule).replica_ranks is not no_copies
    ):
        return None
    numbers = (
        layout.pipeline_parallel_degree,
        costs.micro_batches,
        layout.virtual_stages_per_rank,
    )
    return first_gradients(layout.schedule, *numbers)


@lru_cache(maxsize=4096)
def first_gradients(
    name: str, ranks: int, micro_batches: int, virtual_stages: int
) -> FirstGradients | None:
    """Of a schedule of these numbers; None where a backward is split."""
    entry, shape = find(name), Shape(ranks, micro_batches, virtual_stages, 1)
    stages, lowest, ends = [], [], []
    forwards = np.zeros(ranks * virtual_stages, dtype=np.int64)
    asked = np.unique(np.linspace(0, ranks - 1, _ASKED).astype(np.int64))
    for rank in asked.tolist():
        row = Row.read(entry.rank_actions(shape, rank))
        if row.kinds.max() > max(FORWARD, BACKWARD):
            return None
        first = int((row.kinds == BACKWARD).argmax())
        forwards += np.bincount(row.stages[:first], minlength=len(forwards))
        stages.append(int(row.stages[first]))
        lowest.append(int(row.stages.min()))
        ends.append(bool(row.kinds[-1] == BACKWARD and row.stages[-1] == lowest[-1]))
    return FirstGradients(
        asked, np.array(stages), forwards, np.array(lowest), np.array(ends)
    )
