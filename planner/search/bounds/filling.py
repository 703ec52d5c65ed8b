"""A lower bound where pipeline ranks differ that knows that layers are whole and lie in order: greedy filling.

The linear bound of `bounds.spread` may put any part of a layer on any rank. Stages are runs of whole layers.
With the symbols of (U1), w = f + b, and W what one micro-batch takes down the pipe and up again, with transfers and the
tail of rank 0, a stage [i, j) on rank p is in no stage map that fits and takes T ticks or less unless

    (N1)  1f1b:            W + sum of (M - u) f + (M - 1) b <= T                                                (5b)
          1f1b, M > u:     W + sum of (M - u) w + what lies behind j <= T, as the last micro-batch comes back   (5b)
          gpipe:           W + sum of (M - 1) w <= T: all backwards wait for all forwards, and run in their order
          either of them:  P(i) + sum of M w + tail <= T, P(i) the forwards before i                            (5a)
    (N2)  sum of o + u a, with the outputs in flight and what is received, is no more than the room R     (M1), (M2)
    (N3)  for any price m >= 0 of a byte, the sum of the least over modes of what (N1) counts, + m times what (N2)
          counts, is no more than what (N1) leaves of T, + m R (Lagrange). Prices that are tried: none, and rates at
          which recomputation trades ticks for bytes; within the windows that no price leaves  -> Filling.windows()
    (N4)  these grow with the stage, so that greedy filling tells where every rank can start: (W4)         -> _filled()
    (N5)  a layer lies on one of the ranks whose windows hold it, and takes no less than the fastest of these: that
          tells W, P(i) and what lies behind, which narrow the windows again                        -> Filling._left()
    (N6)  a step takes longer than any T that leaves no windows                                     -> Filling.bound()
    (N7)  without transfers, what (N1) counts under 1f1b is at most what it counts under gpipe, on a rank or as the mean
          over it, M - u times, and the ranks behind: no windows of 1f1b, none of gpipe     -> loads._Bounding._open()

(5a) and (5b) are those of `planner.search.stage_maps.paths`, (W4) that of `planner.search.stage_maps.windows`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import RECEIVE_BUFFERS
from planner.search.bounds.spread import ROUNDING, Floats, RankLoad
from planner.search.stage_maps.windows import Windows

_RATES = 4
"""At which ticks are traded for bytes, that are tried."""
_ROUNDS = 4
"""Of narrowing windows: two or three are mostly enough."""
_CLOSE = 5e-3
"""Relative gap between what leaves no windows and what does at which it is not halved any more."""
_FIRST_STEP = 1.05
"""From what is known to the first T that is tried; where it leaves no windows, the next steps are longer."""


@dataclass(frozen=True)
class InOrder:
    """What the layers of a model take of the ranks of a column, one by one, [mode, device, layer]."""

    forward: Floats
    """Ticks of a micro-batch."""
    backward: Floats
    ogp_bytes: Floats
    activation_bytes: Floats
    tail: Floats
    boundary_bytes: Floats
    """Behind every number of layers, from none to all, [device, layers]."""
    devices: NDArray[np.intp]
    """Which of them every pipeline rank stands on."""

    @property
    def count(self) -> int:
        """Of the layers."""
        return int(self.boundary_bytes.shape[1]) - 1

    @classmethod
    def of(cls, loads: Sequence[RankLoad]) -> Self:
        """The layers of loads that have them in order; ranks on devices that are alike share one."""
        assert all(load.in_order for load in loads), (
            "layers are filled in by their order"
        )
        distinct = {id(load): load for load in loads}
        numbers = {key: number for number, key in enumerate(distinct)}
        each = [*zip(*map(_tables, distinct.values()), strict=True)]
        forward, backward, ogp, activations, tail = (
            np.stack(same).transpose(2, 0, 1) for same in each[:-1]
        )
        boundaries = np.zeros((len(distinct), forward.shape[-1] + 1))
        boundaries[:, 1:] = each[-1]
        devices = np.array([numbers[id(load)] for load in loads])
        return cls(forward, backward, ogp, activations, tail, boundaries, devices)

    @cached_property
    def once(self) -> Floats:
        """Forward, and forward and backward, in the mode in which it takes least, [2, device, layer]."""
        return np.stack(
            [self.forward.min(axis=0), (self.forward + self.backward).min(axis=0)]
        )

    @cached_property
    def rates(self) -> Floats:
        """Ticks of a micro-batch for a byte of it, at which modes are traded, [rate, device]."""
        each = [
            *map(
                _rates,
                self.backward.swapaxes(0, 1),
                self.activation_bytes.swapaxes(0, 1),
            )
        ]
        most = max(map(len, each))
        return np.stack([np.pad(one, (0, most - len(one))) for one in each], axis=1)


def _tables(load: RankLoad) -> tuple[Floats, ...]:
    """Those of `InOrder`, of one device, [layer, mode], and what goes on behind every layer."""
    tables = (
        load.forward,
        load.backward,
        load.ogp_bytes,
        load.activation_bytes,
        load.tail,
    )
    boundaries = (
        np.zeros(len(load.forward))
        if load.boundary_bytes is None
        else load.boundary_bytes
    )
    return (
        *(np.broadcast_to(table, load.forward.shape) for table in tables),
        boundaries,
    )


def _rates(backward: Floats, activations: Floats) -> Floats:
    """A few of all, spread evenly over their order; of layers, [mode, layer]."""
    cheapest = backward.argmin(axis=0)[None]
    longer = backward - np.take_along_axis(backward, cheapest, axis=0)
    freed = np.take_along_axis(activations, cheapest, axis=0) - activations
    is_trade = (freed > 0) & (longer > 0)
    rates = np.unique(longer[is_trade] / freed[is_trade])
    some: Floats = rates[
        np.linspace(0, len(rates) - 1, min(_RATES, len(rates))).astype(np.intp)
    ]
    return some


class _Left(NamedTuple):
    """Of T for a rank's own micro-batches, by the ways of (N1), and for (N2)."""

    turned: float
    returned: float
    alone: float
    held: float = 0.0


_TURNED, _RETURNED, _ALONE, _HELD = range(4)


class _Limit(NamedTuple):
    """A sum over a stage [i, j) of a rank that has a limit: stops(j) - starts(i) <= room + what is left of T."""

    row: int
    """Where its tables begin."""
    room: float
    way: int
    """Place in `_Left` of what is left."""


class _Limits(NamedTuple):
    """Those of a rank."""

    first: int
    """Layers before its window; every table begins there."""
    width: int
    """Of a table."""
    stops: Sequence[float]
    """By j: the least of what stands there and further behind, so that they rise; one table behind the other."""
    starts: Sequence[float]
    """By i: the most of what stands there and further ahead."""
    each: list[_Limit]

    def furthest(self, start: int, left: _Left) -> int:
        """Where a stage ends at most that starts there."""
        _, width, stops, starts, each = self
        place = start - self.first
        reached = [
            bisect_right(
                stops, starts[row + place] + room + left[way], row, row + width
            )
            - row
            for row, room, way in each
        ]
        return self.first + min(reached) - 1

    def nearest(self, stop: int, left: _Left) -> int:
        """Where a stage starts at least that ends there."""
        _, width, stops, starts, each = self
        place = stop - self.first
        reached = [
            bisect_left(starts, stops[row + place] - room - left[way], row, row + width)
            - row
            for row, room, way in each
        ]
        return self.first + max(reached)


class _Counted(NamedTuple):
    """What limits of (N1) count on every rank, [way, rank], and the prices that they are told at."""

    ways: tuple[int, ...]
    """Places in `_Left`."""
    forwards: Floats
    backwards: Floats
    tails: Floats
    prices: Floats
    """Of a byte, [way, price, rank]."""


@dataclass(frozen=True)
class Filling:
    """The ranks of a column under one schedule, as whole layers fill them in order."""

    layers: InOrder
    micro_batches: int
    in_flight: tuple[int, ...]
    room_bytes: tuple[int, ...]
    is_gpipe: bool
    """The schedule; otherwise it is 1f1b."""
    transfers: tuple[list[float], ...]
    """Ticks behind every rank but the last, there and back, by number of layers before."""
    within: Windows | None = None
    """Where ranks can start at most, if that is known."""
    _known: list[tuple[float, list[_Limits]]] = field(
        default_factory=list, repr=False, compare=False
    )
    """Limits at prices, and the T in whose windows they were told last."""

    @classmethod
    def of(
        cls,
        loads: Sequence[RankLoad],
        micro_batches: int,
        in_flight: Sequence[int],
        *,
        is_gpipe: bool = False,
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
        layers = InOrder.of(loads)
        distinct = {id(each): each for each in transfers}
        both = {
            key: [0.0, *(2.0 * ticks for ticks in each)]
            for key, each in distinct.items()
        }
        moved = [both[id(each)] for each in transfers] or [
            [0.0] * (layers.count + 1)
        ] * (len(loads) - 1)
        return cls(
            layers=layers,
            micro_batches=micro_batches,
            in_flight=tuple(in_flight),
            room_bytes=tuple(load.room_bytes for load in loads),
            is_gpipe=is_gpipe,
            transfers=tuple(moved),
        )

    def under(
        self, in_flight: Sequence[int], *, is_gpipe: bool, within: Windows | None = None
    ) -> Self:
        """The same column under another schedule.

        Args:
            in_flight: as above.
            is_gpipe: the schedule.
            within: where ranks can start at most, for all T that will be asked for.
        """
        return replace(
            self,
            in_flight=tuple(in_flight),
            is_gpipe=is_gpipe,
            within=within,
            _known=[],
        )

    @property
    def ranks(self) -> int:
        """P."""
        return len(self.in_flight)

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

    def below(self, ticks: float) -> Self | None:
        """The same, to be asked about so many ticks or fewer; None: no stage map that fits takes them."""
        found = self.windows(ticks)
        return None if found is None else replace(self, within=found)

    def leaves(self, ticks: float) -> bool:
        """May a stage map that fits take so many ticks or less?"""
        return self.windows(ticks) is not None

    def windows(self, ticks: float) -> Windows | None:
        """Where ranks can start in stage maps that fit and take so many ticks or less; None: there are none."""
        found = self.within or self._narrowed(ticks, self._everywhere, self._plain)
        return (
            None
            if found is None
            else self._narrowed(ticks, found, self._priced(ticks, found))
        )

    @cached_property
    def _everywhere(self) -> Windows:
        return Windows.everywhere(self.layers.count, self.ranks)

    @cached_property
    def _plain(self) -> list[_Limits]:
        """By rank; bytes for nothing: mostly that is enough."""
        return self._limits(self._everywhere, np.zeros((0, self.ranks)))

    def _priced(self, ticks: float, windows: Windows) -> list[_Limits]:
        """By rank, in these windows, or wider ones that were asked for before."""
        if not self._known or self._known[0][0] < ticks:
            self._known[:] = [
                (
                    ticks,
                    self._limits(windows, self.layers.rates[:, self.layers.devices]),
                )
            ]
        return self._known[0][1]

    def _narrowed(
        self, ticks: float, windows: Windows, limits: Sequence[_Limits]
    ) -> Windows | None:
        found = windows
        for _ in range(_ROUNDS):
            left = self._left(ticks, found)
            narrowed = _filled(limits, left, found) if left else None
            if narrowed is None or narrowed == found:
                return narrowed
            found = narrowed
        return found

    @cached_property
    def _runs(self) -> list[tuple[int, int, int]]:
        """Ranks on devices that are alike: the device, the first of them, the first behind."""
        runs = [
            (device, len([*same]))
            for device, same in groupby(self.layers.devices.tolist())
        ]
        ends = pairwise(accumulate((size for _, size in runs), initial=0))
        return [(device, *end) for (device, _), end in zip(runs, ends, strict=True)]

    def _left(self, ticks: float, windows: Windows) -> list[_Left]:
        """What the stages in these windows leave every rank of a step: equation (N5); nothing where no rank's window
        holds some layer."""
        least = np.full((2, self.layers.count), np.inf)
        for device, first, behind in self._runs:
            held = slice(windows.least[first], windows.most[behind])
            np.minimum(
                least[:, held], self.layers.once[:, device, held], out=least[:, held]
            )
        down, before = ([0.0, *each] for each in least.cumsum(axis=1).tolist())
        if before[-1] == np.inf:
            return []
        cuts = zip(self.transfers, windows.least[1:], windows.most[1:], strict=False)
        moved = [min(each[nearest : furthest + 1]) for each, nearest, furthest in cuts]
        moved_behind = [*accumulate(reversed(moved), initial=0.0)][::-1]
        passing = before[-1] + sum(moved)
        tail = float(
            self.layers.tail[0, self.layers.devices[0], : windows.least[1]].sum()
        )
        left = []
        for p, (nearest, furthest) in enumerate(
            zip(windows.least, windows.most[1:], strict=False)
        ):
            turned = ticks - passing - (tail if p else 0.0)
            behind = before[-1] - before[furthest] + moved_behind[p]
            left.append(_Left(turned, turned - behind, ticks - down[nearest]))
        return left

    def _counted(self, rates: Floats) -> _Counted:
        """What limits count by equations (N1) and (N3), at no price and at those of rates, [rate, rank]."""
        ranks, count, units = (
            self.ranks,
            self.micro_batches,
            np.array(self.in_flight, dtype=np.float64),
        )
        ahead = np.minimum(count, ranks - np.arange(ranks))
        ones, all_but_one = np.ones(ranks), np.full(ranks, count - 1.0)
        first = (np.arange(ranks) == 0).astype(np.float64)
        if self.is_gpipe:
            ways = [(_TURNED, all_but_one, all_but_one, first)]
        else:
            ways = [
                (_TURNED, count - ahead, all_but_one, first),
                (_RETURNED, count - ahead, count - ahead, first),
            ]
        ways.append((_ALONE, all_but_one + 1, all_but_one + 1, ones))
        places, forwards, backwards, tails = zip(*ways, strict=True)
        every = np.concatenate([np.zeros((1, ranks)), rates])
        prices = every * np.stack(backwards)[:, None] / units
        return _Counted(
            places, np.stack(forwards), np.stack(backwards), np.stack(tails), prices
        )

    def _limits(self, windows: Windows, rates: Floats) -> list[_Limits]:
        """By rank within windows, at no price and at those of rates, [rate, rank]."""
        counted, first = self._counted(rates), np.array(windows.least[:-1])
        width = int((np.array(windows.most[1:]) - first).max())
        edges = np.minimum(first[:, None] + np.arange(width + 1), self.layers.count)
        forward, backward, tail, held = self._taken(
            np.minimum(edges[:, :-1], self.layers.count - 1)
        )
        forwards, backwards, tails = (each[:, None, :, None] for each in counted[1:4])
        ticks = forwards * forward + backwards * backward + tails * tail
        several, ranks = counted.prices.shape[1:]
        prices = np.concatenate(
            [counted.prices.reshape(-1, ranks), np.ones((1, ranks))]
        )
        sums = np.zeros((len(prices), *edges.shape))
        for row, price in enumerate(prices[:-1]):
            every = ticks[row // several] + price[:, None] * held
            np.cumsum(every.min(axis=0), axis=1, out=sums[row, :, 1:])
        np.cumsum(held.min(axis=0), axis=1, out=sums[-1, :, 1:])
        paid = (
            prices[:, :, None]
            * self.layers.boundary_bytes[self.layers.devices[:, None], edges]
        )
        outgoing = np.array(self.in_flight) + RECEIVE_BUFFERS * (
            np.arange(self.ranks) < self.ranks - 1
        )
        stops = np.minimum.accumulate(
            (sums + outgoing[:, None] * paid)[:, :, ::-1], axis=2
        )[:, :, ::-1]
        starts = np.maximum.accumulate(sums - RECEIVE_BUFFERS * paid, axis=2)
        rooms = prices * np.array(self.room_bytes) * (1 + ROUNDING)
        upto, before = (
            np.ascontiguousarray(table).reshape(-1).data for table in (stops, starts)
        )
        ways = [*(way for way in counted.ways for _ in range(several)), _HELD]
        found = []
        for p, (here, returns, own) in enumerate(
            zip(first.tolist(), self._returns, rooms.T.tolist(), strict=True)
        ):
            rows = range(p * edges.shape[1], stops.size, edges.size)
            each = [
                one
                for one in map(_Limit, rows, own, ways)
                if one.way != _RETURNED or returns
            ]
            found.append(_Limits(here, edges.shape[1], upto, before, each))
        return found

    @property
    def _returns(self) -> list[bool]:
        """Does the last micro-batch come back to a rank that had to wait for another's backward before it?"""
        return [self.micro_batches > self.ranks - rank for rank in range(self.ranks)]

    def _taken(self, places: NDArray[np.intp]) -> tuple[Floats, Floats, Floats, Floats]:
        """Of some layers of every rank what `_Counted` counts, [mode, rank, layer]."""
        tables, devices = self.layers, self.layers.devices[:, None]
        units = np.array(self.in_flight, dtype=np.float64)[:, None]
        held = (
            tables.ogp_bytes[:, devices, places]
            + units * tables.activation_bytes[:, devices, places]
        )
        return (
            tables.forward[:, devices, places],
            tables.backward[:, devices, places],
            tables.tail[:, devices, places],
            held,
        )


def _filled(
    limits: Sequence[_Limits], left: Sequence[_Left], windows: Windows
) -> Windows | None:
    """Equation (N4), within windows. A layer that fits on no rank where filling has it may still lie on another."""
    most, least = [0], [windows.least[-1]]
    for rank, own, furthest in zip(limits, left, windows.most[1:], strict=True):
        most.append(min(rank.furthest(most[-1], own), furthest))
    if any(
        behind < nearest for behind, nearest in zip(most, windows.least, strict=True)
    ):
        return None
    for p in reversed(range(len(limits))):
        least.append(max(windows.least[p], limits[p].nearest(least[-1], left[p])))
        if least[-1] > most[p]:
            return None
    return Windows(tuple(reversed(least)), tuple(most))
