"""Lower bounds of the step as shortest paths through the segments (`planner.search.stage_maps.segments`).

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
          micro-batch has to come back, too; or as many forwards of s as it begins with, before the last of these goes
          on down and up again
    (5d)  under gpipe down the whole pipe with M forwards of s on the way, and up again with M backwards of any other
          rank z, and rank 0's tail: W + (M - 1) (F(s) + B(z)), W being once down and up
    (H3)  low(s, x, y) = largest of these; no stage map is faster than the path whose largest low is smallest
                                                                              -> segment_bounds(), most_even()
    (H6)  (5b) and (5d) are W and some more of one rank; the dearest of all ranks lies between two of some edges, so
          that W is that of a path of segments that are no dearer, and a step is W and the lower edge at least
                                                                                            -> bottleneck_bounds()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schedule import CriticalPath
from planner.search.stage_maps.segments import Mask, Segments, Table

NEVER = np.int64(2**61)
_EDGES = 8
"""Of (H6)."""
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
        costs = (
            _column(self.forward) * segments.forward
            + _column(self.backward) * segments.backward
        )
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
        before, behind = (
            np.full((stages + 1, width), NEVER),
            np.full((stages + 1, width), NEVER),
        )
        before[0, 0] = behind[stages, 0] = 0
        for s in range(stages):
            before[s + 1] = np.minimum(
                (before[s][:, None] + costs[s]).min(axis=0), NEVER
            )
        for s in reversed(range(stages)):
            behind[s] = np.minimum(
                (costs[s] + behind[s + 1][None, :]).min(axis=1), NEVER
            )
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


def segment_bounds(
    segments: Segments, open_: Mask, warm_up: Sequence[int], micro_batches: int
) -> Table:
    """low(s, x, y): no stage map that holds the segment is faster: equation (H3)."""
    once = segments.forward + segments.backward
    alone = micro_batches * once
    down = Ways.of(segments.forward + segments.transfer, open_)
    ways = Ways.of(_both_ways(segments), open_)
    ended_here = down.before[:, :, None] + alone + segments.tail
    up_again = ways.before[:, :, None] + alone
    up_again[0] += segments.tail[0]
    through = ways.through()
    back = once + 2 * segments.transfer + ways.behind[:, None, :]
    back = back + _column([max(0, micro_batches - 1 - u) for u in warm_up]) * once
    back = _column([int(u < micro_batches) for u in warm_up]) * back
    turned = through + np.maximum(_turned(segments, warm_up, micro_batches), back)
    low = np.maximum(np.maximum(ended_here, up_again), turned)
    return np.where(open_, np.minimum(low, NEVER), NEVER)


def _both_ways(segments: Segments) -> Table:
    """What a segment adds to once down the pipe and up again, and rank 0's tail."""
    both = segments.forward + segments.backward + 2 * segments.transfer
    both[0] += segments.tail[0]
    return both


def _turned(segments: Segments, warm_up: Sequence[int], micro_batches: int) -> Table:
    """What more than that a rank takes by (5b): all of its forwards but the first ones that others wait for."""
    ahead = [min(micro_batches, units) - 1 for units in warm_up]
    behind = [
        max(0, micro_batches - units - begun)
        for units, begun in zip(warm_up, ahead, strict=True)
    ]
    further = _column([micro_batches - units for units in warm_up]) * segments.forward
    begun = _column(list(map(sum, zip(ahead, behind, strict=True)))) * segments.forward
    left = _column([micro_batches - 1 - units for units in ahead]) * segments.backward
    table: Table = np.maximum(
        further + (micro_batches - 1) * segments.backward, begun + left
    )
    return table


def bottleneck_bounds(
    segments: Segments,
    open_: Mask,
    warm_up: Sequence[int],
    micro_batches: int,
    *,
    is_gpipe: bool,
) -> Table:
    """No stage map that holds the segment is faster: equation (H6)."""
    once, least = _both_ways(segments), np.full_like(segments.forward, NEVER)
    others = (
        (micro_batches - 1) * segments.backward if is_gpipe else np.zeros_like(least)
    )
    more = (
        (micro_batches - 1) * segments.forward
        if is_gpipe
        else _turned(segments, warm_up, micro_batches)
    )
    even = most_even(more, open_)
    if even is None:
        return least
    dearer = np.unique(more[open_ & (more > even[0])])
    some = np.linspace(0, len(dearer) - 1, min(_EDGES, len(dearer))).astype(np.intp)
    edges = [even[0], *dearer[some].tolist()]
    for lower, upper in zip([even[0], *edges], edges, strict=False):
        held = open_ & (more <= upper)
        other = most_even(others, held)
        if other is not None:
            dearest = np.maximum(more, lower) + np.maximum(others, other[0])
            least = np.minimum(least, Ways.of(once, held).through() + dearest)
    table: Table = np.minimum(least, NEVER)
    return table


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
