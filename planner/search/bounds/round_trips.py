"""What transfers cost a pipeline of one stage per rank: lower bounds of two neighbouring segments at once.

Under 1f1b rank s holds u(s) = P - s micro-batches, so the next forward waits for a backward, which waits for the ranks
behind, and every wait pays the transfers. With t = f + b of a segment and c(s) the transfer behind it, the ranks s to
s + k - 1 go on like this: the backward of micro-batch j comes up to s, where the forward of j + u(s) starts, goes down
to s + k - 1, and is followed there by the backward of j + k. These k micro-batches take sum t + 2 sum c, whatever else:

    (5c)  T >= R + n (sum of t over s .. s + k - 1 + 2 sum of c between them) + (M - 1 - u(e) - k n) t(e) + R(e)
          R: down the whole pipe and up again with one micro-batch, and rank 0's tail; R(e): from rank e down to the
          last and up to e again, as the last micro-batch does; n = floor((M - 1 - u(s)) / k); e: the first or the last
          of the k ranks, whose other micro-batches follow each other. It holds where M > u(s)
    (H5)  for k = 2: no stage map is faster than the path whose dearest pair of neighbouring segments is cheapest, and
          what lies on no path of pairs below the limit is struck out                -> Neighbours.through(), .path()

Where M <= u(s), as under gpipe, nobody waits but once: R is all that a pair tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np

from planner.search.bounds.layout import warm_ups
from planner.search.stage_maps.lanes import Lane
from planner.search.stage_maps.paths import NEVER, Path, Ways
from planner.search.stage_maps.segments import Mask, Table

_BLOCK = 2**20
"""Triples of boundaries that are looked at together."""


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Sums of which the bounds of all pairs of neighbouring segments consist, where ranks act alike: equation (5c)."""

    first: Table
    """What the segment of rank s adds to a pair, [s, x, y]."""
    second: Table
    """What that of rank s + 1 adds, [s, y, z]."""
    on_first: Table
    """What is more where e is rank s, [s, x, y]."""
    on_second: Table
    """What is more where e is rank s + 1, [s, y, z]."""

    @classmethod
    def of(cls, lane: Lane, open_: Mask) -> Self:
        """Of the open segments of a lane."""
        segments, count, warm_up = (
            lane.segments,
            lane.costs.micro_batches,
            warm_ups(lane.costs),
        )
        work, moved = segments.forward + segments.backward, 2 * segments.transfer
        both = work + moved
        both[0] += segments.tail[0]
        ways = Ways.of(both, open_)
        further = [max(0, count - 1 - units) for units in warm_up[:-1]]
        turns, left = (
            _column([each // 2 for each in further]),
            _column([each % 2 for each in further]),
        )
        waits = _column([int(count > units) for units in warm_up[:-1]])
        behind = ways.behind[1:, None, :]
        first = ways.before[:-1, :, None] + both[:-1] + turns * (work + moved)[:-1]
        second = both[1:] + turns * work[1:] + behind + waits * (both[1:] + behind)
        ahead = _column([here - there for here, there in pairwise(warm_up)])
        return cls(
            np.minimum(first, NEVER),
            np.minimum(second, NEVER),
            waits * (work + moved)[:-1] + left * work[:-1],
            waits * (left + ahead) * work[1:],
        )

    def between(self, s: int, x: slice, y: slice, z: slice) -> Table:
        """Of rank s and the next one with boundaries in these places, [x, y, z]."""
        joint = self.first[s, x, y, None] + self.second[s, None, y, z]
        more = np.maximum(self.on_first[s, x, y, None], self.on_second[s, None, y, z])
        table: Table = np.minimum(joint + more, NEVER)
        return table


@dataclass(frozen=True)
class Neighbours:
    """Lower bounds of the open segments by pairs of neighbouring ones, in every lane: equation (H5)."""

    open: Mask
    lanes: tuple[_Pairs, ...]

    @classmethod
    def of(cls, lanes: Sequence[Lane], open_: Mask) -> Self:
        """Of a layout of gpipe or 1f1b."""
        return cls(open_, tuple(_Pairs.of(lane, open_) for lane in lanes))

    @cached_property
    def before(self) -> Table:
        """The least that the dearest pair up to a segment takes, [s, x, y]."""
        reached = np.where(self.open, 0, NEVER)
        for s in range(len(reached) - 1):
            x, z = self._spans[s], self._spans[s + 2]
            for y in _blocks(self._spans[s + 1], x, z):
                pairs = np.maximum(self._pairs(s, x, y, z), reached[s, x, y, None])
                reached[s + 1, y, z] = np.maximum(
                    reached[s + 1, y, z], pairs.min(axis=0)
                )
        return reached

    @cached_property
    def behind(self) -> Table:
        """The least that the dearest pair from a segment on takes, [s, x, y]."""
        reached = np.where(self.open, 0, NEVER)
        for s in reversed(range(len(reached) - 1)):
            x, z = self._spans[s], self._spans[s + 2]
            for y in _blocks(self._spans[s + 1], x, z):
                pairs = np.maximum(self._pairs(s, x, y, z), reached[s + 1, None, y, z])
                reached[s, x, y] = np.maximum(reached[s, x, y], pairs.min(axis=2))
        return reached

    @property
    def triples(self) -> int:
        """Of boundaries that are to be looked at."""
        spans = [each.stop - each.start for each in self._spans]
        return sum(
            x * y * z for x, y, z in zip(spans, spans[1:], spans[2:], strict=False)
        )

    def through(self) -> Table:
        """No stage map that holds a segment is faster, [s, x, y]."""
        table: Table = np.maximum(self.before, self.behind)
        return table

    def path(self) -> Path | None:
        """The path whose dearest pair is cheapest; None where there is none."""
        before, x, path = 0, 0, []
        for s, behind in enumerate(self.behind):
            here = behind[x]
            if s > 0:
                pairs = self._pairs(
                    s - 1, slice(before, before + 1), slice(x, x + 1), slice(None)
                )
                here = np.maximum(here, pairs[0, 0])
            y = int(here.argmin())
            if here[y] >= NEVER:
                return None
            path.append((x, y))
            before, x = x, y
        return tuple(path)

    @cached_property
    def _spans(self) -> list[slice]:
        """Of every boundary: its places where something is open."""
        leaving, entering = np.any(self.open, axis=2), np.any(self.open, axis=1)
        used = [leaving[0], *np.logical_or(leaving[1:], entering[:-1]), entering[-1]]
        places = [np.flatnonzero(each) for each in used]
        return [
            slice(int(each[0]), int(each[-1]) + 1) if len(each) else slice(0, 0)
            for each in places
        ]

    def _pairs(self, s: int, x: slice, y: slice, z: slice) -> Table:
        """Of rank s and the next one with boundaries in these places, [x, y, z]."""
        table: Table = np.maximum.reduce(
            [lane.between(s, x, y, z) for lane in self.lanes]
        )
        return table


def _blocks(y: slice, x: slice, z: slice) -> Iterator[slice]:
    """Parts of a span for which all triples of boundaries are few enough to be looked at together."""
    step = max(1, _BLOCK // max(1, (x.stop - x.start) * (z.stop - z.start)))
    for start in range(y.start, y.stop, step):
        yield slice(start, min(y.stop, start + step))


def _column(values: Sequence[int]) -> Table:
    """One value per rank, to multiply a table [s, x, y] with."""
    return np.array(values, dtype=np.int64)[:, None, None]
