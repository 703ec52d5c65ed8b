"""Lower bounds of the step where layers are split in one way, for many numbers of pipeline and data ranks at once.

With w(l) = f(l) + b(l) ticks of layer l for one micro-batch, D(k) what the first k layers take, M micro-batches on P
pipeline ranks:

    (K5)  ranks begin with a forward of their lowest stage, and where backwards are full they end with its backward: the
          k-th of these stages stands behind k layers at least, whose forwards come before all that its rank does, and
          whose backwards after. So the rank is idle for D(k) ticks, of forwards and backwards; where weight gradients
          may wait, of forwards alone; and on average T >= (M W + sum over k < P of D(k)) / P        -> Alike._mean()

    (K6)  of the (k - 1) P + 1 + j longest layers some rank holds k + 1, or more than j ranks hold k; one of these
          stands behind j layers: T >= D(j) + M times the k shortest of them, or M times the k + 1 shortest. As (B5),
          which has j = 0                                                                        -> Alike._crowded()

    (K7)  under gpipe and 1f1b (B2) holds of the rank that holds k of the (k - 1) P + 1 longest layers
                                                                                              -> Alike._turned()

    (K8)  memory and time: what layer l saves of a micro-batch, a(l) bytes, is held until all layers behind it, and it
          itself, have run forward and back, H(l) = sum over k >= l of w(k) at least (less the weight gradients of
          split backwards). OGP lies there all the time; P ranks have R bytes each for both:
              M sum of a(l) H(l) <= T (P R - OGP)                                               -> Alike.least()

    (K9)  where each layer takes a mode of its own, backwards are full. Lagrange: (K5) and (K8), added up with a rate r
          of ticks per byte, hold for the cheapest mode of each layer, so that for every r >= 0
              T >= (M sum of min over modes of (w(l) + r a(l) H(l)) + sum over k < P of D(k)) / (P + r (P R - OGP))
          with D and H at the fastest modes                                                       -> Mixed.least()

OGP is the least that ZeRO leaves: under stage 0 and 1 shared-out optimizer states, under 2 and 3 more of it, where
layers exchange for every micro-batch what two neighbours would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayerCost

Ticks = NDArray[np.int64]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]
_LESS = 1 - 1e-9
"""For rounding of floating-point sums."""
_LEFT_OUT = (0, 1, 2, 4)
"""Of the shortest layers, when the others are shared out: embeddings may be next to nothing."""
_NEVER = np.iinfo(np.int64).max
_RATES = np.concatenate([[0.0], np.geomspace(1e-2, 30.0, 40)])
"""Of (K9), times the bytes of a device."""


@dataclass(frozen=True, slots=True)
class Pipelines:
    """Some of the pipelines of a split; arrays of the same length."""

    ranks: Ticks
    """P."""
    replicas: Ticks
    """Data times context degree."""
    micro_batches: Ticks
    """M; of the data rank that has most."""
    are_alike: Mask
    """All data ranks have as many."""

    def some(self, places: slice | NDArray[np.intp]) -> Pipelines:
        """Those at these places."""
        return Pipelines(
            self.ranks[places],
            self.replicas[places],
            self.micro_batches[places],
            self.are_alike[places],
        )


@dataclass(frozen=True)
class Held:
    """What a device has room for, and what lies there all the time."""

    room_bytes: float
    """R."""
    whole_bytes: Floats
    """OGP that is not shared out, by layer: those of a pipeline rank's layers add up."""
    shared_bytes: Floats
    """Likewise, what ZeRO shares out among replicas."""
    of_experts_bytes: Floats
    """Likewise, what it shares out among those replicas alone that hold the same experts."""
    experts_degree: int = 1
    """Replicas that share experts."""
    most_shards: float = np.inf
    """Replicas that share out states, at most."""

    def left(self, at: Pipelines) -> Floats:
        """P R - OGP, rounded up by a byte; 0 or less where OGP alone is too much."""
        shared = (
            self.shared_bytes.sum() + self.of_experts_bytes.sum() * self.experts_degree
        )
        shards = np.minimum(at.replicas, self.most_shards)
        left: Floats = (
            at.ranks * self.room_bytes - self.whole_bytes.sum() - shared / shards + 1.0
        )
        return left

    def by_layer(self, at: Pipelines) -> Floats:
        """OGP, [pipeline, layer]."""
        shared = self.shared_bytes + self.of_experts_bytes * self.experts_degree
        ogp: Floats = (
            self.whole_bytes
            + shared / np.minimum(at.replicas, self.most_shards)[:, None]
        )
        return ogp


_NO_BYTES = np.zeros(1)
PLENTY = Held(1e30, _NO_BYTES, _NO_BYTES, _NO_BYTES)
"""Where nothing is known of memory."""


@dataclass(frozen=True)
class Alike:
    """All layers in one recompute mode, or each no slower than in any."""

    forward: Ticks
    """By layer, as the next ones."""
    work: Ticks
    """Forward and backward."""
    idle: Ticks
    """What a rank behind this layer waits for, at its begin and end."""
    activation_bytes: Floats
    hold: Ticks
    """Of H."""
    may_differ: bool = True
    """Data ranks may; not where backwards are split, or sequences cut."""

    @classmethod
    def of(cls, costs: Sequence[LayerCost], *, splits: bool) -> Self:
        """Of the cost of every layer in that mode."""
        forward = _by_layer([cost.forward_ticks for cost in costs])
        work = forward + _by_layer([cost.backward_ticks for cost in costs])
        weight = (
            _by_layer([cost.backward_weight_ticks for cost in costs]) if splits else 0
        )
        saved = np.array([cost.activation_bytes for cost in costs], dtype=np.float64)
        return cls(
            forward,
            work,
            forward if splits else work,
            saved,
            work - weight,
            may_differ=not splits,
        )

    @classmethod
    def unheld(
        cls, forward: Ticks, work: Ticks, passing: Ticks, *, may_differ: bool
    ) -> Self:
        """Of layers of which no more is known than ticks: all forwards, all of a micro-batch, what H has of it."""
        return cls(forward, work, forward, np.zeros(len(work)), passing, may_differ)

    def least(self, at: Pipelines, left_bytes: Floats) -> Floats:
        """Ticks that no step beats: (K1), (K3), (K5), (K6) and (K8); where data ranks differ, (K7).

        Args:
            at: the pipelines.
            left_bytes: P R - OGP of each.
        """
        bound = np.maximum(
            np.maximum(self._mean(at), self._crowded(at)),
            at.micro_batches * self.work.max(),
        )
        bound = np.maximum(
            bound, _over(at.micro_batches * self._byte_ticks, left_bytes)
        )
        bound = np.maximum(bound, self.hold.sum())
        apart: Floats | float = (
            np.maximum(bound, self._turned(at)) if self.may_differ else np.inf
        )
        return np.where(at.are_alike, bound, apart)

    @cached_property
    def _byte_ticks(self) -> float:
        return float((self.activation_bytes * _from_here(self.hold)).sum()) * _LESS

    @cached_property
    def _behind(self) -> Ticks:
        """D, by number of layers."""
        return _before(self.idle)

    @cached_property
    def _longest(self) -> tuple[Ticks, Ticks]:
        """Running totals of work, the longest layer first, and of forwards likewise."""
        return _before(np.sort(self.work)[::-1]), _before(np.sort(self.forward)[::-1])

    def idle_ticks(self, at: Pipelines) -> Ticks:
        """Sum over k < P of D(k)."""
        idle: Ticks = _before(self._behind)[at.ranks]
        return idle

    def _mean(self, at: Pipelines) -> Floats:
        mean: Floats = (
            at.micro_batches * self.work.sum() + self.idle_ticks(at)
        ) / at.ranks
        return mean

    def _crowded(self, at: Pipelines) -> Floats:
        bound, layers, (work, _) = (
            np.zeros(len(at.ranks)),
            len(self.work),
            self._longest,
        )
        for k in _shares(layers, at.ranks):
            for left_out in _LEFT_OUT:
                number = np.minimum(layers - left_out, k * at.ranks)
                behind = number - (k - 1) * at.ranks - 1
                exist = (behind >= 0) & (number >= k)
                number, behind = np.maximum(number, 0), np.maximum(behind, 0)
                crowded = np.where(
                    number > k, at.micro_batches * _last(work, number, k + 1), _NEVER
                )
                even = self._behind[behind] + at.micro_batches * _last(work, number, k)
                bound = np.where(
                    exist, np.maximum(bound, np.minimum(even, crowded)), bound
                )
        return bound

    def _turned(self, at: Pipelines) -> Floats:
        """(B2) as (K7), and its mean over all ranks."""
        layers, (work, forward), ahead = (
            len(self.work),
            self._longest,
            np.minimum(at.micro_batches, at.ranks),
        )
        later = (at.micro_batches - 1) * work[-1] - (ahead - 1) * forward[-1]
        bound = later / at.ranks
        for k in _shares(layers, at.ranks):
            number = (k - 1) * at.ranks + 1
            shortest = _last(work, np.minimum(number, layers), k)
            least = (at.micro_batches - 1) * shortest - (ahead - 1) * forward[
                np.minimum(k, layers)
            ]
            bound = np.where(number <= layers, np.maximum(bound, least), bound)
        turned: Floats = work[-1] + bound
        return turned


@dataclass(frozen=True)
class Mixed:
    """Every layer in a recompute mode of its own, where data ranks are alike; layers alike share their modes."""

    rates: Floats
    """r of (K9)."""
    sums: Floats
    """Of the cheapest modes, by rate."""
    fastest: Alike
    """Each layer at its fastest, without a bound on memory."""

    @classmethod
    def of(cls, modes: Sequence[Alike], room_bytes: float) -> Self:
        """Of the same layers in every mode."""
        work, forward = np.array([mode.work for mode in modes]), modes[0].forward
        least = work.min(axis=0)
        held = np.array([mode.activation_bytes for mode in modes]) * _from_here(least)
        rates = _RATES / max(1.0, room_bytes)
        sums = np.array([(work + rate * held).min(axis=0).sum() for rate in rates])
        return cls(
            rates, sums, Alike(forward, least, least, np.zeros(len(least)), least)
        )

    def least(self, at: Pipelines, left_bytes: Floats) -> Floats:
        """Ticks that no step beats: (K9), and the rest at the fastest modes; see `Alike.least`."""
        bound, idle = self.fastest.least(at, left_bytes), self.fastest.idle_ticks(at)
        for rate, total in zip(self.rates, self.sums, strict=True):
            most = at.ranks + rate * np.maximum(left_bytes, 0.0)
            bound = np.maximum(bound, (at.micro_batches * total + idle) / most * _LESS)
        return np.where(at.are_alike & (left_bytes > 0), bound, np.inf)


def _shares(layers: int, ranks: Ticks) -> tuple[Ticks, Ticks]:
    """Numbers of layers of which some rank must hold so many."""
    share = layers // ranks
    return np.maximum(1, share), share + 1


def _last(totals: Ticks, number: Ticks, count: Ticks) -> Ticks:
    """Of so many values, that running totals are of, the sum of the last."""
    last: Ticks = totals[number] - totals[np.maximum(0, number - count)]
    return last


def _over(held: NDArray[Any], left_bytes: Floats) -> Floats:
    """Ticks over which what is held fits beside OGP; never, where that fills all there is."""
    over: Floats = np.divide(
        held, left_bytes, out=np.full(len(held), np.inf), where=left_bytes > 0
    )
    return over


def _before(values: Ticks) -> Ticks:
    """Sums over those before each, and over all."""
    return np.concatenate([[0], np.cumsum(values)])


def _from_here(values: Ticks) -> Ticks:
    """Sums over each and those behind it."""
    sums: Ticks = np.cumsum(values[::-1])[::-1]
    return sums


def _by_layer(values: Sequence[int]) -> Ticks:
    return np.array(values, dtype=np.int64)
