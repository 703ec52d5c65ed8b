"""Lower bounds of the step as shortest paths through the segments (`planner.search.segments`).

Every path through a schedule's order is a lower bound of the step, and a sum over stages:

    (5)  T >= sum over s of a(s) F(s) + b(s) B(s) + c(s) C(s), and the tail of the rank where the path ends     -> Cut

so the stage map that makes it least is a shortest path through the tables, found by dynamic programming:

    (H1)  from(s+1, y) = min over x of from(s, x) + cost(s, x, y), to(s, x) likewise from the last rank      -> Ways
    (H2)  a segment whose shortest path through it, for some cut, is no better than the incumbent is in no better
          stage map: it is struck out                                                                 -> Ways.through()

Schedules of one stage per rank, with u(s) forwards before the first backward on rank s, have these paths for every s;
with the layers before and behind as cheap as they can be, they bound every stage map that holds a segment [s, x, y]:

    (5a)  down to s, s alone for all M, then its tail; or up again, and rank 0's tail
    (5b)  down the whole pipe, up to s, M - u(s) forwards and M - 1 backwards of s, up again, and rank 0's tail; where
          M > u(s), of these only M - 1 - u(s) of each, and down from s to the last rank and up to s again: the last
          micro-batch has to come back, too
    (H3)  low(s, x, y) = largest of these; no stage map is faster than the path whose largest low is smallest
                                                                              -> segment_bounds(), most_even()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schedule import CriticalPath
from planner.search.segments import Mask, Segments, Table

NEVER = np.int64(2**61)
Path = tuple[tuple[int, int], ...]
"""(x, y) of the segment of every rank."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Coefficients of one path through the schedule: equation (5)."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    transfer: tuple[int, ...]
    """Per boundary, both directions together."""
    rank: int
    """Whose tail ends the path."""

    @classmethod
    def of(cls, path: CriticalPath) -> Cut:
        """The cut of a critical path that the simulator found."""
        both = zip(path.transfer_forward, path.transfer_backward, strict=True)
        return cls(path.forward, path.backward, tuple(map(sum, both)), path.rank)

    def costs(self, segments: Segments) -> Table:
        """What every segment adds to the path."""
        costs = _column(self.forward) * segments.forward + _column(self.backward) * segments.backward
        costs += _column((*self.transfer, 0)) * segments.transfer
        costs[self.rank] += segments.tail[self.rank]
        return costs


def _column(values: Sequence[int]) -> Table:
    """One value per rank, to multiply a table [s, x, y] with."""
    return np.array(values, dtype=np.int64)[:, None, None]


@dataclass(frozen=True, slots=True)
class Ways:
    """Shortest ways to and from every segment: equation (H1)."""

    costs: Table
    before: Table
    """[s, x]: from the first layer to where rank s starts."""
    behind: Table
    """[s, y]: from where rank s ends to the last layer."""

    @classmethod
    def of(cls, costs: Table, open_: Mask) -> Ways:
        """Ways over the open segments."""
        costs = np.where(open_, costs, NEVER)
        stages, width, _ = costs.shape
        before, behind = np.full((stages + 1, width), NEVER), np.full((stages + 1, width), NEVER)
        before[0, 0] = behind[stages, 0] = 0
        for s in range(stages):
            before[s + 1] = np.minimum((before[s][:, None] + costs[s]).min(axis=0), NEVER)
        for s in reversed(range(stages)):
            behind[s] = np.minimum((costs[s] + behind[s + 1][None, :]).min(axis=1), NEVER)
        return cls(costs, before[:-1], behind[1:])

    @property
    def least(self) -> int:
        """Length of the shortest path; `NEVER` when there is none."""
        return int(min(NEVER, (self.before[-1] + self.costs[-1, :, 0]).min()))

    def through(self) -> Table:
        """Length of the shortest path through every segment."""
        arrived = np.minimum(self.before[:, :, None] + self.costs, NEVER)
        table: Table = np.minimum(arrived + self.behind[:, None, :], NEVER)
        return table


def segment_bounds(segments: Segments, open_: Mask, warm_up: Sequence[int], micro_batches: int) -> Table:
    """low(s, x, y): no stage map that holds the segment is faster: equation (H3)."""
    once = segments.forward + segments.backward
    alone = micro_batches * once
    down = Ways.of(segments.forward + segments.transfer, open_)
    both = once + 2 * segments.transfer
    both[0] += segments.tail[0]
    ways = Ways.of(both, open_)
    ended_here = down.before[:, :, None] + alone + segments.tail
    up_again = ways.before[:, :, None] + alone
    up_again[0] += segments.tail[0]
    further = _column([micro_batches - u for u in warm_up]) * segments.forward
    through = ways.through()
    turned = through + further + (micro_batches - 1) * segments.backward
    back = once + 2 * segments.transfer + ways.behind[:, None, :]
    back = back + _column([max(0, micro_batches - 1 - u) for u in warm_up]) * once
    turned = np.maximum(turned, through + _column([int(u < micro_batches) for u in warm_up]) * back)
    low = np.maximum(np.maximum(ended_here, up_again), turned)
    return np.where(open_, np.minimum(low, NEVER), NEVER)


def most_even(sizes: Table, open_: Mask) -> tuple[int, Path] | None:
    """The path whose largest segment is smallest, by a size of every segment; None when there is no path."""
    values = np.where(open_, sizes, NEVER)
    stages, width, _ = values.shape
    reached = np.full(width, NEVER)
    reached[0] = 0
    came: list[NDArray[np.intp]] = []
    for s in range(stages):
        step = np.maximum(reached[:, None], values[s])
        came.append(step.argmin(axis=0))
        reached = step.min(axis=0)
    if reached[0] >= NEVER:
        return None
    path, y = [], 0
    for s in reversed(range(stages)):
        x = int(came[s][y])
        path.append((x, y))
        y = x
    return int(reached[0]), tuple(reversed(path))
