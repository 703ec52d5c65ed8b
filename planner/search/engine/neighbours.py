"""Layouts around the best one, with moves of layers from any cut.

The search moves layers only from cuts that are nearly as fast as the best plan
(`solve.PROMISING`). Which cuts these are depends on the order in which plans are found,
so that the layouts around the best one are solved from any cut at the end: its row with
other options, rows that differ in one column, and those with two other degrees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.search.engine.options import Row
from planner.search.engine.result import Candidate
from planner.search.engine.synthesize import is_synthesized
from planner.search.engine.table import COLUMN_NAMES

if TYPE_CHECKING:
    from planner.search.engine.engine import Node, Search

MOST_SOLVED = 32
"""Rows that are solved, those of least bound."""
MOST_SLOWER = 1.06
"""Rows whose bound is above this times the best step are not solved."""
SWAPPED = ("tensor", "pipeline", "context")
"""Degrees of which one may be larger and another one smaller."""
DEPENDENT = ("data", "micro_batches", "split", "schedule")
"""Columns that do not count as a difference."""


def solve_neighbours(search: Search) -> None:
    """Solve layouts around the incumbent, then try exchanges of its recomputation."""
    best = search.best
    assert best is not None
    cut = tuple(map(len, best.stage_map))
    if not is_synthesized(best.schedule.name):
        for _, option in search.pricing.undominated(best.row):
            if option != best.option:
                search.solve_from_any_cut(best.row, option, cut)
    best = search.best
    assert best is not None
    cut = tuple(map(len, best.stage_map))
    for row in _promising_rows(search, best):
        search.solve_from_any_cut(row, best.option, cut)
    search.exchange_recomputation()


def _promising_rows(search: Search, best: Candidate) -> list[Row]:
    """Return rows around the best one that may be faster, those of least bound."""
    found: list[Node] = []
    for index in _rows_around(search, best.row):
        node = search.bound_row(index)
        is_near = node.nanoseconds < MOST_SLOWER * search.limit
        if node.cuts and is_near and node.bound_all_cuts < search.limit:
            found.append(node)
    rows = [Row.of(search.table, node.index) for node in sorted(found)]
    have_option = [row for row in rows if best.option in search.options.of(row)]
    return have_option[:MOST_SOLVED]


def _rows_around(search: Search, row: Row) -> list[int]:
    """Return the row and those that differ from it in one column or in the schedule.

    A degree or size differs by a factor of 2 or 3, or stages per rank by one. With the
    same data-parallel degree, two of the degrees `SWAPPED` may differ. The micro-batch
    size does not count if the number of micro-batches is the same, and sequence
    parallelism does not count if the tensor degree differs. What is offloaded and which
    replicas have more micro-batches stay the same; synthesized orders are left out.
    """
    table = search.table
    differs = np.zeros(len(table), dtype=np.intp)
    degrees_differ = np.zeros(len(table), dtype=np.intp)
    is_near = np.ones(len(table), dtype=np.bool_)
    for name in COLUMN_NAMES:
        if name in DEPENDENT or name == "arrangement":
            continue
        column = getattr(table, name)
        value = int(getattr(row, name))
        is_other = column != value
        if name == "micro_batch_size":
            is_other &= table.micro_batches != row.micro_batches
        if name == "sequence_parallel":
            is_other &= table.tensor == row.tensor
        differs += is_other
        degrees_differ += (column != value) & (name in SWAPPED)
        is_near &= np.isin(column, _values_around(name, value))
    names = search.space.schedules
    synthesized = np.array([is_synthesized(name) for name in names], dtype=np.bool_)
    is_near &= ~synthesized[table.schedule]
    is_near &= _same_arrangement(search, row)
    is_swap = (degrees_differ == 2) & (differs == 2) & (table.data == row.data)
    return search.in_order(is_near & ((differs <= 1) | is_swap))


def _values_around(name: str, value: int) -> tuple[int, ...]:
    if name == "virtual_stages":
        return (value - 1, value, value + 1, value // 2, 2 * value)
    if name == "expert_tensor":
        return (0, 1, value // 2, value, 2 * value)
    if name == "sequence_parallel":
        return (0, 1)
    if name in ("offload", "larger_shares"):
        return (value,)
    return (value // 3, value // 2, value, 2 * value, 3 * value)


def _same_arrangement(search: Search, row: Row) -> NDArray[np.bool_]:
    """Return a mask of rows whose ranks fill the node groups in the order of a row's."""
    table = search.table
    orders = [each and each.rank_order for each in table.arrangements]
    order = row.arrangement and row.arrangement.rank_order
    is_same = np.array([each == order for each in orders], dtype=np.bool_)
    same: NDArray[np.bool_] = is_same[table.arrangement]
    return same
