"""A lower bound on the step of a row: no cut and no recomputation is faster.

With P pipeline ranks, V stages per rank, M micro-batches, w(r) the work of rank r for
one micro-batch in the chosen modes, W the sum of all w(r), q the least share of a
layer's work that its first chunk takes:

Work and fill
    (W1) any schedule: rank r starts after the forward of all stages before its lowest
         one, D(r), works M w(r), and where it ends with the backward of that stage the
         last gradient still goes through the stages before, U(r):
             T >= D(r) + M w(r) + U(r)
         The stages before have at least r layers. Several stages per rank: the mean
         over r. One: D + U >= q (w(0) + ... + w(r - 1)), whose best cut gives
             T >= q W / (1 - (1 - q / M)^P)
    (W2) 1f1b, one stage per rank, M > P: rank r waits for its first gradient while at
         most P - r forwards run, and for its last one after its last forward:
             T >= W + w(r + 1) + ... + w(P - 1) + (M - P + r) w(r)
         Equal w(r) meet all P inequalities with equality, and the dual weights are not
         negative, so no cut is faster than T = W + (M - 1) W / P.
    (W3) 1f1b, M <= P: for ranks with P - r >= M only T >= W + (M - 1) b(r), b the longer
         of forward and backward.
    (W4) gpipe: T >= W + (M - 1) max w(r).
    (W5) any schedule: the first chunk of a micro-batch goes down and up all stages; the
         gradients of weights count only where backwards are not split.

Capacity
    (C1) a rank that holds h micro-batches at its peak has room for h times the saved
         bytes of its layers in addition to their states; bytes and time per work of any mixture
         of modes are in the convex hull of those of the modes.
    (C2) so at a step of T a rank takes only so much of the model, and T is impossible
         if all ranks together take less than the whole model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.schedule import find
from planner.schedule.entry import Shape
from planner.schedule.in_flight import most_held
from planner.search.engine.hull import lower_hull
from planner.search.engine.prices import Floats, Prices
from planner.search.engine.split_backward import splits_backward

IMPOSSIBLE = 2**62
"""Nanoseconds of a row that fits under no cut."""
_ROUNDING = 1 - 1e-9
_BISECTIONS = 5
_ANY_WORK = 1e30
_MAIN_SHARE = 0.8
"""Share of the work from which the memory of the main kind alone is looked at."""


class Order(NamedTuple):
    """A schedule and the numbers that it is built from."""

    schedule: str
    ranks: int
    micro_batches: int
    virtual_stages: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Traits:
    """What a schedule has in common for all cuts."""

    held: Floats
    """Per rank: whole micro-batches of all its layers that it holds at its peak."""
    units: Floats
    """Per stage: units that its rank holds of it at its peak, at least."""
    ends_low: bool
    """Every rank ends with the full backward of its lowest stage."""
    is_split: bool
    """Some backwards are split."""


@lru_cache(maxsize=1 << 14)
def traits_of(order: Order) -> Traits:
    """Return traits of a schedule from its closed forms, else from the one built."""
    units = _held_by_stage(order)
    is_split = splits_backward(order.schedule)
    held = np.full(order.ranks, np.inf)
    np.minimum.at(held, np.array(stage_ranks(order)), units)
    held = np.maximum(1.0, held / order.chunks)
    return Traits(held, units, ends_low=not is_split, is_split=is_split)


def _held_by_stage(order: Order) -> Floats:
    """Return units of every stage that its rank holds at one moment, the peak.

    A synthesized order has at least one micro-batch of every stage: the first one that
    comes back.
    """
    numbers = (order.ranks, order.micro_batches, order.virtual_stages, order.chunks)
    ranks = np.array(stage_ranks(order))
    places = np.zeros(len(ranks), dtype=np.int64)
    seen: Counter[int] = Counter()
    for stage, rank in enumerate(ranks.tolist()):
        places[stage] = seen[rank]
        seen[rank] += 1
    entry = find(order.schedule)
    if entry.needs_durations:
        return np.full(len(ranks), float(order.chunks))
    units = entry.held_by_stage(*numbers, ranks, places)
    if units is not None:
        return units.astype(np.float64)
    built = np.zeros(len(ranks))
    for rank in range(order.ranks):
        mine = most_held(entry.rank_actions(Shape(*numbers), rank))
        built[list(mine)] = list(mine.values())
    return built


@lru_cache(maxsize=1 << 14)
def stage_ranks(order: Order) -> tuple[int, ...]:
    """Return the pipeline rank of every stage."""
    numbers = (order.ranks, order.micro_batches, order.virtual_stages, order.chunks)
    return find(order.schedule).stage_ranks(Shape(*numbers))


@lru_cache(maxsize=1 << 14)
def stages_of_ranks(order: Order) -> NDArray[np.intp]:
    """Return the stages of every rank, lowest first, [rank, local stage]."""
    ranks = np.array(stage_ranks(order), dtype=np.intp)
    shape = (order.ranks, order.virtual_stages)
    return np.argsort(ranks, kind="stable").reshape(shape)


def lower_bound(prices: Prices, order: Order, limit: int = IMPOSSIBLE) -> int:
    """Return nanoseconds that a row takes at least, whatever its cut and recomputation.

    Args:
        prices: of the row's layers with their option.
        order: of the row.
        limit: nanoseconds of a known step; a bound above it need not be exact.
    """
    return max(_of_replicas(each, order, limit) for each in prices.replicas)


def _of_replicas(prices: Prices, order: Order, limit: int) -> int:
    """Return a bound on the step of identical replicas."""
    if prices.micro_batches is not None:
        order = order._replace(micro_batches=prices.micro_batches)
    model = _Model(prices, order, traits_of(order))
    fill = model.fill()
    if fill >= limit:
        return int(fill * _ROUNDING)
    capacity = model.capacity(fill, limit)
    if capacity <= fill:
        return int(fill * _ROUNDING)
    return min(IMPOSSIBLE, int(capacity * _ROUNDING))


def least_kept(prices: Prices, order: Order) -> Floats:
    """Return a lower bound on what every rank keeps of its stages' exchanges, in bytes."""
    return _least_kept(order, *prices.exchanged, prices.keeps_outputs)


@lru_cache(maxsize=1 << 14)
def _least_kept(
    order: Order, inner: float, last: float, buffers: int, keeps_outputs: bool
) -> Floats:
    """Return bytes of `least_kept`.

    They are the outputs of a rank's stages, for every micro-batch held, and the buffers
    in which one of its stages receives.
    """
    units = traits_of(order).units / order.chunks
    outputs = units * inner
    outputs[-1] = units[-1] * last
    if not keeps_outputs:
        outputs = np.zeros(len(units))
    neighbours = np.full(len(units), 2.0)
    neighbours[0] -= 1
    neighbours[-1] -= 1
    of_ranks = stages_of_ranks(order)
    received = neighbours[of_ranks].max(axis=1) * buffers * inner / order.chunks
    kept: Floats = outputs[of_ranks].sum(axis=1) + received
    return kept


def first_actions(prices: Prices, order: Order) -> Floats:
    """Return the least nanoseconds before every rank's first action: D of (W1)."""
    return prices.first_forward[: order.ranks] + _hops(prices, order)


def ways(prices: Prices, order: Order) -> Floats:
    """Return D + U of (W1) of every rank."""
    if splits_backward(order.schedule):
        if not starts_late(prices):
            return np.zeros(order.ranks)
        return first_actions(prices, order)
    back: Floats = prices.first_backward[: order.ranks] + _hops(prices, order)
    return first_actions(prices, order) + back


def _hops(prices: Prices, order: Order) -> Floats:
    """Return waiting and transfers of one chunk before every rank."""
    timing = prices.timing(order.virtual_stages)
    ranks = np.arange(order.ranks, dtype=np.float64)
    hops: Floats = ranks * (timing.waiting + timing.transfer)
    return hops


def starts_late(prices: Prices) -> bool:
    """Return whether a step begins on all ranks at once."""
    staggers = prices.costs.work.framework.staggers_steps
    ranks = prices.costs.layout.pipeline_parallel_degree
    return not staggers or ranks == 1


class _Model:
    """Inequalities of one row."""

    def __init__(self, prices: Prices, order: Order, traits: Traits) -> None:
        self.prices = prices
        self.order = order
        self.timing = prices.timing(order.virtual_stages)
        self.traits = traits
        self.speeds = np.broadcast_to(prices.speeds, order.ranks)
        is_plain = order.virtual_stages == order.chunks == 1 and not prices.ranks
        self.is_plain = is_plain and order.schedule in ("1f1b", "gpipe")
        self.starts_late = starts_late(prices)
        self.fixed = prices.fixed_tail

    def fill(self) -> float:
        """Return nanoseconds by work and fill, with memory for everything."""
        prices, order = self.prices, self.order
        ranks, count = order.ranks, order.micro_batches
        chain = prices.chain(is_split=self.traits.is_split)
        least = max(self._mean_with_tails(), chain + self._ends())
        if self.is_plain:
            work = self._stage_work(prices.total_work)
            least = max(
                least, work * self._growth() + self._ends() + self._first_tail()
            )
        elif self._is_equal_chain():
            share = prices.first_share(with_backward=self.traits.ends_low)
            share = max(1e-12, share)
            shrink = 1 - (1 - share / count) ** ranks
            busy = share * prices.total_work / shrink
            least = max(least, busy + self._waiting() + self._last_tail())
        else:
            mean = count * prices.total_work + float(self.speeds @ self._ways())
            mean /= float(self.speeds.sum())
            least = max(least, mean + self._waiting() + self._last_tail())
        return least

    def _is_equal_chain(self) -> bool:
        """Return whether (W1) holds for one stage on each of several equal ranks."""
        is_chain = self.order.virtual_stages == 1 and not self.prices.ranks
        return is_chain and (self.starts_late or self.traits.ends_low)

    def capacity(self, least: float, limit: int) -> float:
        """Return the least nanoseconds at which all ranks take the whole model."""
        if not self._takes_all(float(limit)):
            return float(limit)
        if self._takes_all(least):
            return least
        low, high = least, float(limit)
        if limit == IMPOSSIBLE:
            high = max(1.0, 2 * least + 1)
            while not self._takes_all(high) and high < IMPOSSIBLE:
                low, high = high, 4 * high
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if self._takes_all(middle):
                high = middle
            else:
                low = middle
        return low

    def _stage_work(self, work: float) -> float:
        """Return the work of all stages with the waiting of their actions."""
        return work + 2 * self.order.ranks * self.timing.waiting

    def _waiting(self) -> float:
        """Return the waiting of all actions of a rank."""
        order = self.order
        actions = 2 * order.micro_batches * order.virtual_stages * order.chunks
        return actions * self.timing.waiting

    def _ends(self) -> float:
        """Return the transfers of one micro-batch down and up, and the fixed tail."""
        return 2 * (self.order.ranks - 1) * self.timing.transfer + self.fixed

    def _growth(self) -> float:
        """Return the least step / work of one micro-batch: (W2) to (W4)."""
        ranks, count = self.order.ranks, self.order.micro_batches
        if self.order.schedule == "gpipe" or count > ranks:
            return 1 + (count - 1) / ranks
        if count == 1:
            return 1.0
        slow = (ranks - count + 1) / ((count - 1) * self.prices.backward_share)
        return 1 + 1 / (1 + slow)

    def _first_tail(self) -> float:
        """Return the least tail of the first rank's layers, under equal work."""
        ranks, count = self.order.ranks, self.order.micro_batches
        rate = self.prices.tail_rate
        is_even = self.order.schedule == "gpipe" or count > ranks
        if not is_even or rate * (ranks - 1) > count - 1:
            return 0.0
        return rate * self.prices.total_work / ranks

    def _last_tail(self) -> float:
        return self.fixed

    def _mean_with_tails(self) -> float:
        """Return the mean over ranks of start, work and own tail."""
        prices, order = self.prices, self.order
        starts = float(self.speeds @ self._starts()) if self.starts_late else 0.0
        work = order.micro_batches * prices.total_work
        tails = float(prices.counts @ prices.tails)
        mean = (work + starts + tails) / float(self.speeds.sum())
        return mean + self._waiting() + self.fixed

    def _starts(self) -> Floats:
        """Return the nanoseconds before every rank's first action: D of (W1)."""
        return first_actions(self.prices, self.order)

    def _ways(self) -> Floats:
        """Return D + U of (W1) of every rank."""
        return ways(self.prices, self.order)

    def _limits(self, step: float) -> tuple[Floats, float]:
        """Return the work of one micro-batch that every rank, and all, have time for."""
        prices, order = self.prices, self.order
        ranks, count = order.ranks, order.micro_batches
        if not self.is_plain:
            each = step - self._last_tail() - self._waiting() - self._ways()
            limits = np.maximum(0.0, self.speeds * each / count)
            return limits, float(limits.sum())
        left = step - self._ends()
        waiting = 2 * self.timing.waiting
        total = max(0.0, left / self._growth() - ranks * waiting)
        spare = max(0.0, left - self._stage_work(prices.total_work))
        return np.maximum(0.0, spare / self._repeats() - waiting), total

    def _repeats(self) -> Floats:
        """Return how often a rank's work adds to the step in addition to all work once."""
        ranks, count = self.order.ranks, self.order.micro_batches
        if self.order.schedule == "gpipe":
            return np.full(ranks, max(1e-9, count - 1.0))
        repeats = np.arange(count - ranks, count, dtype=np.float64)
        low = (count - 1) * self.prices.backward_share
        return np.maximum(1e-9, np.where(repeats <= 0, low, repeats))

    def _takes_all(self, step: float) -> bool:
        """Return whether ranks may take the whole model at a step: (C1), (C2)."""
        limits, total = self._limits(step)
        if total < self.prices.total_work * (1 - 1e-12):
            return False
        return all(group.takes(limits, total) for group in self._groups)

    @cached_property
    def _groups(self) -> list[_Group]:
        """Kinds whose memory is looked at together: the main one, and all."""
        prices = self.prices
        whole = prices.counts * prices.work
        kinds = [kind for kind, work in enumerate(prices.work.tolist()) if work > 0]
        if not kinds:
            return []
        main = int(whole.argmax())
        groups = [[main]]
        if whole[main] < _MAIN_SHARE * prices.total_work:
            groups.append(kinds)
        held, kept = self.traits.held, least_kept(prices, self.order)
        return [_Group.of(prices, held, kept, group) for group in groups]


@dataclass(frozen=True, slots=True)
class _Group:
    """What memory permits of some kinds, per rank.

    A mixture of modes has bytes and time per nanosecond of work in the convex hull of
    the modes'. With less room per work a rank goes along the hull, so that the time of
    its work is convex and piecewise linear.
    """

    whole: float
    """Nanoseconds of all their layers in fastest modes."""
    others: float
    """The same of all other kinds."""
    lengths: Floats
    """Work in fastest modes that every piece has, [rank, piece]."""
    slopes: Floats
    """Nanoseconds per nanosecond of work in every piece, ascending."""
    layer: float
    """Nanoseconds of a layer, if all are equal; else 0."""
    count: float
    """Layers."""
    has_room: bool

    @classmethod
    def of(cls, prices: Prices, held: Floats, kept: Floats, kinds: list[int]) -> _Group:
        """Return the capacity of ranks.

        Args:
            prices: of the layers.
            held: micro-batches of every rank.
            kept: bytes of every rank in addition to those of layers.
            kinds: of the layers.
        """
        work = prices.work[kinds]
        whole = float(prices.counts[kinds] @ work)
        free = np.broadcast_to(prices.free_of_ranks, len(held))
        rooms = free - kept - float(prices.least_temporary[kinds].min())
        memories = list(zip(held.tolist(), rooms.tolist(), strict=True))
        known = {
            (units, room): _pieces(prices, units, kinds, room)
            for units, room in set(memories)
        }
        most = max(len(pieces) for pieces in known.values())
        lengths = np.zeros((len(held), most))
        slopes = np.full((len(held), most), _ANY_WORK)
        for rank, memory in enumerate(memories):
            for place, (length, slope) in enumerate(known[memory]):
                lengths[rank, place] = length
                slopes[rank, place] = slope
        return cls(
            whole=whole,
            others=prices.total_work - whole,
            lengths=lengths,
            slopes=slopes,
            layer=float(work[0]) if len(kinds) == 1 else 0.0,
            count=float(prices.counts[kinds].sum()),
            has_room=bool((rooms >= 0).any()),
        )

    def takes(self, limits: Floats, total: float) -> bool:
        """Return whether all ranks together may take all layers of these kinds.

        Args:
            limits: nanoseconds of work with recomputation, per rank.
            total: the same of all ranks together.
        """
        if not self.has_room:
            return False
        times = self.lengths * self.slopes
        before = np.cumsum(times, axis=1) - times
        spent = np.clip(limits[:, None] - before, 0.0, times)
        gained = spent / self.slopes
        if self.layer:
            alone = gained.sum(axis=1) / self.layer
            layers = np.floor(alone * (1 + 1e-12) + 1e-9)
            if layers.sum() < self.count:
                return False
        order = np.argsort(self.slopes, axis=None, kind="stable")
        cumulative = np.cumsum(spent.ravel()[order])
        left = total - self.others
        used = np.clip(left - (cumulative - spent.ravel()[order]), 0.0, None)
        used = np.minimum(used, spent.ravel()[order])
        placed = float((used / self.slopes.ravel()[order]).sum())
        return placed >= self.whole * (1 - 1e-9)


def _pieces(
    prices: Prices, held: float, kinds: list[int], room: float
) -> list[tuple[float, float]]:
    """Return work and slope of every piece of a rank's time by its work."""
    points = set()
    for kind in kinds:
        work = float(prices.work[kind])
        states = float(prices.states[kind])
        for one in prices.modes[kind]:
            size = (held * one.activation_bytes + states) / work
            points.add((size, (one.forward_ticks + one.backward_ticks) / work))
    pieces: list[tuple[float, float]] = []
    reached = spent = 0.0
    for size, rate in lower_hull(points):
        length = min(_ANY_WORK, room / size if size > 0 else _ANY_WORK) - reached
        if length <= 0:
            continue
        slope = ((reached + length) * rate - spent) / length
        pieces.append((length, max(1.0, slope)))
        reached += length
        spent = reached * rate
    return pieces or [(0.0, 1.0)]
