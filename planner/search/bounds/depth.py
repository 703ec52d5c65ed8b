"""Lower bounds of the step by what layers hold where they stand: the further up a layer, the more micro-batches.

Of a step of T ticks, with M micro-batches on P pipeline ranks, f(l) + b(l) = w(l) in the mode in which layer l takes
least, D(l) the sum of w over the layers before it and H(l) that over all others:

    (K11) gpipe and 1f1b: layer l, on rank s, has all layers of H(l) on it and the P - s - 1 ranks behind, each of which
          waits for D(l) ticks; so P - s >= y(l), and of l are held u(l) micro-batches at least:
              y(l) = ceil((M H(l) - D(l)) / (T - D(l))),  u(l) = min(M, y(l))                   -> Depth._searched()

    (K12) dealt, with full backwards that recompute layer by layer (eager-1f1b, interleaved-1f1b, looped-bfs): a rank's
          last stage, on rank s, holds min(M, P, 2 (P - s) - 1) at least, its others min(M, P):
              y(l) = ceil(M H(l) / T),  u(l) = min(M, P, 2 y(l) - 1)                           -> Depth._dealt()

    (K13) all layers with y(l) > P - k stand on the first k ranks, whose memory, k R, they share with their OGP. For
          their activations, u(l) times those of a micro-batch, layers take a part of the modes that free most bytes per
          tick (the linear relaxation of the multiple-choice knapsack: Sinha, Zoltners 1979), E(k) ticks in all. With
          the sum of waiting of (K5), for every k under (K11), and for k = P under (K12),
              M (W + E(k)) + waiting <= P T
          else no step takes T ticks                                                   -> Depth.is_too_little()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.cost.pricing import LayerCost
from planner.search.bounds.layout import trades
from planner.search.bounds.splits import Floats, Held, Mask, Pipelines
from planner.spec.profile import RecomputeMode

_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the ranks that are looked at as the first k."""
_AT_ONCE = 4096
"""Pipelines, so that tables by layer stay small."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Depth:
    """Layers of a split, each in its fastest mode, and what it may give up for ticks."""

    work: Floats
    """Of a micro-batch, by layer."""
    activation_bytes: Floats
    held: Held
    layers: NDArray[np.intp]
    """By trade: whose it is."""
    rates: Floats
    """By trade: ticks per byte of a micro-batch."""
    freed: Floats
    """By trade: bytes of a micro-batch."""

    @classmethod
    def of(
        cls, layers: Sequence[Mapping[RecomputeMode, LayerCost]], held: Held
    ) -> Self:
        """Of the costs of all layers; layers alike share them."""
        kinds = {id(options): tuple(options.values()) for options in layers}
        fastest = {
            key: min((one.backward_ticks, one.activation_bytes) for one in kinds[key])
            for key in kinds
        }
        traded = {key: trades(options) for key, options in kinds.items()}
        rows = [
            (layer, *each)
            for layer, options in enumerate(layers)
            for each in traded[id(options)]
        ]
        places, rates, freed = zip(*rows, strict=True) if rows else ((), (), ())
        forward = [next(iter(options.values())).forward_ticks for options in layers]
        return cls(
            np.array(forward, dtype=np.float64)
            + [fastest[id(options)][0] for options in layers],
            np.array([fastest[id(options)][1] for options in layers], dtype=np.float64),
            held,
            np.array(places, dtype=np.intp),
            np.array(rates, dtype=np.float64),
            np.array(freed, dtype=np.float64),
        )

    def is_too_little(self, at: Pipelines, ticks: Floats, *, are_dealt: bool) -> Mask:
        """Does every step of these pipelines take more ticks? Equation (K13).

        Args:
            at: the pipelines.
            ticks: of a step of each.
            are_dealt: of layouts of (K12), else of (K11).
        """
        found = np.zeros(len(ticks), dtype=bool)
        for start in range(0, len(ticks), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            found[some] = self._is_too_little(at.some(some), ticks[some], are_dealt)
        return found

    def _is_too_little(self, at: Pipelines, ticks: Floats, are_dealt: bool) -> Mask:
        ogp = self.held.by_layer(at)
        depth, units = (self._dealt if are_dealt else self._searched)(at, ticks)
        lasting = at.micro_batches * self.work.sum() + self._waiting(at)
        found = np.zeros(len(ticks), dtype=bool)
        for share in _SHARES[:1] if are_dealt else _SHARES:
            first = np.ceil(at.ranks * share)
            stand = (
                depth > (at.ranks - first)[:, None]
                if share < 1
                else np.ones_like(depth, dtype=bool)
            )
            lacking = (np.where(stand, ogp + units * self.activation_bytes, 0.0)).sum(
                axis=1
            )
            again = self._again(stand, units, lacking - first * self.held.room_bytes)
            found |= lasting + at.micro_batches * again > at.ranks * ticks
        return found

    def _again(self, stand: Mask, units: Floats, lacking: Floats) -> Floats:
        """E(k): ticks of a micro-batch that free so many bytes; never, where all together do not."""
        found = np.zeros(len(lacking))
        some = np.flatnonzero(lacking > 0)
        if len(some):
            units = units[some][:, self.layers]
            freed = np.where(stand[some][:, self.layers], self.freed * units, 0.0)
            order = np.argsort(self.rates / units, axis=1, kind="stable")
            freed = np.take_along_axis(freed, order, axis=1)
            rates = np.take_along_axis(self.rates / units, order, axis=1)
            before = freed.cumsum(axis=1) - freed
            ticks = (rates * np.clip(lacking[some, None] - before, 0.0, freed)).sum(
                axis=1
            ) * (1 - _ROUNDING)
            found[some] = np.where(
                freed.sum(axis=1) < lacking[some] * (1 - _ROUNDING), np.inf, ticks
            )
        return found

    def _searched(self, at: Pipelines, ticks: Floats) -> tuple[Floats, Floats]:
        """y and u of (K11), [pipeline, layer]."""
        before = self._before
        left = np.maximum(1.0, ticks[:, None] - before)
        behind = at.micro_batches[:, None] * (self.work.sum() - before) - before
        depth = np.clip(np.ceil(behind / left - _ROUNDING), 1.0, at.ranks[:, None])
        return depth, np.minimum(at.micro_batches[:, None], depth)

    def _dealt(self, at: Pipelines, ticks: Floats) -> tuple[Floats, Floats]:
        """y and u of (K12), [pipeline, layer]."""
        behind = at.micro_batches[:, None] * (self.work.sum() - self._before)
        depth = np.clip(
            np.ceil(behind / ticks[:, None] - _ROUNDING), 1.0, at.ranks[:, None]
        )
        most = np.minimum(at.micro_batches, at.ranks)[:, None]
        return depth, np.minimum(most, 2 * depth - 1)

    @property
    def _before(self) -> Floats:
        """D."""
        before: Floats = np.cumsum(self.work) - self.work
        return before

    def _waiting(self, at: Pipelines) -> Floats:
        """Of (K5): the sum of D over as many layers as there are ranks."""
        waiting: Floats = np.cumsum(self._before)[at.ranks - 1]
        return waiting
