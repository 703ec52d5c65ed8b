"""The cut whose slowest rank is fastest, where every pipeline rank has one stage.

The bound of `planner.search.engine.rule` on the rank that takes longest depends on the
first and last layer of its stage alone. So the best of all cuts follows from the best
cuts of the layers before, rank by rank:

    f(r, j) = min over i < j of max(f(r - 1, i), bound of rank r with layers i .. j - 1)

Of equally good cuts the most even one is kept: that with the least sum of squares of
the numbers of layers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from planner.search.engine.prices import Floats

Layers = NDArray[np.intp]
MOST_BOUNDS = 1 << 18
"""Bounds of stages times ranks; a model with more has no cut of this kind."""
_EQUAL = 1 + 1e-6
"""Bounds that differ less are as good."""


def best_cut(
    layers: int, ranks: int, most: int, bound: Callable[[Layers, Layers], Floats]
) -> tuple[int, ...] | None:
    """Return the layers of every rank.

    Args:
        layers: of the model.
        ranks: of the pipeline.
        most: layers that a stage may have.
        bound: of every rank with layers [start, end), [stage, rank]; infinity: they do not fit.

    Returns:
        None if no cut fits, or if there are too many stages to bound.
    """
    starts, ends = np.triu_indices(layers + 1, k=1)
    is_short = ends - starts <= min(most, layers - ranks + 1)
    starts, ends = starts[is_short], ends[is_short]
    if len(starts) * ranks > MOST_BOUNDS:
        return None
    of_ranks = np.full((ranks, layers + 1, layers + 1), np.inf)
    of_ranks[:, starts, ends] = bound(starts, ends).T
    chosen = np.zeros((ranks, layers + 1), dtype=np.intp)
    longest = of_ranks[0, 0]
    squares = np.square(longest)
    for rank in range(1, ranks):
        both = np.maximum(longest[:, None], of_ranks[rank])
        is_best = both <= both.min(axis=0) * _EQUAL
        sums = squares[:, None] + np.square(of_ranks[rank])
        chosen[rank] = np.where(is_best, sums, np.inf).argmin(axis=0)
        places = chosen[rank], np.arange(layers + 1)
        longest, squares = both[places], sums[places]
    if not np.isfinite(longest[layers]):
        return None
    cut = []
    end = layers
    for rank in reversed(range(ranks)):
        start = int(chosen[rank, end])
        cut.append(end - start)
        end = start
    return tuple(reversed(cut))
