"""Lower bounds of the step by what single ranks can take: layers stay whole, and no rank lends another its memory.

On P pipeline ranks, with M micro-batches, a set of layers fits on a rank that stands behind k layers, holds u
micro-batches of all its layers at once and has room for R bytes, only if, with D(k), w(l) and the bytes of the mode in
which each takes least, o(l) of OGP and a(l) of activations,

    (K14) sum of o(l) + u a(l) in the leanest mode <= R, and D(k) + M (sum of w(l) + e) <= T, where e are the ticks
          that free sum of o(l) + u a(l) - R bytes, at the best rate of any layer's modes, 1 / u of it per byte of them
                                                                                                     -> _fits()

    (K15) gpipe and 1f1b: rank s has neighbours, behind all layers before them, and u(s) = min(M, P - s) at least. From
          the last rank on each takes as many layers as fit, and what fits does so without its last layers, too. So
          where a layer is left, no stage map takes T ticks                        -> Ranks.leave_neighbours()

    (K16) dealt: rank s stands behind s layers at least. Of N layers that cost the same it takes n(s) at most; where
          these add up to fewer than N, no stage map takes T ticks                      -> Ranks.leave_alike()
          u(s) is min(M, P, 2 (P - s) - 1) at least where layers recompute one by one, as in (K12); with lean
          schedules, too, min(M, P - s), or in waves min(M, s + 1); where backwards are split, min(M, s + 1)

What a whole layer more on some rank costs, the means over all ranks of (K5), (K8) and (K9) do not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from planner.cost.pricing import LayerCost
from planner.search.bounds.layout import trades
from planner.search.bounds.splits import Alike, Floats, Held, Mask, Pipelines
from planner.spec.profile import RecomputeMode

_MORE = 1 + 1e-9
"""For rounding of floating-point sums."""
_KINDS = 4
"""Of layers that cost the same, the most numerous, that are counted."""
_AT_ONCE = 1024
"""Pipelines, so that tables by layer and rank stay small."""
InFlight = Callable[[Floats, Floats], Floats]
"""Micro-batches that ranks hold of all their layers, by P, [pipeline, 1], and s, [1, rank]; at most M."""


def mixed(ranks: Floats, rank: Floats) -> Floats:
    """Of dealt layers that recompute one by one."""
    return np.minimum(ranks, 2 * (ranks - rank) - 1)


def falling(ranks: Floats, rank: Floats) -> Floats:
    """Of ranks of which the first holds most."""
    return ranks - rank


def rising(ranks: Floats, rank: Floats) -> Floats:
    """Of schedules in waves, which turn at the last rank."""
    return rank + 1 + 0 * ranks


@dataclass(frozen=True)
class Ranks:
    """Layers of a split, to be laid on single ranks."""

    work: Floats
    """Of a micro-batch, by layer, as the next ones."""
    idle: Floats
    """What a rank behind the layer waits for."""
    activation_bytes: Floats
    leanest_bytes: Floats
    """The same in the mode that saves least."""
    rates: Floats
    """Fewest ticks per byte of a micro-batch that it gives up; 0: none, or for nothing."""
    held: Held
    kinds: tuple[tuple[int, int], ...]
    """First and number of the layers that cost the same, of the most numerous."""

    @classmethod
    def of(
        cls, layers: Sequence[Mapping[RecomputeMode, LayerCost]], held: Held
    ) -> Self:
        """Layers that each take a mode of their own; layers alike share their costs."""
        alike = {id(options): tuple(options.values()) for options in layers}
        rows = {key: _row(options) for key, options in alike.items()}
        columns = np.array(
            [rows[id(options)] for options in layers], dtype=np.float64
        ).T
        work, activation, leanest, rates = columns
        return cls(work, work, activation, leanest, rates, held, _kinds(layers))

    @classmethod
    def of_alike(
        cls,
        layers: Sequence[Mapping[RecomputeMode, LayerCost]],
        mode: Alike,
        held: Held,
    ) -> Self:
        """Layers that all take one mode."""
        saved, work, idle = (
            mode.activation_bytes,
            mode.work.astype(np.float64),
            mode.idle.astype(np.float64),
        )
        return cls(work, idle, saved, saved, np.zeros(len(work)), held, _kinds(layers))

    def leave_neighbours(self, at: Pipelines, ticks: Floats) -> Mask:
        """Is a layer left over within so many ticks? Equation (K15).

        Args:
            at: the pipelines.
            ticks: of a step of each.
        """
        found = np.zeros(len(ticks), dtype=bool)
        for start in range(0, len(ticks), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            found[some] = self._leave_neighbours(at.some(some), ticks[some])
        return found

    def _leave_neighbours(self, at: Pipelines, ticks: Floats) -> Mask:
        ogp, work, idle = (
            _before(self.held.by_layer(at)),
            _before(self.work),
            _before(self.idle),
        )
        saved, leanest = _before(self.activation_bytes), _before(self.leanest_bytes)
        rate = (
            self.rates[self.rates > 0].min(initial=np.inf)
            if (self.rates > 0).any()
            else 0.0
        )
        stop, rows = np.full(len(ticks), len(self.work)), np.arange(len(ticks))
        for rank in reversed(range(int(at.ranks.max()))):
            units = np.minimum(at.micro_batches, np.maximum(1, at.ranks - rank))[
                :, None
            ]
            lies = ogp[rows, stop][:, None] - ogp
            least, most = (
                lies + units * (each[stop][:, None] - each) for each in (leanest, saved)
            )
            again = np.maximum(0.0, most - self.held.room_bytes) * rate / units
            lasts = (
                at.micro_batches[:, None] * (work[stop][:, None] - work + again) + idle
            )
            fits = _fits(least, self.held.room_bytes, lasts, ticks[:, None])
            fits[rows, stop] = True
            stop = np.where(rank < at.ranks, fits.argmax(axis=1), stop)
        left: Mask = stop > 0
        return left

    def leave_alike(self, at: Pipelines, ticks: Floats, in_flight: InFlight) -> Mask:
        """Is a layer of some kind left over within so many ticks? Equation (K16).

        Args:
            at: the pipelines.
            ticks: of a step of each.
            in_flight: of their ranks, at least.
        """
        found = np.zeros(len(ticks), dtype=bool)
        for start in range(0, len(ticks), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            found[some] = self._leave_alike(at.some(some), ticks[some], in_flight)
        return found

    def _leave_alike(self, at: Pipelines, ticks: Floats, in_flight: InFlight) -> Mask:
        rank, ranks = (
            np.arange(at.ranks.max(), dtype=np.float64)[None, :],
            at.ranks[:, None].astype(np.float64),
        )
        units = np.minimum(
            np.maximum(1.0, in_flight(ranks, rank)), at.micro_batches[:, None]
        )
        waits = _before(self.idle)[np.minimum(rank.astype(np.int64), len(self.idle))]
        left = np.maximum(0.0, (ticks[:, None] - waits) / at.micro_batches[:, None])
        ogp, room = self.held.by_layer(at), self.held.room_bytes
        found = np.zeros(len(ticks), dtype=bool)
        for layer, count in self.kinds:
            lies = ogp[:, layer, None]
            rate = self.rates[layer] / units
            work = (
                self.work[layer] + (lies + units * self.activation_bytes[layer]) * rate
            )
            in_time = np.minimum(
                _times(left, self.work[layer]), _times(left + room * rate, work)
            )
            in_room = _times(room, lies + units * self.leanest_bytes[layer])
            most = np.clip(np.floor(np.minimum(in_time, in_room) * _MORE), 0, count)
            found |= np.where(rank < ranks, most, 0).sum(axis=1) < count
        return found


def _times(whole: Floats | float, part: Floats | float) -> Floats:
    """How often the part goes into the whole: what is nothing, without end."""
    whole, part = np.broadcast_arrays(
        np.asarray(whole, dtype=np.float64), np.asarray(part, dtype=np.float64)
    )
    found: Floats = np.divide(
        whole, part, out=np.full(part.shape, np.inf), where=part > 0
    )
    return found


def _fits(
    needed_bytes: Floats, room_bytes: float, lasting: Floats, ticks: Floats
) -> Mask:
    """(K14), with some slack for rounding."""
    fits: Mask = (needed_bytes <= room_bytes * _MORE) & (lasting <= ticks * _MORE)
    return fits


def _row(options: Sequence[LayerCost]) -> tuple[float, float, float, float]:
    """Work, activations, these in the leanest mode, and the best rate of a layer."""
    backward, saved = min((one.backward_ticks, one.activation_bytes) for one in options)
    forward, leanest = (
        options[0].forward_ticks,
        min(one.activation_bytes for one in options),
    )
    return (
        forward + backward,
        saved,
        leanest,
        min((rate for rate, _ in trades(options)), default=0.0),
    )


def _kinds(
    layers: Sequence[Mapping[RecomputeMode, LayerCost]],
) -> tuple[tuple[int, int], ...]:
    places: dict[int, list[int]] = {}
    for place, options in enumerate(layers):
        places.setdefault(id(options), []).append(place)
    numerous = sorted(places.values(), key=lambda each: (-len(each), each))
    return tuple((each[0], len(each)) for each in numerous[:_KINDS])


def _before(values: Floats) -> Floats:
    """Sums over those before each, and over all; along the last axis."""
    none = np.zeros((*values.shape[:-1], 1))
    sums: Floats = np.concatenate([none, np.cumsum(values, axis=-1)], axis=-1)
    return sums
