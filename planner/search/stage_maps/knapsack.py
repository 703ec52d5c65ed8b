"""Fewest backward ticks of many segments whose memory makes layers recompute, when no two layers cost the same.

Which modes the layers of one segment take is a multiple-choice knapsack. Its linear relaxation (Sinha, Zoltners 1979)
is solved for all segments at once. A layer trades bytes for ticks along the lower convex hull of its modes
(`bounds.layout.trades`); S(r) and E(r) are the bytes that all trades of a segment at rates of up to r ticks per
byte free, and their ticks:

    (G6)  to free n bytes takes at least E(r) - r (S(r) - n) ticks, whatever r is (Lagrange), and most with the least r
          for which S(r) >= n; S and E are differences of running totals over the layers, so r is found by bisection,
          in all segments together                                                             -> Relief.least_ticks()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayerCost
from planner.search.bounds.layout import trades

_Floats = NDArray[np.float64]
_Places = NDArray[np.intp]
_MOST_RATES = 256
"""Rates that are looked at; of more, some are left out, which weakens the bound."""
_LESS = 1 - 1e-9
"""For rounding of floating-point sums."""


@dataclass(frozen=True, slots=True)
class Relief:
    """What recomputation at rates up to some rate frees and takes, as running totals over the layers."""

    rates: _Floats
    """Ticks per byte, rising; the last one frees all there is to free."""
    freed: _Floats
    """Bytes of a micro-batch, [rate, layers before]."""
    ticks: _Floats
    """Of a micro-batch, [rate, layers before]."""

    @classmethod
    def of(cls, kinds: Sequence[Sequence[LayerCost]], places: _Places) -> Self:
        """Of the layers of a model.

        Args:
            kinds: recompute choices of every distinct layer.
            places: by layer: which of them it is.
        """
        every = [trades(options) for options in kinds]
        found = np.unique([rate for one in every for rate, _ in one] or [0.0])
        rates = found[
            np.linspace(0, len(found) - 1, min(len(found), _MOST_RATES)).astype(np.intp)
        ]
        freed, ticks = (
            np.zeros((len(rates), len(kinds))),
            np.zeros((len(rates), len(kinds))),
        )
        for kind, one in enumerate(every):
            for rate, size in one:
                first = int(np.searchsorted(rates, rate))
                freed[first:, kind] += size
                ticks[first:, kind] += rate * size
        return cls(rates, _running(freed[:, places]), _running(ticks[:, places]))

    def least_ticks(
        self, starts: _Places, stops: _Places, needed_bytes: _Floats
    ) -> NDArray[np.int64]:
        """Ticks of a micro-batch that the layers [start, stop) take more to free so many bytes, at least: (G6).

        Args:
            starts: first layer of every segment.
            stops: layer behind it.
            needed_bytes: that a micro-batch has to keep fewer than without recomputation, above 0.
        """
        low, high = (
            np.zeros(len(starts), np.intp),
            np.full(len(starts), len(self.rates) - 1),
        )
        for _ in range(len(self.rates).bit_length()):
            middle = (low + high) // 2
            is_enough = (
                self.freed[middle, stops] - self.freed[middle, starts] >= needed_bytes
            )
            low, high = (
                np.where(is_enough, low, np.minimum(middle + 1, high)),
                np.where(is_enough, middle, high),
            )
        spare = self.freed[high, stops] - self.freed[high, starts] - needed_bytes
        ticks = (
            self.ticks[high, stops]
            - self.ticks[high, starts]
            - self.rates[high] * spare
        )
        found: NDArray[np.int64] = np.floor(np.maximum(0.0, ticks) * _LESS).astype(
            np.int64
        )
        return found


def _running(values: _Floats) -> _Floats:
    """Sums over the layers before each, and over all."""
    return np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1)], axis=1)
