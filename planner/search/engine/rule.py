"""Cuts by the rule of a row's schedule, and a lower bound on the step of one cut.

The rule balances the work of the pipeline ranks: once in the fastest recompute modes,
once in those that save least. The bound on a cut looks at every rank by itself:

    T >= D + (its work + its least recomputation) + max(U, tail)

D is the forward of the first chunk through the stages before the rank's lowest one. U
is the backward of the last chunk through them, where the rank ends with the backward of
its lowest stage. The tail is the part of gradient reduction and optimizer that compute
cannot hide.

A rank whose saved bytes exceed its memory recomputes. Of a layer of the main kind, the
modes on the lower hull of bytes and time free so many bytes for so many nanoseconds; of
a stage that holds u micro-batches at the peak, u times the bytes. The cheapest bytes
come first, in fractions of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayerCost
from planner.search.engine.bound import (
    Order,
    Traits,
    lower_hull,
    stage_ranks,
    traits_of,
)
from planner.search.engine.prices import Floats, Prices, Timing
from planner.search.stage_maps.dealing import deal

Sizes = tuple[int, ...]
"""Layers of every stage."""
MOST_REPAIRS = 12
"""Layers that are moved to make a cut fit."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of the first n layers, [0] to [layers]."""

    work: Floats
    """Nanoseconds of one micro-batch in the fastest modes."""
    saved: Floats
    """Saved bytes in the fastest modes."""
    least: Floats
    """Saved bytes in the modes that save least."""
    spared: Floats
    """Of those in the fastest modes, what kinds other than the main one may free."""
    states: Floats
    main: Floats
    """Layers of the main kind."""
    reduction: Floats
    """Nanoseconds of gradient reduction without the gathering of updates."""
    update: Floats
    optimizer: Floats
    forward: Floats
    backward: Floats
    """In the longest mode, which hides most of the reduction."""


@dataclass(frozen=True, slots=True)
class _Freed:
    """A step to the next mode of a layer of the main kind."""

    saved_bytes: float
    nanoseconds_per_byte: float


@dataclass
class RuleCuts:
    """The cuts of a row's rule and what a cut takes at least."""

    prices: Prices
    order: Order

    @cached_property
    def sizes(self) -> tuple[Sizes, ...]:
        """The distinct cuts of the rule; of one that does not fit, the nearest that does."""
        cuts = dict.fromkeys(self._cuts())
        fitting = [sizes for sizes in cuts if not self._is_too_large(sizes)]
        return tuple(fitting or dict.fromkeys(map(self._fitted, cuts)))

    def _cuts(self) -> Iterator[Sizes]:
        ranks = stage_ranks(self.order)
        leanest = [
            min(modes, key=lambda each: each.activation_bytes)
            for modes in self.prices.modes
        ]
        for chosen in (self.prices.fastest, leanest):
            works = [_work(cost) for cost in chosen]
            yield deal(tuple(works[kind] for kind in self.prices.kind_of), ranks)

    def _is_too_large(self, sizes: Sizes) -> bool:
        return bool((self._free(sizes) < 0).any())

    def _fitted(self, sizes: Sizes) -> Sizes:
        """Return a cut with layers moved from the fullest ranks to the emptiest."""
        moved = np.array(sizes, dtype=np.intp)
        ranks = self._ranks
        for _ in range(MOST_REPAIRS):
            free = self._free(tuple(moved.tolist()))
            fullest, emptiest = int(free.argmin()), int(free.argmax())
            if free[fullest] >= 0 or free[emptiest] <= 0:
                break
            givers = np.where(ranks == fullest, moved, 0)
            if givers.max() < 2:
                break
            takers = np.where(ranks == emptiest, moved, np.iinfo(np.intp).max)
            moved[givers.argmax()] -= 1
            moved[takers.argmin()] += 1
        return tuple(moved.tolist())

    def _free(self, sizes: Sizes) -> Floats:
        """Return the bytes that every rank has left if it recomputes all it can."""
        sums = self._sums
        counts = np.array(sizes, dtype=np.intp)
        ends = np.cumsum(counts)
        starts = ends - counts
        units = self._traits.units / self.order.chunks
        kept = (sums.least[ends] - sums.least[starts]) * units
        states = sums.states[ends] - sums.states[starts]
        taken = np.bincount(self._ranks, weights=kept + states)
        free: Floats = self.prices.free_bytes - taken.astype(np.float64)
        return free

    def bound(self, sizes: Sizes) -> float:
        """Return nanoseconds that a cut takes at least; infinity: it does not fit."""
        order, sums = self.order, self._sums
        counts = np.array(sizes, dtype=np.intp)
        ends = np.cumsum(counts)
        starts = ends - counts
        work = self._by_rank(sums.work, starts, ends)
        once: Floats = work + self._recomputation(starts, ends)
        if not np.isfinite(once).all():
            return float("inf")
        busy = once * order.micro_batches + self._waiting
        lowest = starts[: order.ranks]
        tails = self._tails(starts, ends)
        if self.prices.costs.work.framework.staggers_steps:
            return float((busy + tails).max()) * (1 - _ROUNDING)
        before = self.prices.first_forward[lowest] + self._hops
        after = tails
        if self._traits.ends_low:
            back = self.prices.first_backward[lowest] + self._hops
            after = np.maximum(tails, back + self.prices.fixed_tail)
        return float((before + busy + after).max()) * (1 - _ROUNDING)

    @cached_property
    def _ranks(self) -> NDArray[np.intp]:
        return np.array(stage_ranks(self.order), dtype=np.intp)

    @cached_property
    def _traits(self) -> Traits:
        return traits_of(self.order)

    @cached_property
    def _timing(self) -> Timing:
        return self.prices.timing(self.order.virtual_stages)

    @cached_property
    def _hops(self) -> Floats:
        """Waiting and transfers before the lowest stage of every rank."""
        each = self._timing.waiting + self._timing.transfer
        hops: Floats = np.arange(self.order.ranks, dtype=np.float64) * each
        return hops

    @property
    def _waiting(self) -> float:
        """Waiting of all actions of a rank."""
        order = self.order
        actions = 2 * order.micro_batches * order.virtual_stages * order.chunks
        return actions * self._timing.waiting

    def _by_rank(
        self, sums: Floats, starts: NDArray[np.intp], ends: NDArray[np.intp]
    ) -> Floats:
        """Return sums over the layers of every rank."""
        weights = sums[ends] - sums[starts]
        found: Floats = np.bincount(self._ranks, weights=weights).astype(np.float64)
        return found

    def _recomputation(
        self, starts: NDArray[np.intp], ends: NDArray[np.intp]
    ) -> Floats:
        """Return the least recomputation of every rank for one micro-batch."""
        sums, ranks = self._sums, self.order.ranks
        units = self._traits.units / self.order.chunks
        kept = (sums.saved[ends] - sums.saved[starts]) * units
        spared = (sums.spared[ends] - sums.spared[starts]) * units
        states = sums.states[ends] - sums.states[starts]
        taken = np.bincount(self._ranks, weights=kept - spared + states)
        excess = np.maximum(0.0, taken - self.prices.free_bytes)
        if not excess.any():
            return np.zeros(ranks)
        layers = (sums.main[ends] - sums.main[starts]) * units
        capacity = np.zeros((ranks, len(self._freed) * self.order.virtual_stages))
        rates = np.full_like(capacity, np.inf)
        place = self._place_on_rank
        for step, freed in enumerate(self._freed):
            columns = place * len(self._freed) + step
            capacity[self._ranks, columns] = layers * freed.saved_bytes
            rates[self._ranks, columns] = freed.nanoseconds_per_byte / np.maximum(
                units, _ROUNDING
            )
        return _cheapest(excess, capacity, rates)

    @cached_property
    def _place_on_rank(self) -> NDArray[np.intp]:
        """Of every stage: its place among the stages of its rank."""
        seen = [0] * self.order.ranks
        places = []
        for rank in stage_ranks(self.order):
            places.append(seen[rank])
            seen[rank] += 1
        return np.array(places, dtype=np.intp)

    def _tails(self, starts: NDArray[np.intp], ends: NDArray[np.intp]) -> Floats:
        """Return the least reduction and optimizer of every rank that nothing hides."""
        sums, framework = self._sums, self.prices.costs.work.framework
        reduction = self._by_rank(sums.reduction, starts, ends)
        update = self._by_rank(sums.update, starts, ends)
        optimizer = self._by_rank(sums.optimizer, starts, ends)
        share = self.prices.costs.work.constants.overlap_fraction
        tails = reduction + update + optimizer
        first = starts[: self.order.ranks]
        if framework.overlaps_reduction:
            hidden = share * self._by_rank(sums.backward, starts, ends)
            most = reduction - (sums.reduction[first + 1] - sums.reduction[first])
            tails = tails - np.minimum(most, hidden)
        if framework.overlaps_gathers:
            hidden = share * self._by_rank(sums.forward, starts, ends)
            most = update - (sums.update[first + 1] - sums.update[first])
            tails = tails - np.minimum(most, hidden)
        least: Floats = np.maximum(0.0, tails + self.prices.fixed_tail)
        return least

    @cached_property
    def _freed(self) -> tuple[_Freed, ...]:
        """Steps between the modes of the main kind, the cheapest bytes first."""
        points = {
            (float(one.activation_bytes), float(one.backward_ticks))
            for one in self.prices.modes[self._main]
        }
        found = []
        for (saved, spent), (fewer, longer) in pairwise(lower_hull(points)):
            freed = saved - fewer
            found.append(_Freed(freed, (longer - spent) / freed))
        return tuple(found)

    @cached_property
    def _main(self) -> int:
        """The kind with most of the work."""
        return int((self.prices.counts * self.prices.work).argmax())

    @cached_property
    def _sums(self) -> _Sums:
        prices, main = self.prices, self._main
        kinds = np.array(prices.kind_of)
        saved = np.array([float(one.activation_bytes) for one in prices.fastest])
        spared = saved - prices.least_activations
        spared[main] = 0.0
        is_main = np.zeros(len(saved))
        is_main[main] = 1.0
        firsts = [modes[0] for modes in prices.modes]
        longest = [
            float(max(one.backward_ticks for one in modes)) for modes in prices.modes
        ]

        def summed(values: Floats) -> Floats:
            return np.concatenate([[0.0], np.cumsum(values[kinds])])

        def field(name: str) -> Floats:
            values = [float(getattr(one, name)) for one in firsts]
            return np.array(values)

        update = field("update_ticks")
        return _Sums(
            work=summed(prices.work),
            saved=summed(saved),
            least=summed(prices.least_activations),
            spared=summed(spared),
            states=summed(prices.states),
            main=summed(is_main),
            reduction=summed(field("reduction_ticks") - update),
            update=summed(update),
            optimizer=summed(field("optimizer_ticks")),
            forward=summed(field("forward_ticks")),
            backward=summed(np.array(longest)),
        )


def _work(cost: LayerCost) -> int:
    return max(1, cost.forward_ticks + cost.backward_ticks)


def _cheapest(excess: Floats, capacity: Floats, rates: Floats) -> Floats:
    """Return what it costs to free bytes, the cheapest first; infinity: too few.

    Args:
        excess: bytes to free, per rank.
        capacity: bytes that every step may free, [rank, step].
        rates: nanoseconds per byte, [rank, step].
    """
    order = np.argsort(rates, axis=1, kind="stable")
    capacity = np.take_along_axis(capacity, order, axis=1)
    rates = np.take_along_axis(rates, order, axis=1)
    before = np.cumsum(capacity, axis=1) - capacity
    freed = np.clip(excess[:, None] - before, 0.0, capacity)
    has_freed = freed > 0
    spent = np.where(has_freed, freed * np.where(has_freed, rates, 0.0), 0.0)
    total: Floats = spent.sum(axis=1)
    is_short = excess - freed.sum(axis=1) > 1
    return np.where(is_short, np.inf, total)
