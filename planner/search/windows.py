"""Where stages can start at all: a window of layers for every pipeline rank, told before any segment is priced.

With w = f + cheapest b of a layer, P(i) = sum of w over the layers before i, o its bytes of OGP, a its fewest bytes of
activations: a segment [i, j) on rank s is in no stage map that fits and is faster than T unless

    (W1)  P(i) + M (P(j) - P(i)) < T                  down to s, M times s alone, up again: as (5a), for gpipe and 1f1b;
          M (P(j) - P(i)) < T                         for any other schedule                             -> _reach()
    (W2)  W + sum over [i, j) of (M - u(s)) f + (M - 1) b < T          down, up, and s works on: as (5b)  -> _reach()
    (W3)  sum over [i, j) of o + u(s) a <= room                                                           -> _reach()

All three grow with the segment, so that greedy filling tells how far stages can reach (as in the bottleneck problem of
contiguous partition, Pinar, Aykanat 2004):

    (W4)  the furthest start of s + 1 is the furthest j that (W1) to (W3) permit from the furthest start of s, and the
          nearest start of s the nearest i that they permit to the nearest start of s + 1              -> windows_of()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayerCost, LayoutCosts
from planner.search.bounds import BOUNDED

Reach = NDArray[np.intp]
"""By layer."""
_Sums = NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """Layers before which a stage boundary can lie; boundary s is the start of rank s, the last one the model's end."""

    least: tuple[int, ...]
    most: tuple[int, ...]

    @classmethod
    def everywhere(cls, layers: int, stages: int) -> Self:
        """Wherever every stage has a layer."""
        spare = layers - stages
        return cls((*range(stages), layers), (0, *(spare + stage for stage in range(1, stages)), layers))

    @property
    def is_empty(self) -> bool:
        """There is no stage map."""
        return any(least > most for least, most in zip(self.least, self.most, strict=True))

    def of_ranks(self, first: int, behind: int) -> Self:
        """Those of some ranks, as wide as all."""
        part = replace(self, least=self.least[first : behind + 1], most=self.most[first : behind + 1])
        part.__dict__["width"] = self.width
        return part

    @cached_property
    def width(self) -> int:
        """Choices of the boundary that has most of them."""
        return max(most - least + 1 for least, most in zip(self.least, self.most, strict=True))


@dataclass(frozen=True, slots=True)
class Kinds:
    """The distinct layers of a layout, and which of them every layer is: most models repeat a few."""

    options: tuple[tuple[LayerCost, ...], ...]
    places: NDArray[np.intp]

    @classmethod
    def of(cls, modes: Sequence[tuple[LayerCost, ...]]) -> Self:
        """Of the allowed modes of every layer."""
        numbers: dict[int, int] = {}
        places = [numbers.setdefault(id(options), len(numbers)) for options in modes]
        distinct = {id(options): options for options in modes}
        return cls(tuple(distinct.values()), np.array(places, dtype=np.intp))

    def sums(self, values: Sequence[int]) -> _Sums:
        """Sum of a value of every kind over the layers before each layer, and over all."""
        totals = np.zeros(len(self.places) + 1, dtype=np.int64)
        np.cumsum(np.array(values, dtype=np.int64)[self.places], out=totals[1:])
        return totals


def windows_of(
    costs: LayoutCosts, kinds: Kinds, in_flight: Sequence[int], room_bytes: int, limit_ticks: int
) -> Windows:
    """Windows of the stage maps that fit and take fewer ticks than the limit: equation (W4).

    Args:
        costs: of the layout.
        kinds: of its layers.
        in_flight: u(s), micro-batches that every rank holds at once.
        room_bytes: for OGP and activations of a device.
        limit_ticks: T.
    """
    return within(reach(costs, kinds, in_flight, room_bytes, limit_ticks), len(kinds.places))


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
    backward = kinds.sums([min(cost.backward_ticks for cost in options) for options in kinds.options])
    ogp = kinds.sums([options[0].ogp_bytes for options in kinds.options])
    activations = kinds.sums([min(cost.activation_bytes for cost in options) for options in kinds.options])
    once = forward + backward
    is_bounded = costs.layout.schedule in BOUNDED
    passing = once if passing is None else passing
    alone = _furthest(count * once, limit_ticks - 1, count * once - is_bounded * passing)
    room = room_bytes + sum((len(shared.layers) - 1) * shared.ogp_bytes for shared in costs.shared)
    known: dict[int, Reach] = {}
    for units in set(in_flight):
        held = ogp + units * activations
        known[units] = np.minimum(alone, _furthest(held, room, held))
        if is_bounded:
            later = (count - units) * forward + (count - 1) * backward
            turned = _furthest(later, limit_ticks - 1 - int(passing[-1]), later)
            known[units] = np.minimum(known[units], turned)
    return [known[units] for units in in_flight]


def _furthest(upto: _Sums, allowed: int, before: _Sums) -> Reach:
    """By i: the largest j with upto(j) - before(i) <= allowed."""
    return np.searchsorted(upto, allowed + before, side="right") - 1
