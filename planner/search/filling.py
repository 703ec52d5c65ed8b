"""A lower bound where pipeline ranks differ that knows that layers are whole and lie in order: greedy filling.

The linear bound of `planner.search.spread` may put any part of a layer on any rank. Stages are runs of whole layers.
With the symbols of (U1), w = f + b, and W what one micro-batch takes down the pipe and up again, with transfers and the
tail of rank 0, a stage [i, j) on rank p is in no stage map that fits and takes T ticks or less unless

    (N1)  1f1b:            W + sum of (M - u) f + (M - 1) b <= T                                                (5b)
          1f1b, M > u:     W + sum of (M - u) w + what lies behind j <= T, as the last micro-batch comes back   (5b)
          gpipe:           W + sum of (M - 1) w <= T: all backwards wait for all forwards, and run in their order
          either of them:  P(i) + sum of M w + tail <= T, P(i) the forwards before i                            (5a)
    (N2)  sum of o + u a, with the outputs in flight and what is received, is no more than the room R     (M1), (M2)
    (N3)  for any price m >= 0 of a byte, the sum of the least over modes of what (N1) counts, + m times what (N2)
          counts, is no more than what (N1) leaves of T, + m R (Lagrange). Prices that are tried: none, and rates at
          which recomputation trades ticks for bytes                                                -> _Rank.limits()
    (N4)  these grow with the stage, so that greedy filling tells where every rank can start: (W4)         -> _filled()
    (N5)  a layer lies on one of the ranks whose windows hold it, and takes no less than the fastest of these: that
          tells W, P(i) and what lies behind, which narrow the windows again                        -> Filling._left()
    (N6)  a step takes longer than any T that leaves no windows                                     -> Filling.bound()

(5a) and (5b) are those of `planner.search.paths`, (W4) that of `planner.search.windows`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np

from planner.cost import RECEIVE_BUFFERS
from planner.search.spread import ROUNDING, Floats, RankLoad
from planner.search.windows import Windows

_RATES = 4
"""At which ticks are traded for bytes, that are tried."""
_ROUNDS = 4
"""Of narrowing windows: two or three are mostly enough."""
_CLOSE = 2e-3
"""Relative gap between what leaves no windows and what does at which it is not halved any more."""
_FIRST_STEP = 1.05
"""From what is known to the first T that is tried; where it leaves no windows, the next steps are longer."""


@dataclass(frozen=True, slots=True)
class InOrder:
    """What the layers of a model take of a rank, one by one, [mode, layer]."""

    forward: Floats
    """Ticks of a micro-batch."""
    backward: Floats
    ogp_bytes: Floats
    activation_bytes: Floats
    tail: Floats
    once: Floats
    """Forward, and forward and backward, in the mode in which it takes least, [2, layer]."""
    boundary_bytes: Floats
    """Behind every number of layers, from none to all."""
    rates: Floats
    """Ticks of a micro-batch for a byte of it, at which modes are traded."""

    @property
    def count(self) -> int:
        """Of the layers."""
        return len(self.boundary_bytes) - 1

    @classmethod
    def of(cls, load: RankLoad) -> Self:
        """The layers of a load that tells their places."""
        assert load.places is not None, "layers are filled in by their places"
        places, counts = load.places, np.bincount(load.places, minlength=len(load.forward))[:, None]
        tables = (load.forward, load.backward, load.ogp_bytes, load.activation_bytes, load.tail)
        each = [np.broadcast_to(table, load.forward.shape) / counts for table in tables]
        once = np.stack([each[0].min(axis=1), (each[0] + each[1]).min(axis=1)])[:, places]
        boundaries = np.zeros(len(places)) if load.boundary_bytes is None else load.boundary_bytes
        behind = np.concatenate([[0.0], boundaries])
        forward, backward, ogp, activations, tail = (table[places].T for table in each)
        return cls(forward, backward, ogp, activations, tail, once, behind, _rates(each[1], each[3]))


def _rates(backward: Floats, activations: Floats) -> Floats:
    """A few of all, spread evenly over their order; of kinds of layers, [kind, mode]."""
    cheapest = backward.argmin(axis=1)[:, None]
    longer = backward - np.take_along_axis(backward, cheapest, axis=1)
    freed = np.take_along_axis(activations, cheapest, axis=1) - activations
    is_trade = (freed > 0) & (longer > 0)
    rates = np.unique(longer[is_trade] / freed[is_trade])
    some: Floats = rates[np.linspace(0, len(rates) - 1, min(_RATES, len(rates))).astype(np.intp)]
    return some


class _Limit(NamedTuple):
    """A sum over a stage [i, j) that has a limit: stops(j) - starts(i) <= room + what is left of T."""

    stops: list[float]
    """By j: the least of what stands there and further behind, so that they rise."""
    starts: list[float]
    """By i: the most of what stands there and further ahead."""
    room: float


_Limits = tuple[list[_Limit], ...]
"""By what is left of T: that of all it takes to go down and up, and back again; of what lies before; nothing."""


class _Left(NamedTuple):
    """Of T for a rank's own micro-batches, by the ways of (N1), and for (N2)."""

    turned: float
    returned: float
    alone: float
    held: float = 0.0


@dataclass(frozen=True)
class _Rank:
    """One pipeline rank of a column."""

    layers: InOrder
    micro_batches: int
    behind: int
    """Ranks."""
    in_flight: int
    is_first: bool
    room_bytes: float

    def limits(self, rates: Floats, *, is_gpipe: bool) -> _Limits:
        """Equations (N1) to (N3), by what they leave of T; at prices of bytes that follow from these rates."""
        count, ahead = self.micro_batches, min(self.micro_batches, self.behind + 1)
        own_tail = self.layers.tail if self.is_first else 0.0
        returned: list[_Limit] = []
        if is_gpipe:
            turned = self._priced(count - 1, count - 1, own_tail, rates)
        else:
            turned = self._priced(count - ahead, count - 1, own_tail, rates)
            if count > ahead:
                returned = self._priced(count - ahead, count - ahead, own_tail, rates)
        alone = self._priced(count, count, self.layers.tail, rates)
        return turned, returned, alone, self._limits(self._held[None], np.ones(1))

    def _priced(self, forwards: int, backwards: int, tail: Floats | float, rates: Floats) -> list[_Limit]:
        """Ticks of so many forwards and backwards, bytes for nothing and at every price: equation (N3)."""
        ticks = forwards * self.layers.forward + backwards * self.layers.backward + tail
        prices = np.concatenate([[0.0], rates * (backwards / self.in_flight)])
        return self._limits(ticks + prices[:, None, None] * self._held, prices)

    @cached_property
    def _held(self) -> Floats:
        held: Floats = self.layers.ogp_bytes + self.in_flight * self.layers.activation_bytes
        return held

    def _limits(self, counted: Floats, prices: Floats) -> list[_Limit]:
        """Of the least over modes, summed up, with boundaries at the prices of their bytes: [price, mode, layer]."""
        sums = np.zeros((len(prices), counted.shape[2] + 1))
        counted.min(axis=1).cumsum(axis=1, out=sums[:, 1:])
        boundaries = prices[:, None] * self.layers.boundary_bytes
        outgoing = self.in_flight + (RECEIVE_BUFFERS if self.behind else 0)
        stops = np.minimum.accumulate((sums + outgoing * boundaries)[:, ::-1], axis=1)[:, ::-1]
        starts = np.maximum.accumulate(sums - RECEIVE_BUFFERS * boundaries, axis=1)
        rooms = prices * (self.room_bytes * (1 + ROUNDING))
        return [_Limit(*each) for each in zip(stops.tolist(), starts.tolist(), rooms.tolist(), strict=True)]


def _furthest(limits: _Limits, start: int, left: _Left) -> int:
    """Where a stage ends at most that starts there."""
    reached = [
        bisect_right(each.stops, each.starts[start] + each.room + ticks)
        for several, ticks in zip(limits, left, strict=True)
        for each in several
    ]
    return min(reached) - 1


def _nearest(limits: _Limits, stop: int, left: _Left) -> int:
    """Where a stage starts at least that ends there."""
    reached = [
        bisect_left(each.starts, each.stops[stop] - each.room - ticks)
        for several, ticks in zip(limits, left, strict=True)
        for each in several
    ]
    return max(reached)


@dataclass(frozen=True)
class Filling:
    """The ranks of a column under one schedule, as whole layers fill them in order."""

    ranks: tuple[_Rank, ...]
    is_gpipe: bool
    """The schedule; otherwise it is 1f1b."""
    transfers: tuple[Floats, ...]
    """Ticks behind every rank but the last, there and back, by number of layers before."""

    @classmethod
    def of(
        cls,
        loads: Sequence[RankLoad],
        micro_batches: int,
        in_flight: Sequence[int],
        *,
        is_gpipe: bool,
        transfers: Sequence[Sequence[int]] = (),
    ) -> Self:
        """A column.

        Args:
            loads: of its pipeline ranks, in order; they tell the places of all layers.
            micro_batches: M.
            in_flight: how many of them every rank holds at once, at least.
            is_gpipe: the schedule; otherwise it is 1f1b.
            transfers: ticks behind every rank but the last, one way, by the last layer before; without: 0.
        """
        known = {key: InOrder.of(load) for key, load in {id(load): load for load in loads}.items()}
        ranks = tuple(
            _Rank(
                layers=known[id(load)],
                micro_batches=micro_batches,
                behind=len(loads) - 1 - place,
                in_flight=in_flight[place],
                is_first=place == 0,
                room_bytes=load.room_bytes,
            )
            for place, load in enumerate(loads)
        )
        moved = transfers or [[0] * ranks[0].layers.count] * (len(ranks) - 1)
        return cls(ranks, is_gpipe, tuple(2.0 * np.array([0, *each]) for each in moved))

    def bound(self, known_ticks: int, limit_ticks: int) -> int:
        """Ticks that no stage map beats, known ones or more: equation (N6).

        Args:
            known_ticks: that no stage map beats.
            limit_ticks: that leave windows; what is no better is not told.
        """
        low, high, step = float(max(1, known_ticks)), float(limit_ticks), _FIRST_STEP
        while high - low > _CLOSE * high:
            middle = min((low + high) / 2, low * step)
            if self.leaves(middle):
                high = middle
            else:
                low, step = middle, step * step
        return max(known_ticks, int(low * (1 - ROUNDING)))

    def leaves(self, ticks: float, *, roughly: bool = False) -> bool:
        """May a stage map that fits take so many ticks or less?

        Args:
            ticks: T.
            roughly: with bytes for nothing, which takes less time to tell.
        """
        return self._windows(ticks, self._plain) is not None and (roughly or self.windows(ticks) is not None)

    def windows(self, ticks: float) -> Windows | None:
        """Where ranks can start in stage maps that fit and take so many ticks or less; None: there are none."""
        return self._windows(ticks, self._limits)

    @cached_property
    def _plain(self) -> list[_Limits]:
        """By rank; bytes for nothing: mostly that is enough."""
        return [rank.limits(np.zeros(0), is_gpipe=self.is_gpipe) for rank in self.ranks]

    @cached_property
    def _limits(self) -> list[_Limits]:
        """By rank."""
        return [rank.limits(rank.layers.rates, is_gpipe=self.is_gpipe) for rank in self.ranks]

    def _windows(self, ticks: float, limits: Sequence[_Limits]) -> Windows | None:
        found = Windows.everywhere(self.ranks[0].layers.count, len(self.ranks))
        for _ in range(_ROUNDS):
            left = self._left(ticks, found)
            narrowed = _filled(limits, left) if left else None
            if narrowed is None or narrowed == found:
                return narrowed
            found = narrowed
        return found

    def _left(self, ticks: float, windows: Windows) -> list[_Left]:
        """What the stages in these windows leave every rank of a step: equation (N5); nothing where no rank's window
        holds some layer."""
        least = np.full((2, self.ranks[0].layers.count), np.inf)
        for p, rank in enumerate(self.ranks):
            held = slice(windows.least[p], windows.most[p + 1])
            least[:, held] = np.minimum(least[:, held], rank.layers.once[:, held])
        if np.isinf(least).any():
            return []
        down, before = np.pad(least.cumsum(axis=1), ((0, 0), (1, 0))).tolist()
        cuts = [slice(first, last + 1) for first, last in zip(windows.least, windows.most, strict=True)][1:-1]
        moved = [float(each[cut].min()) for each, cut in zip(self.transfers, cuts, strict=True)]
        moved_behind = [*accumulate(reversed(moved), initial=0.0)][::-1]
        passing = before[-1] + sum(moved)
        tail = float(self.ranks[0].layers.tail[0, : windows.least[1]].sum())
        left = []
        for p in range(len(self.ranks)):
            turned = ticks - passing - (tail if p else 0.0)
            behind = before[-1] - before[windows.most[p + 1]] + moved_behind[p]
            left.append(_Left(turned, turned - behind, ticks - down[windows.least[p]]))
        return left


def _filled(every: Sequence[_Limits], left: Sequence[_Left]) -> Windows | None:
    """Equation (N4). A layer that fits on no rank where greedy filling has it may still lie on another."""
    layers, stages = len(every[0][-1][0].stops) - 1, len(every)
    most, least = [0], [layers]
    for p, limits in enumerate(every):
        most.append(min(_furthest(limits, most[-1], left[p]), layers - (stages - 1 - p)))
        if most[-1] <= p:
            return None
    if most[-1] < layers:
        return None
    for p in reversed(range(stages)):
        least.append(max(p, _nearest(every[p], least[-1], left[p])))
        if least[-1] > most[p]:
            return None
    return Windows(tuple(reversed(least)), tuple(most))
