"""Rows that are dropped before the loop, since none of their options beats the best plan.

Rows with the same prices and options differ in their order alone, and are looked at
together. The tests become closer and more expensive:

1. the least prices of all options together
2. per option, the work of all layers
3. per rank order and ZeRO stage, the fewest ranks that states have to be shared among
4. per option that is left, its own prices

All but the second are those of `planner.search.engine.capacity`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.search.engine.backwards import forbids_recompute
from planner.search.engine.bound import Order
from planner.search.engine.capacity import may_beat
from planner.search.engine.options import PRICE_COLUMNS, Option, Row, ShardDegrees

if TYPE_CHECKING:
    from planner.search.engine.engine import Search

Mask = NDArray[np.bool_]


def exclude_rows(search: Search) -> None:
    """Take rows out of a search that cannot beat its limit."""
    below = search.rows[search.row_bounds[search.rows] < search.limit]
    for indices in _alike(search, below):
        row = Row.of(search.table, int(indices[0]))
        group = AlikeRows(search, row, search.orders(indices))
        may = group.may_beat()
        # Exact prices of unequal shares are expensive: they wait for the loop.
        if may.any() and not row.larger_shares:
            options = search.bounds.options_below(
                row, search.table.take(indices[may]), search.limit
            )
            left = group.only(may)
            options = left.of_possible_shardings(options)
            may[may] = left.options_may_beat(options).any(axis=0)
        search.is_taken[indices[~may]] = True


def _alike(search: Search, indices: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Return rows in groups that have the same prices and options."""
    if not len(indices):
        return []
    table = search.table.take(indices)
    names = search.space.schedules
    is_split = np.array([forbids_recompute(name) for name in names], dtype=bool)
    columns = [getattr(table, name) for name in PRICE_COLUMNS]
    columns += [is_split[table.schedule], *search.options.keys(table).T]
    keys = np.stack(columns, axis=1)
    _, groups = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(groups.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(groups.reshape(-1)))
    return np.split(indices[order], ends[:-1])


@dataclass(frozen=True)
class AlikeRows:
    """Rows with the same prices and options, and whether they may beat the limit."""

    search: Search
    row: Row
    """One of them."""
    orders: Sequence[Order]
    """Of each."""

    def only(self, mask: Mask) -> AlikeRows:
        """Return some of the rows."""
        orders = list(compress(self.orders, mask))
        return AlikeRows(self.search, self.row, orders)

    @cached_property
    def is_split(self) -> bool:
        """Whether backwards are split, so that no layer recomputes."""
        return forbids_recompute(self.orders[0].schedule)

    @property
    def limit(self) -> float:
        """Nanoseconds that a plan has to beat."""
        return float(self.search.limit)

    def may_beat(self) -> Mask:
        """Return which rows may beat the limit at the least prices of all options."""
        least = self.search.pricing.least(self.row, is_split=self.is_split)
        if least is None:
            return np.zeros(len(self.orders), dtype=np.bool_)
        found: Mask = may_beat([least], self.orders, self.limit)[0]
        return found

    def options_may_beat(self, options: Sequence[Option]) -> Mask:
        """Return whether rows with an option may beat the limit, [option, row]."""
        if not options:
            return np.zeros((0, len(self.orders)), dtype=np.bool_)
        pricing = self.search.pricing
        prices = [
            pricing.prices(self.row, option, is_split=self.is_split)
            for option in options
        ]
        return may_beat(prices, self.orders, self.limit)

    def of_possible_shardings(self, options: Iterable[Option]) -> list[Option]:
        """Return the options that share states among enough ranks to beat the limit.

        The least shard degree of every rank order and ZeRO stage is found by bisection.
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
        for alike, first in zip(possible, least.tolist(), strict=True):
            found += alike.options[first:]
        return found

    def _may_beat_up_to(
        self, alike: Iterable[ShardDegrees], places: Iterable[int]
    ) -> Mask:
        """Return whether any row may beat the limit with options up to a place, for each."""
        pricing = self.search.pricing
        prices = [
            pricing.least_of(self.row, extremes, is_split=self.is_split)
            for extremes in map(ShardDegrees.extremes, alike, places)
        ]
        found: Mask = np.any(may_beat(prices, self.orders, self.limit), axis=1)
        return found
