"""Where stages can start at all: a window of layers for every pipeline rank, told before any segment is priced.

With w = f + cheapest b of a layer, P(i) = sum of w over the layers before i, o its bytes of OGP, a its fewest bytes of
activations: a segment [i, j) on rank s is in no stage map that fits and is faster than T unless

    (W1)  P(i) + M (P(j) - P(i)) < T                  down to s, M times s alone, up again: as (5a), for gpipe and 1f1b;
          M (P(j) - P(i)) < T                         for any other schedule                              -> reach()
    (W2)  W + sum over [i, j) of (M - u(s)) f + (M - 1) b < T          down, up, and s works on: as (5b)   -> reach()
    (W3)  sum over [i, j) of o + u(s) a <= room                                                            -> reach()

All three grow with the segment, so that greedy filling tells how far stages can reach (as in the bottleneck problem of
contiguous partition, Pinar, Aykanat 2004):

    (W4)  the furthest start of s + 1 is the furthest j that (W1) to (W3) permit from the furthest start of s, and the
          nearest start of s the nearest i that they permit to the nearest start of s + 1    -> windows_of(), within()

    (W5)  where [i, j) does not fit in its fastest modes, memory costs e ticks more per micro-batch at least, by (G6) of
          `stage_maps.knapsack`: M e more in (W1) and (W2). Modes of more layers hold those of fewer, so this grows
          with the segment, too, and where ranks act alike the filling of (W4) goes on with it          -> windows_of()
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayerCost, LayoutCosts, receive_buffers
from planner.search.bounds.layout import BOUNDED
from planner.search.stage_maps.knapsack import Relief

Reach = NDArray[np.intp]
"""By layer."""
_Sums = NDArray[np.int64]
_LESS = 1 - 1e-9
"""For rounding of floating-point sums."""


@dataclass(frozen=True)
class Windows:
    """Layers before which a stage boundary can lie; boundary s is the start of rank s, the last one the model's end."""

    least: tuple[int, ...]
    most: tuple[int, ...]

    @classmethod
    def everywhere(cls, layers: int, stages: int) -> Self:
        """Wherever every stage has a layer."""
        spare = layers - stages
        return cls(
            (*range(stages), layers),
            (0, *(spare + stage for stage in range(1, stages)), layers),
        )

    def only(self, sizes: Sequence[int] | None) -> Self:
        """Of these those with stages of so many layers; all, where nothing is given."""
        if sizes is None:
            return self
        bounds = (0, *accumulate(sizes))
        return type(self)(
            tuple(map(max, self.least, bounds)), tuple(map(min, self.most, bounds))
        )

    @property
    def is_empty(self) -> bool:
        """There is no stage map."""
        return any(
            least > most for least, most in zip(self.least, self.most, strict=True)
        )

    def of_ranks(self, first: int, behind: int) -> Self:
        """Those of some ranks, as wide as all."""
        part = replace(
            self,
            least=self.least[first : behind + 1],
            most=self.most[first : behind + 1],
        )
        part.__dict__["width"] = self.width
        return part

    @cached_property
    def width(self) -> int:
        """Choices of the boundary that has most of them."""
        return max(
            most - least + 1 for least, most in zip(self.least, self.most, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Kinds:
    """The distinct layers of a layout, and which of them every layer is: most models repeat a few."""

    options: tuple[tuple[LayerCost, ...], ...]
    places: NDArray[np.intp]

    @classmethod
    def of(cls, modes: Sequence[tuple[LayerCost, ...]]) -> Self:
        """Of the allowed modes of every layer."""
        every = list(map(id, modes))
        distinct = dict(zip(every, modes, strict=True))
        numbers = dict(zip(distinct, range(len(distinct)), strict=True))
        return cls(
            tuple(distinct.values()),
            np.array(list(map(numbers.__getitem__, every)), dtype=np.intp),
        )

    def sums(self, values: Sequence[int]) -> _Sums:
        """Sum of a value of every kind over the layers before each layer, and over all."""
        totals = np.zeros(len(self.places) + 1, dtype=np.int64)
        np.cumsum(np.array(values, dtype=np.int64)[self.places], out=totals[1:])
        return totals


def windows_of(
    costs: LayoutCosts,
    kinds: Kinds,
    in_flight: Sequence[int],
    room_bytes: int,
    limit_ticks: int,
) -> Windows:
    """Windows of the stage maps that fit and take fewer ticks than the limit: equations (W4) and (W5).

    Args:
        costs: of the layout.
        kinds: of its layers.
        in_flight: u(s), micro-batches that every rank holds at once.
        room_bytes: for OGP and activations of a device.
        limit_ticks: T.
    """
    return _Filling(costs, kinds, in_flight, room_bytes, limit_ticks).windows()


def within(reach: Sequence[Reach], layers: int) -> Windows:
    """Windows by how far every rank reaches: equation (W4).

    Args:
        reach: of every rank.
        layers: of the model.
    """
    stages = len(reach)
    least, most = [layers], [0]
    for rank in range(stages):
        most.append(min(int(reach[rank][most[-1]]), layers - (stages - 1 - rank)))
    for rank in reversed(range(stages)):
        least.append(max(int(np.searchsorted(reach[rank], least[-1])), rank))
    return Windows(tuple(reversed(least)), tuple(most))


def reach(
    costs: LayoutCosts,
    kinds: Kinds,
    in_flight: Sequence[int],
    room_bytes: int,
    limit_ticks: int,
    *,
    passing: _Sums | None = None,
) -> list[Reach]:
    """Of every rank, by the layer that it starts with: the furthest layer behind its last one, by (W1) to (W3).

    Args:
        costs: of the layout, or of one rank's device.
        kinds: of its layers.
        in_flight: u(s) of every rank.
        room_bytes: for OGP and activations of a device.
        limit_ticks: T.
        passing: P, where other ranks may be faster than these; None: they are alike.
    """
    count = costs.micro_batches
    forward = kinds.sums([options[0].forward_ticks for options in kinds.options])
    backward = kinds.sums(
        [min(cost.backward_ticks for cost in options) for options in kinds.options]
    )
    ogp = kinds.sums([options[0].ogp_bytes for options in kinds.options])
    activations = kinds.sums(
        [min(cost.activation_bytes for cost in options) for options in kinds.options]
    )
    once = forward + backward
    is_bounded = costs.layout.schedule in BOUNDED
    passing = once if passing is None else passing
    alone = _furthest(
        count * once, limit_ticks - 1, count * once - is_bounded * passing
    )
    room = room_bytes + sum(
        (len(shared.layers) - 1) * shared.ogp_bytes for shared in costs.shared
    )
    known: dict[int, Reach] = {}
    for units in set(in_flight):
        held = ogp + units * activations
        known[units] = np.minimum(alone, _furthest(held, room, held))
        if is_bounded:
            later = (count - units) * forward + (count - 1) * backward
            turned = _furthest(later, limit_ticks - 1 - int(passing[-1]), later)
            known[units] = np.minimum(known[units], turned)
    return [known[units] for units in in_flight]


@dataclass(frozen=True)
class _Filling:
    """Fills ranks that act alike, asking for single segments: it needs few, since neighbours are about as long."""

    costs: LayoutCosts
    kinds: Kinds
    in_flight: Sequence[int]
    room_bytes: int
    limit_ticks: int

    def windows(self) -> Windows:
        """Equations (W4) and (W5)."""
        layers, stages = len(self.kinds.places), len(self.in_flight)
        most, length = [0], layers // stages
        for rank in range(stages):
            length = self._longest(rank, most[-1], length)
            most.append(most[-1] + length)
        if most[-1] < layers:
            return replace(Windows.everywhere(layers, stages), most=tuple(most))
        least = [layers]
        for rank in reversed(range(stages)):
            length = self._longest_before(rank, least[-1], length)
            least.append(least[-1] - length)
        return Windows(tuple(reversed(least)), tuple(most))

    def _longest(self, rank: int, start: int, guess: int) -> int:
        """Most layers from this one on; 0: none."""
        behind = len(self.in_flight) - 1 - rank
        most = len(self.kinds.places) - behind - start
        return _most(
            lambda length: self._may_be(rank, start, start + length), guess, most
        )

    def _longest_before(self, rank: int, stop: int, guess: int) -> int:
        """Most layers before this one; 0: none."""
        return _most(
            lambda length: self._may_be(rank, stop - length, stop), guess, stop - rank
        )

    def _may_be(self, rank: int, start: int, stop: int) -> bool:
        """Is the segment in stage maps below the limit, as far as (W1) to (W3) tell with (W5)?"""
        units, count = self.in_flight[rank], self.costs.micro_batches
        forward, backward = (
            self._forward[stop] - self._forward[start],
            self._backward[stop] - self._backward[start],
        )
        room = self._room_bytes[rank] - (self._ogp_bytes[stop] - self._ogp_bytes[start])
        if units * (self._least_bytes[stop] - self._least_bytes[start]) > room:
            return False
        missing = units * (self._kept_bytes[stop] - self._kept_bytes[start]) - room
        again = self._least_again(start, stop, missing / units) if missing > 0 else 0
        alone = count * (forward + backward + again)
        if self.costs.layout.schedule not in BOUNDED:
            return alone < self.limit_ticks
        down, once = (
            self._forward[start] + self._backward[start],
            self._forward[-1] + self._backward[-1],
        )
        turned = (
            once + (count - units) * forward + (count - 1) * backward + count * again
        )
        return max(down + alone, turned) < self.limit_ticks

    def _least_again(self, start: int, stop: int, missing_bytes: float) -> int:
        """Ticks of a micro-batch that it takes at least to keep so many bytes fewer: (G6) of one segment."""
        rates, freed, ticks = self._relief
        place = bisect_left(
            freed, missing_bytes, key=lambda upto: upto[stop] - upto[start]
        )
        place = min(place, len(rates) - 1)
        spare = freed[place][stop] - freed[place][start] - missing_bytes
        return int(
            max(0.0, ticks[place][stop] - ticks[place][start] - rates[place] * spare)
            * _LESS
        )

    @cached_property
    def _relief(self) -> tuple[list[float], list[list[float]], list[list[float]]]:
        """Rates, and by rate: what is freed, and its ticks, of the layers before each."""
        relief = Relief.of(self.kinds.options, self.kinds.places)
        return relief.rates.tolist(), relief.freed.tolist(), relief.ticks.tolist()

    @cached_property
    def _room_bytes(self) -> list[int]:
        """Of every rank, for OGP and activations."""
        room = self.room_bytes + sum(
            (len(shared.layers) - 1) * shared.ogp_bytes for shared in self.costs.shared
        )
        room -= min(
            cost.temporary_bytes for options in self.kinds.options for cost in options
        )
        put_out = min(self.costs.all_boundary_bytes())
        buffers = receive_buffers(self.costs.work)
        is_kept = not self.costs.work.framework.frees_outputs
        copies = [buffers + is_kept * units for units in self.in_flight[:-1]]
        return [*(room - count * put_out for count in copies), room]

    @cached_property
    def _forward(self) -> list[int]:
        return self._before(
            [options[0].forward_ticks for options in self.kinds.options]
        )

    @cached_property
    def _backward(self) -> list[int]:
        return self._before([ticks for ticks, _ in self._fastest])

    @cached_property
    def _least_bytes(self) -> list[int]:
        return self._before(
            [
                min(cost.activation_bytes for cost in options)
                for options in self.kinds.options
            ]
        )

    @cached_property
    def _kept_bytes(self) -> list[int]:
        return self._before([kept for _, kept in self._fastest])

    @cached_property
    def _ogp_bytes(self) -> list[int]:
        return self._before([options[0].ogp_bytes for options in self.kinds.options])

    @cached_property
    def _fastest(self) -> list[tuple[int, int]]:
        """Backward ticks, and bytes of activations, of every kind."""
        return [
            min((cost.backward_ticks, cost.activation_bytes) for cost in each)
            for each in self.kinds.options
        ]

    def _before(self, values: Sequence[int]) -> list[int]:
        """Of the layers before each, and of all."""
        sums: list[int] = self.kinds.sums(values).tolist()
        return sums


def _most(may_be: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest length that may be, at most so many: of all that are no longer, too; looked for around a guess."""
    length = max(0, min(guess, most))
    while length > 0 and not may_be(length):
        length -= 1
    if length >= min(guess, most):
        while length < most and may_be(length + 1):
            length += 1
    return length


def _furthest(upto: _Sums, allowed: int, before: _Sums) -> Reach:
    """By i: the largest j with upto(j) - before(i) <= allowed."""
    return np.searchsorted(upto, allowed + before, side="right") - 1
