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

Several options of a row are bounded at once: arrays begin with the option.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayerCost
from planner.search.engine.balance import balanced_cut, balanced_cut_among
from planner.search.engine.best_cut import best_cut
from planner.search.engine.bound import (
    Order,
    Traits,
    stage_ranks,
    stages_of_ranks,
    traits_of,
)
from planner.search.engine.paths import Paths, StageWork, paths_of
from planner.search.engine.prices import Floats, Prices
from planner.search.engine.sums import Stack

Sizes = tuple[int, ...]
"""Layers of every stage."""
MOST_REPAIRS = 12
"""Layers that are moved to make a cut fit."""
_ROUNDING = 1e-9


class _Cuts(NamedTuple):
    """Ranges of layers of the stages of one cut or several, without their ends."""

    starts: NDArray[np.intp]
    """[cut, stage]"""
    ends: NDArray[np.intp]

    @classmethod
    def of(cls, cuts: Sequence[Sizes]) -> _Cuts:
        """Return the layers of stages with so many of them."""
        counts = np.array(cuts, dtype=np.intp)
        ends = np.cumsum(counts, axis=1)
        return cls(ends - counts, ends)

    def of_stages(self, sums: Floats) -> Floats:
        """Return sums over the layers of every stage, [option or cut, stage]."""
        return self.at(sums, self.ends) - self.at(sums, self.starts)

    def at(self, sums: Floats, layers: NDArray[np.intp]) -> Floats:
        """Return sums over the first layers, of one option or one cut."""
        found: Floats = sums[0][layers] if len(sums) == 1 else sums[:, layers[0]]
        return found


@dataclass
class CutBounds:
    """Lower bounds on a cut under several options, or on several cuts under one.

    A step ends with the slowest class of replicas.
    """

    stacks: tuple[Stack, ...]
    """Of every class."""
    order: Order

    @property
    def has_one_option(self) -> bool:
        """Whether several cuts are bounded at once."""
        return len(self.stacks[0].work) == 1

    def times(self, sizes: Sizes) -> Floats:
        """Return nanoseconds of a cut per option, with memory for everything."""
        every = [each.times(sizes) for each in self._replicas]
        most: Floats = np.max(every, axis=0)
        return most

    def bounds(self, cuts: Sequence[Sizes], limit: float = np.inf) -> Floats:
        """Return nanoseconds per option or cut; infinity: it does not fit.

        Args:
            cuts: one, or several where there is one option.
            limit: nanoseconds; a bound above it need not be close.
        """
        every = [each.bounds(cuts, limit) for each in self._replicas]
        most: Floats = np.max(every, axis=0)
        return most

    def free(self, cuts: Sequence[Sizes]) -> Floats:
        """Return the bytes that every rank has left if it recomputes all it can."""
        least: Floats = np.min([each.free(cuts) for each in self._replicas], axis=0)
        return least

    def recomputes(self, sizes: Sizes) -> bool:
        """Return whether a rank with these layers lacks memory in the fastest modes."""
        cut = _Cuts.of([sizes])
        return any(bool(each.recomputation(cut).any()) for each in self._replicas)

    def of_stages(self, starts: NDArray[np.intp], ends: NDArray[np.intp]) -> Floats:
        """Return nanoseconds of every rank with one stage, under one option.

        Args:
            starts: first layers of stages.
            ends: the layers after their last ones.

        Returns:
            [stage, rank]; infinity: the stage does not fit on the rank.
        """
        shape = (len(starts), self.order.ranks)
        cut = _Cuts(
            np.broadcast_to(starts[:, None], shape),
            np.broadcast_to(ends[:, None], shape),
        )
        most: Floats = np.max([each.of_ranks(cut) for each in self._replicas], axis=0)
        return most

    @cached_property
    def _replicas(self) -> list[_ReplicaBounds]:
        found = []
        for stack in self.stacks:
            order = self.order
            if stack.micro_batches is not None:
                order = order._replace(micro_batches=stack.micro_batches)
            found.append(_ReplicaBounds(stack, order))
        return found


@dataclass
class _ReplicaBounds:
    """Lower bounds on a cut on identical replicas."""

    stack: Stack
    order: Order

    def bounds(self, cuts: Sequence[Sizes], limit: float) -> Floats:
        """Return nanoseconds per option or cut; infinity: it does not fit.

        Args:
            cuts: one, or several where there is one option.
            limit: nanoseconds; a bound above it need not be close.
        """
        cut, stack = _Cuts.of(cuts), self.stack
        recomputation = self.recomputation(cut)
        tails = self._tails(cut)
        most = self._most(self._of_each_rank(cut, recomputation, tails))
        is_known = stack.staggers_steps or stack.micro_batches is not None
        if is_known or most.min() >= limit:
            return most
        paths = paths_of(self.order)
        if paths is None:
            return most
        longest = self._longest(cut, paths, recomputation, tails)
        closer: Floats = np.maximum(most, longest)
        return closer

    def times(self, sizes: Sizes) -> Floats:
        """Return nanoseconds of a cut per option, with memory for everything."""
        cut = _Cuts.of([sizes])
        of_each = self._of_each_rank(cut, np.zeros((1, 1)), self._tails(cut))
        return self._most(of_each)

    def of_ranks(self, cut: _Cuts) -> Floats:
        """Return nanoseconds of every rank by itself."""
        return self._of_each_rank(cut, self.recomputation(cut), self._tails(cut))

    def _of_each_rank(self, cut: _Cuts, recomputation: Floats, tails: Floats) -> Floats:
        """Return the step if a rank were the slowest, [option or cut, rank]."""
        order, stack = self.order, self.stack
        once = self._of_ranks(cut.of_stages(stack.work)) + recomputation
        timing = stack.timing(order.virtual_stages)
        actions = 2 * order.micro_batches * order.virtual_stages * order.chunks
        waiting = actions * timing.waiting
        busy = once * order.micro_batches / stack.speeds + waiting[:, None]
        if stack.staggers_steps:
            staggered: Floats = busy + tails
            return staggered
        lowest = cut.starts[:, : order.ranks]
        hops = np.arange(order.ranks) * (timing.waiting + timing.transfer)[:, None]
        before = cut.at(stack.first_forward, lowest) + hops
        after = tails
        if self._traits.ends_low:
            back = cut.at(stack.first_backward, lowest) + hops
            after = np.maximum(tails, back + stack.fixed_tail[:, None])
        ends: Floats = before + busy + after
        return ends

    def _longest(
        self, cut: _Cuts, paths: Paths, recomputation: Floats, tails: Floats
    ) -> Floats:
        """Return the longest path through the order."""
        stack = self.stack
        timing = stack.timing(self.order.virtual_stages)
        work = StageWork(
            forward=cut.of_stages(stack.whole_forward),
            forward_attention=cut.of_stages(stack.forward_attention),
            backward=cut.of_stages(stack.whole_backward),
            input=cut.of_stages(stack.input),
            weight=cut.of_stages(stack.weight),
            backward_attention=cut.of_stages(stack.backward_attention),
            recomputation=np.nan_to_num(recomputation, posinf=0.0),
            tails=tails,
            waiting=timing.waiting,
            transfer=timing.transfer,
        )
        longest: Floats = paths.nanoseconds(work) * (1 - _ROUNDING)
        return longest

    def free(self, cuts: Sequence[Sizes]) -> Floats:
        """Return the bytes that every rank has left if it recomputes all it can."""
        cut, stack = _Cuts.of(cuts), self.stack
        saved = cut.of_stages(stack.least_saved) * self._units
        states = cut.of_stages(stack.states)
        taken = self._of_ranks(saved + states) + self._others(cut)
        free: Floats = self._free(cut) - taken
        return free

    def _free(self, cut: _Cuts) -> Floats:
        """Return the bytes of every rank for states, activations and temporaries.

        What layers of a rank share is counted with each of them, and free but for one.
        """
        free = self.stack.free
        for place, layers in enumerate(self.stack.shared_layers):
            up_to = np.searchsorted(layers, np.arange(cut.ends.max() + 1))
            held = self._of_ranks(cut.of_stages(up_to[None].astype(np.float64)))
            copies = np.maximum(0.0, held - 1)
            free = free + copies * self.stack.shared_bytes[:, place, None]
        return free

    def _others(self, cut: _Cuts) -> Floats:
        """Return bytes of every rank that no recomputation frees.

        They are what stages keep of their inputs and outputs, receive buffers, and the
        least temporary of the first or last layer of any stage.
        """
        stack = self.stack
        outputs = cut.at(stack.outgoing, cut.ends)
        inputs = cut.at(stack.outgoing, cut.starts)
        kept = stack.keeps_outputs * outputs + stack.keeps_inputs * inputs
        kept = kept * self._units + cut.of_stages(stack.attention_bytes)
        outputs = outputs.copy()
        outputs[:, -1] = 0.0
        buffers = stack.buffers * (inputs + outputs) / self.order.chunks
        temporary = np.maximum(
            cut.at(stack.temporary, cut.starts), cut.at(stack.temporary, cut.ends - 1)
        )
        of_ranks = stages_of_ranks(self.order)
        largest = buffers[:, of_ranks].max(axis=2)
        largest = largest + temporary[:, of_ranks].max(axis=2)
        others: Floats = self._of_ranks(kept) + largest
        return others

    def _most(self, ends: Floats) -> Floats:
        most: Floats = ends.max(axis=1) * (1 - _ROUNDING)
        return most

    @cached_property
    def _traits(self) -> Traits:
        return traits_of(self.order)

    @cached_property
    def _units(self) -> Floats:
        """Micro-batches that are held of every stage."""
        return self._traits.units / self.order.chunks

    def _of_ranks(self, of_stages: Floats) -> Floats:
        """Return sums over the stages of every rank, [option, rank]."""
        found: Floats = of_stages[:, stages_of_ranks(self.order)].sum(axis=2)
        return found

    def recomputation(self, cut: _Cuts) -> Floats:
        """Return the least recomputation of every rank for one micro-batch."""
        stack, units = self.stack, self._units
        kept = cut.of_stages(stack.saved) * units
        spared = cut.of_stages(stack.spared) * units
        taken = self._of_ranks(kept - spared + cut.of_stages(stack.states))
        excess = np.maximum(0.0, taken + self._others(cut) - self._free(cut))
        if not excess.any():
            return excess
        layers = cut.of_stages(stack.main) * units
        held = layers[:, stages_of_ranks(self.order)]
        of_ranks = np.maximum(units, _ROUNDING)[stages_of_ranks(self.order)]
        capacity = held[..., None] * stack.freed_bytes[:, None, None, :]
        rates = stack.freed_rates[:, None, None, :] / of_ranks[None, ..., None]
        rates = np.broadcast_to(rates, capacity.shape)
        shape = (*excess.shape, capacity.shape[2] * capacity.shape[3])
        return _cheapest(excess, capacity.reshape(shape), rates.reshape(shape))

    def _tails(self, cut: _Cuts) -> Floats:
        """Return the least reduction and optimizer of every rank that nothing hides."""
        stack = self.stack
        reduction = self._of_ranks(cut.of_stages(stack.reduction))
        update = self._of_ranks(cut.of_stages(stack.update))
        tails = reduction + update + self._of_ranks(cut.of_stages(stack.optimizer))
        if stack.overlaps_reduction:
            of_first = self._of_first(stack.reduction, cut)
            hidden = self._of_ranks(cut.of_stages(stack.backward)) * stack.overlap
            tails = tails - np.minimum(reduction - of_first, hidden)
        if stack.overlaps_gathers:
            of_first = self._of_first(stack.update, cut)
            hidden = self._of_ranks(cut.of_stages(stack.forward)) * stack.overlap
            tails = tails - np.minimum(update - of_first, hidden)
        tails = np.maximum(0.0, tails / stack.speeds)
        least: Floats = np.maximum(0.0, tails + stack.fixed_tail[:, None])
        return least

    def _of_first(self, sums: Floats, cut: _Cuts) -> Floats:
        """Return values of the first layer of every rank."""
        first = cut.starts[:, : self.order.ranks]
        found: Floats = cut.at(sums, first + 1) - cut.at(sums, first)
        return found


@dataclass
class RuleCuts:
    """The cuts of a row's rule."""

    prices: Prices
    order: Order

    @cached_property
    def bounds(self) -> CutBounds:
        """Bounds of cuts under these prices alone."""
        return CutBounds(self.prices.stacks, self.order)

    def bound(self, sizes: Sizes) -> float:
        """Return nanoseconds that a cut takes at least; infinity: it does not fit."""
        return float(self.bounds.bounds([sizes])[0])

    @cached_property
    def sizes(self) -> tuple[Sizes, ...]:
        """The distinct cuts of the rule that fit.

        If none does, layers of each are moved to ranks with free memory; the result may
        still not fit.
        With one stage per rank, the best cut where the rule's would recompute.
        """
        cuts = tuple(dict.fromkeys(self._cuts()))
        best = self._best(cuts)
        if best is not None:
            return (best,)
        free = self.bounds.free(cuts)
        fits: list[bool] = [min(ranks) >= 0 for ranks in free.tolist()]
        if any(fits):
            return tuple(compress(cuts, fits))
        if free.sum(axis=1).max() + self._most_freed < 0:
            return cuts
        return tuple(dict.fromkeys(map(self._fitted, cuts)))

    def _best(self, cuts: Sequence[Sizes]) -> Sizes | None:
        """Return the best cut with one stage per rank, if those of the rule recompute."""
        ranks = self.order.ranks
        if ranks == 1 or len(cuts[0]) != ranks:
            return None
        if not any(map(self.bounds.recomputes, cuts)):
            return None
        most = 2 * max(map(max, cuts)) + 1
        layers = len(self.prices.kind_of)
        return best_cut(layers, ranks, most, self.bounds.of_stages)

    @property
    def _most_freed(self) -> float:
        """Bytes of all ranks together that moves of layers free at most."""
        units = traits_of(self.order).units.max() / self.order.chunks
        saved = MOST_REPAIRS * units * self.prices.least_activations.max()
        temporary = self.order.ranks * self.prices.least_temporary.max()
        return float(saved + temporary)

    def _cuts(self) -> Iterator[Sizes]:
        """Yield the cut of the rule for work in the fastest and in the smallest modes."""
        known = self.prices.known_cuts
        ranks = stage_ranks(self.order)
        if ranks not in known:
            known[ranks] = tuple(self._balanced(ranks))
        yield from known[ranks]

    def _balanced(self, ranks: tuple[int, ...]) -> Iterator[Sizes]:
        smallest = [
            min(modes, key=lambda each: each.activation_bytes)
            for modes in self.prices.modes
        ]
        for chosen in (self.prices.fastest, smallest):
            works = [_work(cost) for cost in chosen]
            of_layers = tuple(works[kind] for kind in self.prices.kind_of)
            for replicas in self.prices.replicas:
                speeds = replicas.speeds
                if len(speeds) == 1:
                    yield balanced_cut(of_layers, ranks)
                else:
                    yield _on_unequal_ranks(of_layers, speeds, ranks)

    def _fitted(self, sizes: Sizes) -> Sizes:
        """Return a cut with layers moved from the fullest ranks to the emptiest."""
        moved = np.array(sizes, dtype=np.intp)
        ranks = np.array(stage_ranks(self.order), dtype=np.intp)
        for _ in range(MOST_REPAIRS):
            free = self.bounds.free([tuple(moved.tolist())])[0]
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


def _on_unequal_ranks(
    work: tuple[int, ...], speeds: Floats, stage_ranks: tuple[int, ...]
) -> Sizes:
    """Return the cut of the rule on ranks of different speeds.

    Args:
        work: of every layer on a rank of speed 1.
        speeds: of every pipeline rank.
        stage_ranks: rank of every stage.
    """
    distinct = sorted(set(speeds.tolist()), reverse=True)
    times = [tuple(max(1, round(each / speed)) for each in work) for speed in distinct]
    devices = tuple(distinct.index(speed) for speed in speeds.tolist())
    return balanced_cut_among(tuple(times), devices, stage_ranks)


def _work(cost: LayerCost) -> int:
    return max(1, cost.forward_ticks + cost.backward_ticks)


def _cheapest(excess: Floats, capacity: Floats, rates: Floats) -> Floats:
    """Return what it costs to free bytes, the cheapest first; infinity: too few.

    Args:
        excess: bytes to free, [option, rank].
        capacity: bytes that every step may free, [option, rank, step].
        rates: nanoseconds per byte, [option, rank, step].
    """
    order = np.argsort(rates, axis=2, kind="stable")
    capacity = np.take_along_axis(capacity, order, axis=2)
    rates = np.take_along_axis(rates, order, axis=2)
    before = np.cumsum(capacity, axis=2) - capacity
    freed = np.clip(excess[..., None] - before, 0.0, capacity)
    total: Floats = (freed * rates).sum(axis=2)
    is_short = excess - freed.sum(axis=2) > 1
    return np.where(is_short, np.inf, total)
