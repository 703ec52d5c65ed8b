"""A quick test: could an option of a row be faster than a limit?

It is rejected if its pipeline ranks cannot take all layers in time and memory. Options,
and rows that differ in their order alone, are compared at once. T is the limit, M the
micro-batches and V the stages per rank. With w the work of a layer of the main kind,
a(j) its saved bytes in the j-th mode of the lower hull of bytes and time, d(j) the time
that this mode adds to the one before, s its states, e its reductions and optimizer, and
u the units that a rank holds of its stages at one moment of its peak:

    (K1)  every stage has a layer, so that at most o stages of a rank, o the number of
          layers of other kinds, have none of the main kind. A rank with n of them holds
          U(n) >= c + n min(u). c is what the V - o stages of smallest u, which hold a
          layer each, have more than min(u): the sum of u - min(u)
    (K2)  n layers fit in mode j if a(j) U(n) + n s <= room; that gives n(j)
    (K3)  with more than n(j - 1) layers, the bytes of the excess are freed at a cost of
          d(j) / (a(j - 1) - a(j)) / max(u) at least, since a layer's recomputation
          frees max(u) times its bytes at most
    (K4)  so the time of n layers is at least the broken line through (n(j), t(j)),
          t(j) = n(j) w + U(n(j)) (d(1) + ... + d(j)) / max(u)
    (K5)  a rank starts after D and ends B before the step, as D and U of (W1) in
          `bound`: its micro-batches have T - D - B, and with their tail T - D - n e. T
          is impossible if all ranks together take fewer layers than the main kind has
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.search.engine.bound import (
    Order,
    least_kept,
    stage_ranks,
    starts_late,
    traits_of,
)
from planner.search.engine.hull import lower_hull
from planner.search.engine.prices import Floats, Prices
from planner.search.engine.split_backward import splits_backward

_MANY = 1e15
_ROUNDING = 1e-9


def may_beat(
    options: Sequence[Prices], orders: Sequence[Order], limit: float
) -> NDArray[np.bool_]:
    """Return whether layouts may take less than a limit, [option, order].

    Args:
        options: prices of layouts that differ in their options alone.
        orders: of equally many ranks, for every option.
        limit: nanoseconds.
    """
    found = np.ones((len(options), len(orders)), dtype=np.bool_)
    for replicas in zip(*(each.replicas for each in options), strict=True):
        found &= _may_beat(replicas, orders, limit)
    return found


def _may_beat(
    options: Sequence[Prices], orders: Sequence[Order], limit: float
) -> NDArray[np.bool_]:
    """Return whether identical replicas may take less than a limit, [option, order]."""
    count = options[0].micro_batches
    if count is not None:
        orders = [order._replace(micro_batches=count) for order in orders]
    main = _Main.of(options)
    if (main.work <= 0).any():
        return np.ones((len(options), len(orders)), dtype=np.bool_)
    of_orders = _known_orders(tuple(orders), main.others)
    kept = np.stack([least_kept(options[0], order) for order in orders])
    rooms = main.room - kept
    times = _Times.of(options, of_orders, orders[0].ranks, limit)
    layers = _layers_within(main, of_orders, times.of_pipeline, rooms, main.work)
    with_tail = main.work + main.tail / of_orders.micro_batches
    layers_with_tail = _layers_within(main, of_orders, times.of_tail, rooms, with_tail)
    layers = np.minimum(layers, layers_with_tail)
    may_beat: NDArray[np.bool_] = layers.sum(axis=2) >= main.count
    return may_beat & (main.room >= 0).any(axis=2)


@dataclass(frozen=True, slots=True)
class _Main:
    """The kind with most of the work; arrays are [option, 1, 1]."""

    work: Floats
    """Nanoseconds of a layer."""
    states: Floats
    tail: Floats
    """Nanoseconds that a layer adds to the end of its rank's step at least."""
    count: float
    others: int
    """Layers of other kinds."""
    room: Floats
    """Bytes for states and saved activations, [option, 1, rank or all]."""
    saved: tuple[Floats, ...]
    """Bytes per mode of the hull, most first."""
    added: tuple[Floats, ...]
    """Nanoseconds of every mode in addition to the first: d(1) + ... + d(j)."""

    @classmethod
    def of(cls, options: Sequence[Prices]) -> _Main:
        """Return the main kind of layouts with equal layers."""
        first = options[0]
        kind = int((first.counts * first.work).argmax())
        count = float(first.counts[kind])
        hulls = [_hull(each, kind) for each in options]
        modes = range(max(map(len, hulls)))
        points = [[hull[min(mode, len(hull) - 1)] for hull in hulls] for mode in modes]
        room = [
            each.free_of_ranks - float(each.least_temporary[kind]) for each in options
        ]
        return cls(
            work=_per_option([float(each.work[kind]) for each in options]),
            states=_per_option([float(each.states[kind]) for each in options]),
            tail=_per_option([max(0.0, float(each.tails[kind])) for each in options]),
            count=count,
            others=int(first.counts.sum() - count),
            room=np.stack(room)[:, None, :],
            saved=tuple(_per_option([bytes_ for bytes_, _ in each]) for each in points),
            added=tuple(_per_option([added for _, added in each]) for each in points),
        )


def _hull(prices: Prices, kind: int) -> list[tuple[float, float]]:
    """Return bytes, and nanoseconds in addition to the shortest, of a kind's modes."""
    points = {
        (float(one.activation_bytes), float(one.backward_ticks))
        for one in prices.modes[kind]
    }
    hull = lower_hull(points)
    shortest = hull[0][1]
    return [(bytes_, spent - shortest) for bytes_, spent in hull]


def _per_option(values: Sequence[float]) -> Floats:
    return np.array(values)[:, None, None]


@dataclass(frozen=True, slots=True)
class _Orders:
    """Schedules of equally many ranks, as arrays."""

    least: Floats
    """Fewest whole micro-batches that a rank holds of one of its stages, [order, rank]."""
    most: Floats
    """Most of them, [order, rank]."""
    before: Floats
    """c of (K1), [order, rank]."""
    micro_batches: Floats
    """[order, 1]"""
    actions: Floats
    """Forwards and backwards of a rank, [order, 1]."""
    ends_low: NDArray[np.bool_]
    """No backward is split, [order, 1]."""
    is_interleaved: list[int]

    @classmethod
    def of(cls, orders: Sequence[Order], others: int) -> _Orders:
        """Return the arrays of several orders.

        Args:
            orders: of equally many ranks.
            others: layers of other kinds than the main one.
        """
        units = [_units_of(order, others) for order in orders]
        least, most, before = (np.stack(values) for values in zip(*units, strict=True))
        return cls(
            least=least,
            most=np.maximum(_ROUNDING, most),
            before=before,
            micro_batches=_per_order([order.micro_batches for order in orders]),
            actions=_per_order(list(map(_actions, orders))),
            ends_low=np.array([[not splits_backward(one.schedule)] for one in orders]),
            is_interleaved=[int(order.virtual_stages > 1) for order in orders],
        )


_known_orders = lru_cache(maxsize=256)(_Orders.of)


def _per_order(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)[:, None]


@lru_cache(maxsize=1 << 14)
def _units_of(order: Order, others: int) -> tuple[Floats, Floats, Floats]:
    """Return the least and the most units of every rank, and c: (K1)."""
    by_stage = traits_of(order).units / order.chunks
    ranks = np.array(stage_ranks(order), dtype=np.intp)
    shape = (order.ranks, order.virtual_stages)
    sorted_units = np.sort(by_stage[np.argsort(ranks, kind="stable")].reshape(shape))
    least = sorted_units[:, 0]
    compulsory = max(0, order.virtual_stages - others)
    before = sorted_units[:, :compulsory].sum(axis=1) - compulsory * least
    return least, sorted_units[:, -1], before


def _actions(order: Order) -> int:
    """Return the forwards and backwards of a rank."""
    return 2 * order.micro_batches * order.virtual_stages * order.chunks


@dataclass(frozen=True, slots=True)
class _Times:
    """Nanoseconds that ranks have for one micro-batch, [option, order, rank]: (K5)."""

    of_pipeline: Floats
    """If the pipeline drains after a rank's last micro-batch."""
    of_tail: Floats
    """If its reductions and optimizer follow."""

    @classmethod
    def of(
        cls, options: Sequence[Prices], orders: _Orders, ranks: int, limit: float
    ) -> _Times:
        """Return the time of every rank below a limit in nanoseconds."""
        timings = np.array([[each.timing(1), each.timing(2)] for each in options])
        waiting, transfer = np.moveaxis(timings[:, orders.is_interleaved], 2, 0)
        fixed = np.array([[each.fixed_tail] for each in options])
        left = (limit - fixed - orders.actions.T * waiting)[..., None]
        hops = np.arange(ranks) * (waiting + transfer)[..., None]
        forward = np.stack([each.first_forward[:ranks] for each in options])
        backward = np.stack([each.first_backward[:ranks] for each in options])
        down, back = forward[:, None] + hops, backward[:, None] + hops
        start = down if starts_late(options[0]) else np.zeros_like(down)
        way = np.where(orders.ends_low, down + back, start)
        speeds = np.stack([each.speeds for each in options])[:, None]
        rate = speeds / orders.micro_batches
        of_pipeline = np.maximum(0.0, (left - way) * rate)
        of_tail = np.maximum(0.0, (left - start) * rate)
        return cls(of_pipeline, of_tail)


def _layers_within(
    main: _Main, held: _Orders, times: Floats, rooms: Floats, work: Floats
) -> Floats:
    """Return the most layers that every rank takes in a time, [option, order, rank].

    It follows the broken line of (K4), piece by piece.

    Args:
        main: the kind of the layers.
        held: units of every rank.
        times: nanoseconds of every rank.
        rooms: bytes for states and saved activations of every rank.
        work: nanoseconds of a layer.
    """
    taken = np.zeros_like(times)
    reached_layers = np.zeros_like(times)
    reached_time = np.zeros_like(times)
    for saved, added in zip(main.saved, main.added, strict=True):
        bytes_of_layer = saved * held.least + main.states
        room = rooms - saved * held.before
        layers = np.maximum(0.0, room / np.maximum(1 / _MANY, bytes_of_layer))
        takes_any = (bytes_of_layer <= 0) & (room >= 0)
        layers = np.where(takes_any, _MANY, layers)
        layers = np.maximum(layers, reached_layers)
        recomputed = (held.before + layers * held.least) * added / held.most
        time = np.maximum(layers * work + recomputed, reached_time)
        share = (times - reached_time) / np.maximum(_ROUNDING, time - reached_time)
        share = np.clip(share, 0.0, 1.0)
        taken = taken + share * (layers - reached_layers)
        reached_layers, reached_time = layers, time
    whole: Floats = np.floor(taken * (1 + 1e-12) + 1e-9)
    return whole
