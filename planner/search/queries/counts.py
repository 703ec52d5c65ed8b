"""How many layouts a table has, and how many of them a search has left open.

A layout is a row of the table with one option: degrees, micro-batch size, schedule,
stages per rank, sequence chunks, and how states are sharded, ranks placed and data
offloaded. Its cut and recomputation are chosen by the search.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.engine.engine import Search
from planner.search.engine.options import Options, Row
from planner.search.engine.table import Table

Counts = NDArray[np.int64]


def layouts_of_rows(options: Options, table: Table) -> Counts:
    """Return the number of layouts of every row."""
    if not len(table):
        return np.zeros(0, dtype=np.int64)
    _, firsts, inverse = np.unique(
        options.keys(table), axis=0, return_index=True, return_inverse=True
    )
    counts = []
    for first in firsts.tolist():
        row = Row.of(table, first)
        counts.append(sum(1 for _ in options.of(row)))
    return np.array(counts, dtype=np.int64)[inverse.reshape(-1)]


@dataclass(frozen=True, slots=True)
class LayoutCounts:
    """Counts of the layouts of one search."""

    search: Search
    of_rows: Counts
    total: int

    @classmethod
    def of(cls, search: Search) -> LayoutCounts:
        """Count the layouts of a search."""
        of_rows = layouts_of_rows(search.options, search.table)
        return cls(search, of_rows, int(of_rows.sum()))

    def open_layouts(self) -> int:
        """Return the layouts that are neither proven nor excluded by a bound."""
        search = self.search
        rows = search.rows[search.next_row :]
        is_open = search.row_bounds[rows] < search.limit
        count = int(self.of_rows[rows[is_open]].sum())
        for node in (*search.queue, *search.unproven):
            if node.nanoseconds >= search.limit:
                continue
            has_option = node.place >= 0
            count += 1 if has_option else int(self.of_rows[node.index])
        return count
