"""Prunes rows before the search loop if none of their options can beat the incumbent.

Rows are tested together if they have the same prices and options, so that only their
orders of actions differ. There are four tests, each closer and more expensive than the
one before:

1. all options at once, at the least price of any of them
2. each option, by the work of all layers
3. each rank order and ZeRO stage: a bisection for the least shard degree that may do
4. each remaining option, at its own prices

The second is `RowBounds.options_below`; the others are `capacity.may_beat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.search.engine.bound import Order
from planner.search.engine.capacity import may_beat
from planner.search.engine.options import PRICE_COLUMNS, Option, Row, ShardDegrees
from planner.search.engine.prices import Prices
from planner.search.engine.split_backward import forbids_recompute
from planner.search.engine.stop import TEST_WORK

if TYPE_CHECKING:
    from planner.search.engine.engine import Search

Mask = NDArray[np.bool_]


def prune_rows(search: Search, is_over: Callable[[], bool] = lambda: False) -> None:
    """Prune the rows of a search that cannot beat its limit.

    Args:
        search: that has the rows.
        is_over: whether to leave the other rows as they are.
    """
    below = search.rows[search.row_bounds[search.rows] < search.limit]
    for indices in _equivalent_rows(search, below):
        if is_over():
            return
        row = Row.of(search.table, int(indices[0]))
        group = EquivalentRows(search, row, search.orders(indices))
        may = group.may_beat()
        # Exact prices of unequal shares are expensive: they wait for the loop.
        if may.any() and not row.larger_shares:
            options = search.work_bounds.options_below(
                row, search.table.take(indices[may]), search.limit
            )
            left = group.only(may)
            options = left.with_enough_shards(options)
            may[may] = left.options_may_beat(options).any(axis=0)
        search.is_closed[indices[~may]] = True


def _equivalent_rows(
    search: Search, indices: NDArray[np.intp]
) -> list[NDArray[np.intp]]:
    """Return groups of rows; those of a group have the same prices and options."""
    if not len(indices):
        return []
    table = search.table.take(indices)
    names = search.space.schedules
    forbids = np.array([forbids_recompute(name) for name in names], dtype=bool)
    columns = [getattr(table, name) for name in PRICE_COLUMNS]
    columns += [forbids[table.schedule], *search.options.keys(table).T]
    keys = np.stack(columns, axis=1)
    _, groups = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(groups.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(groups.reshape(-1)))
    return np.split(indices[order], ends[:-1])


@dataclass(frozen=True)
class EquivalentRows:
    """Rows that have the same prices and options; only their orders differ."""

    search: Search
    row: Row
    """One of them."""
    orders: Sequence[Order]
    """Schedule and numbers of every row."""

    def only(self, mask: Mask) -> EquivalentRows:
        """Return the rows of a mask."""
        orders = list(compress(self.orders, mask))
        return EquivalentRows(self.search, self.row, orders)

    def may_beat(self) -> Mask:
        """Return a mask of the rows that may beat the limit at the least prices of all options."""
        least = self.search.pricing.least(self.row)
        if least is None:
            return np.zeros(len(self.orders), dtype=np.bool_)
        found: Mask = self._test([least])[0]
        return found

    def options_may_beat(self, options: Sequence[Option]) -> Mask:
        """Return a mask of the options and rows that may beat the limit, [option, row]."""
        if not options:
            return np.zeros((0, len(self.orders)), dtype=np.bool_)
        pricing = self.search.pricing
        prices = [pricing.prices(self.row, option) for option in options]
        return self._test(prices)

    def _test(self, prices: Sequence[Prices]) -> Mask:
        """Return whether a row may beat the limit at given prices, [prices, row]."""
        self.search.counted_work += TEST_WORK
        return may_beat(prices, self.orders, float(self.search.limit))

    def with_enough_shards(self, options: Iterable[Option]) -> list[Option]:
        """Return the options whose shard degree is large enough to beat the limit.

        A bisection finds the least such degree for every rank order and ZeRO stage.
        """
        every = list(self.search.options.by_zero_stage(self.row, options))
        if not every:
            return []
        largest = [len(each.options) - 1 for each in every]
        possible = list(compress(every, self._may_beat_up_to(every, largest)))
        least = np.zeros(len(possible), dtype=np.intp)
        most = np.array([len(each.options) - 1 for each in possible], dtype=np.intp)
        while (unknown := np.flatnonzero(least < most)).size:
            middle = (least + most)[unknown] // 2
            may = self._may_beat_up_to([possible[place] for place in unknown], middle)
            most[unknown[may]] = middle[may]
            least[unknown[~may]] = middle[~may] + 1
        found: list[Option] = []
        for degrees, first in zip(possible, least.tolist(), strict=True):
            found += degrees.options[first:]
        return found

    def _may_beat_up_to(
        self, degrees: Iterable[ShardDegrees], places: Iterable[int]
    ) -> Mask:
        """Return for each list of shard degrees whether a row may beat the limit with it.

        Args:
            degrees: lists of options, smallest shard degree first.
            places: index of the largest degree that may be used, for each list.
        """
        pricing = self.search.pricing
        prices = [
            pricing.least_of(self.row, extremes)
            for extremes in map(ShardDegrees.extremes, degrees, places)
        ]
        found: Mask = np.any(self._test(prices), axis=1)
        return found
