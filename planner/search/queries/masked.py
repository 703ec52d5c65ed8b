"""The rows of an ended search, searched again: some of them, or below another ceiling."""

from __future__ import annotations

from copy import copy

import numpy as np
from numpy.typing import NDArray

from planner.search.engine.bound import IMPOSSIBLE
from planner.search.engine.engine import Search


def masked(
    search: Search, mask: NDArray[np.bool_] | None = None, ceiling: int = IMPOSSIBLE
) -> Search:
    """Return a new search over rows of a table, with the prices that are known.

    Args:
        search: has the table; its state stays as it is.
        mask: which rows of the table; None: all.
        ceiling: nanoseconds; only faster plans count.
    """
    found = copy(search)
    found.ceiling = ceiling
    if mask is not None:
        found.rows = search.rows[mask[search.rows]]
    found.next_row = 0
    found.is_closed = np.zeros(len(search.table), dtype=np.bool_)
    found.queue = []
    found.unproven = []
    found.best = None
    found.solved_around = None
    found.least_excluded = IMPOSSIBLE
    found.counted_work = 0
    found.priced_before = search.pricing.priced
    found.bounded = 0
    found.solved = 0
    return found
