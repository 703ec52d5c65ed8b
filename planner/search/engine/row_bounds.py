"""Cheap bounds of all rows at once: the time of their layers, and their least memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from planner.cost.communication import Group
from planner.cost.mixed import MIXED_SCHEDULES
from planner.cost.nearest import nearest_ticks
from planner.cost.placement import (
    widest_expert_group,
    widest_expert_shard_group,
    widest_shard_group,
)
from planner.search.engine.arrangement import RANK_ORDERS
from planner.search.engine.bound import IMPOSSIBLE
from planner.search.engine.options import Option, Options, Row
from planner.search.engine.prices import Prices, Pricing
from planner.search.engine.space import Space, cuts_sequences
from planner.search.engine.split_backward import splits_backward
from planner.search.engine.table import Table

_ROUNDING = 1 - 1e-9
_DEGREE_COUNT = Row._fields.index("micro_batch_size")
"""A row begins with this many degrees."""


class RowBounds:
    """Bounds of all rows by the work of their layers.

    A row is impossible if its states and saved activations do not fit on its ranks.
    """

    def __init__(self, space: Space, options: Options, pricing: Pricing) -> None:
        """Start without any price."""
        self.space = space
        self.options = options
        self.pricing = pricing
        self._prices: dict[tuple[object, ...], Prices] = {}
        self._known_groups: dict[tuple[object, ...], tuple[Group, ...]] = {}
        self._too_large: dict[tuple[int, ...], int] = {}
        """The smallest micro-batch size with a layer that does not fit: by `_without_size`."""

    def of(self, table: Table) -> NDArray[np.int64]:
        """Return a bound in nanoseconds for every row."""
        if len(table.arrangements) > 1:
            return self._of_arrangements(table)
        is_uneven = table.larger_shares > 0
        columns = [table.split, table.sequence_chunks, table.offload, is_uneven]
        keys = np.stack([*columns, table.data, table.pipeline], axis=1)
        if not len(table):
            return np.zeros(0, dtype=np.int64)
        is_dense = table.expert == 1
        keys[is_dense, len(columns) :] = 0
        _, firsts, inverse = np.unique(
            keys, axis=0, return_index=True, return_inverse=True
        )
        work = np.zeros(len(firsts))
        saved = np.zeros(len(firsts))
        free = np.zeros(len(firsts))
        states = np.zeros(len(firsts))
        for place in np.argsort(table.micro_batch_size[firsts], kind="stable").tolist():
            row = Row.of(table, int(firsts[place]))
            known = self._too_large.get(_without_size(row), row.micro_batch_size)
            if row.micro_batch_size > known:
                work[place] = IMPOSSIBLE
                continue
            if row.larger_shares:
                work[place] = self._fewest_nanoseconds(row)
                continue
            options = list(self._priced(row))
            work[place] = min(each.total_work for each in options)
            prices = options[0]
            saved[place] = float(prices.counts @ prices.least_activations)
            states[place] = float(prices.counts @ prices.states)
            free[place] = prices.free_bytes
            if not any(map(_fits_a_layer, options)):
                self._too_large[_without_size(row)] = row.micro_batch_size
        inverse = inverse.reshape(-1)
        steps = work[inverse] * self._growth(table) * _ROUNDING
        lean = states[inverse] / table.most_shards
        lean = lean + saved[inverse] / table.sequence_chunks
        is_impossible = lean > table.pipeline * free[inverse]
        is_impossible |= work[inverse] == IMPOSSIBLE
        steps[is_impossible] = IMPOSSIBLE
        return np.minimum(steps, float(IMPOSSIBLE)).astype(np.int64)

    def _of_arrangements(self, table: Table) -> NDArray[np.int64]:
        """Return the bounds of rows on several node groups."""
        names = self.space.schedules
        simple = [names.index(name) for name in MIXED_SCHEDULES if name in names]
        is_simple = np.isin(table.schedule, simple)
        found = table.arrangements[1:]
        least = np.array([0, *(one.least for one in found if one)])
        least_of_any = np.array([0, *(one.least_of_any for one in found if one)])
        of_any = least_of_any[table.arrangement]
        return np.where(is_simple, np.maximum(least[table.arrangement], of_any), of_any)

    def _fewest_nanoseconds(self, row: Row) -> float:
        """Return the least work of one micro-batch on any devices of the cluster."""
        split = self.space.splits[row.split]
        forward, backward = nearest_ticks(self.pricing.work, split.size)
        return float(sum(forward) + sum(backward))

    def _growth(self, table: Table) -> NDArray[np.float64]:
        """Return the least step / work of one micro-batch."""
        names = self.space.schedules
        simple = [names.index(name) for name in ("1f1b", "gpipe") if name in names]
        count = table.micro_batches.astype(np.float64)
        plain = np.isin(table.schedule, simple) & (table.sequence_chunks == 1)
        plain &= (count > table.pipeline) | (table.pipeline == 1)
        filled = 1 + (count - 1) / table.pipeline
        busy = count / table.pipeline
        growth: NDArray[np.float64] = np.where(plain, filled, busy)
        whole = [
            index
            for index, name in enumerate(names)
            if not splits_backward(name) and not cuts_sequences(name)
        ]
        is_whole = np.isin(table.schedule, whole)
        return np.where(is_whole, np.maximum(1.0, growth), growth)

    def options_below(self, row: Row, table: Table, limit: int) -> list[Option]:
        """Return the options with which the work of all layers is below a limit.

        Args:
            row: one of the rows.
            table: the rows; their prices and options are equal.
            limit: nanoseconds.
        """
        options = self.options.of(row)
        if row.arrangement is not None:
            return list(options)
        growth = float(self._growth(table).min()) * _ROUNDING
        alike = [self._of_equal_work(row, option) for option in options]
        steps = {
            each: self._of_option(row, each).total_work * growth
            for each in dict.fromkeys(alike)
        }
        is_below = [steps[each] < limit for each in alike]
        return list(compress(options, is_below))

    def _priced(self, row: Row) -> Iterator[Prices]:
        """Yield the prices of a row's split for every distinct group of experts."""
        orders = RANK_ORDERS if row.expert > 1 else RANK_ORDERS[:1]
        for order in orders:
            yield self._of_option(row, Option(0, None, order))

    def _of_equal_work(self, row: Row, option: Option) -> Option:
        """Return the simplest option whose work bounds that of an option.

        Options differ in work by what is exchanged in every micro-batch. ZeRO 3
        exchanges what ZeRO 2 does and more, unless it gathers once per step.
        """
        gathers_once = self.pricing.work.framework.retains_gathered(row.pipeline)
        if option.zero_stage < 2 or (option.zero_stage == 3 and gathers_once):
            return Option(0, None, option.rank_order)
        return Option(2, option.shard_degree, option.rank_order)

    def _of_option(self, row: Row, option: Option) -> Prices:
        """Return prices with the work of a row with an option of ZeRO 0 or 2."""
        size = (row.split, row.sequence_chunks, row.offload)
        key = (*size, self._groups(row, option))
        if key not in self._prices:
            self._prices[key] = self.pricing.prices_with_recompute(row, option)
        return self._prices[key]

    def _groups(self, row: Row, option: Option) -> tuple[Group, ...]:
        """Return the communicators whose width decides what a micro-batch costs."""
        degrees = (*row[:_DEGREE_COUNT], option)
        if degrees not in self._known_groups:
            layout = self.options.layout(row, option)
            domain = self.pricing.work.domain_devices
            groups: list[Group] = []
            if row.expert > 1:
                groups.append(widest_expert_group(layout, domain))
            if option.zero_stage:
                groups.append(widest_shard_group(layout, domain))
                groups.append(widest_expert_shard_group(layout, domain))
            self._known_groups[degrees] = tuple(groups)
        return self._known_groups[degrees]


def _without_size(row: Row) -> tuple[int, ...]:
    """Return the columns of a row that, with a micro-batch size, decide its memory."""
    degrees = (row.tensor, row.context, row.expert, row.expert_tensor)
    others = (row.sequence_parallel, row.sequence_chunks, row.offload)
    return (*degrees, *others)


def _fits_a_layer(prices: Prices) -> bool:
    """Return whether a device has room for a layer of every kind at a time.

    What a layer needs grows with the size of its micro-batch.
    """
    needed = prices.least_activations / prices.costs.layout.sequence_chunks
    return bool((needed + prices.least_temporary <= prices.free_bytes).all())
