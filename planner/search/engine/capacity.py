"""Which rows may beat a step at all: capacity of every pipeline rank, for all rows at once.

With the least prices of a row's options, w the work of a layer of the main kind, a(j)
its saved bytes in the j-th mode of the lower hull of bytes and time, d(j) the time that
this mode adds, s its states, and u the units that a rank holds of its stages at one
moment of its peak:

    (K1)  every stage has a layer, so that at most o stages of a rank, o the number of
          layers of other kinds, have none of the main kind. A rank with n of them holds
          U(n) >= c + n min(u), c so that the V - o smallest u have a layer each
    (K2)  n layers fit in mode j if a(j) U(n) + n s <= room; that gives n(j)
    (K3)  with more than n(j - 1) layers, the bytes of the excess are freed at a cost of
          d(j) / (a(j - 1) - a(j)) / max(u) at least, since a layer's recomputation
          frees max(u) times its bytes at most
    (K4)  so the time of n layers is at least the broken line through (n(j), t(j)),
          t(j) = n(j) w + U(n(j)) (d(1) + ... + d(j)) / max(u)
    (K5)  a rank has (T - D - U - tail) / M for a micro-batch, as in `bound` (W1); T is
          impossible if all ranks together take fewer layers than the main kind has
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
    traits_of,
    ways,
)
from planner.search.engine.hull import lower_hull
from planner.search.engine.prices import Floats, Prices

_MANY = 1e15
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class _Main:
    """The kind with most of the work."""

    work: float
    """Nanoseconds of a layer."""
    states: float
    count: float
    others: int
    """Layers of other kinds."""
    room: Floats
    """Bytes for states and saved activations, of every rank or of all."""
    saved: tuple[float, ...]
    """Bytes per mode of the hull, most first."""
    added: tuple[float, ...]
    """Nanoseconds of every mode in addition to the first."""

    @classmethod
    def of(cls, prices: Prices) -> _Main:
        """Return the main kind of a layout."""
        kind = int((prices.counts * prices.work).argmax())
        points = {
            (float(one.activation_bytes), float(one.backward_ticks))
            for one in prices.modes[kind]
        }
        hull = lower_hull(points)
        first = hull[0][1]
        count = float(prices.counts[kind])
        return cls(
            work=float(prices.work[kind]),
            states=float(prices.states[kind]),
            count=count,
            others=int(prices.counts.sum() - count),
            room=prices.free_of_ranks - float(prices.least_temporary[kind]),
            saved=tuple(saved for saved, _ in hull),
            added=tuple(spent - first for _, spent in hull),
        )


@dataclass(frozen=True, slots=True)
class _Units:
    """Whole micro-batches that every rank holds of its stages."""

    least: Floats
    most: Floats
    before: Floats
    """c of (K1)."""


def may_beat(prices: Prices, orders: Sequence[Order], limit: float) -> list[bool]:
    """Return for every order whether a layout may take less than a limit.

    Args:
        prices: the least of all options; those of rows that differ in order alone.
        orders: of equally many ranks.
        limit: nanoseconds.
    """
    found = [True] * len(orders)
    for replicas in prices.replicas:
        may = _may_beat(replicas, orders, limit)
        found = [one and other for one, other in zip(found, may, strict=True)]
    return found


def _may_beat(prices: Prices, orders: Sequence[Order], limit: float) -> list[bool]:
    """Return for every order whether identical replicas may take less than a limit."""
    count = prices.micro_batches
    if count is not None:
        orders = [order._replace(micro_batches=count) for order in orders]
    main = _Main.of(prices)
    if main.work <= 0:
        return [True] * len(orders)
    if (main.room < 0).all():
        return [False] * len(orders)
    units = [_units_of(order, main.others) for order in orders]
    times = np.stack([_time_of_rank(prices, order, limit) for order in orders])
    kept = np.stack([least_kept(prices, order) for order in orders])
    layers = _layers_within(main, units, times, main.room - kept)
    found: list[bool] = (layers.sum(axis=1) >= main.count).tolist()
    return found


def _time_of_rank(prices: Prices, order: Order, limit: float) -> Floats:
    """Return nanoseconds that every rank has for one micro-batch: (K5)."""
    timing = prices.timing(order.virtual_stages)
    actions = 2 * order.micro_batches * order.virtual_stages * order.chunks
    left = limit - prices.fixed_tail - actions * timing.waiting
    time = (left - ways(prices, order)) / order.micro_batches
    return np.maximum(0.0, prices.speeds * time)


def _layers_within(
    main: _Main, units: Sequence[_Units], times: Floats, rooms: Floats
) -> Floats:
    """Return the most layers that every rank takes in a time, [order, rank].

    Args:
        main: the kind of the layers.
        units: of every order.
        times: nanoseconds of every rank.
        rooms: bytes for states and saved activations of every rank.
    """
    least = np.stack([each.least for each in units])
    most = np.maximum(_ROUNDING, np.stack([each.most for each in units]))
    before = np.stack([each.before for each in units])
    taken = np.zeros_like(times)
    reached_layers = np.zeros_like(times)
    reached_time = np.zeros_like(times)
    for saved, added in zip(main.saved, main.added, strict=True):
        bytes_of_layer = saved * least + main.states
        room = rooms - saved * before
        layers = np.maximum(0.0, room / np.maximum(1 / _MANY, bytes_of_layer))
        takes_any = (bytes_of_layer <= 0) & (room >= 0)
        layers = np.where(takes_any, _MANY, layers)
        layers = np.maximum(layers, reached_layers)
        held = before + layers * least
        time = layers * main.work + held * added / most
        time = np.maximum(time, reached_time)
        share = (times - reached_time) / np.maximum(_ROUNDING, time - reached_time)
        share = np.clip(share, 0.0, 1.0)
        taken = taken + share * (layers - reached_layers)
        reached_layers, reached_time = layers, time
    whole: Floats = np.floor(taken * (1 + 1e-12) + 1e-9)
    return whole


@lru_cache(maxsize=1 << 14)
def _units_of(order: Order, others: int) -> _Units:
    """Return the units of every rank: (K1)."""
    by_stage = traits_of(order).units / order.chunks
    ranks = np.array(stage_ranks(order), dtype=np.intp)
    shape = (order.ranks, order.virtual_stages)
    sorted_units = np.sort(by_stage[np.argsort(ranks, kind="stable")].reshape(shape))
    least = sorted_units[:, 0]
    compulsory = max(0, order.virtual_stages - others)
    sums: NDArray[np.float64] = sorted_units[:, :compulsory].sum(axis=1)
    return _Units(
        least=least, most=sorted_units[:, -1], before=sums - compulsory * least
    )
