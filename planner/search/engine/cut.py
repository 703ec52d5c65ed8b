"""Cuts of a model's layers into stages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations, pairwise


def all_cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield the layers per stage of every cut with at least one layer in each stage."""
    for ends in combinations(range(1, layers), stages - 1):
        edges = (0, *ends, layers)
        yield tuple(end - start for start, end in pairwise(edges))


@lru_cache(maxsize=256)
def all_cuts_of(layers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return `all_cuts`, where they are few."""
    return tuple(all_cuts(layers, stages))
