"""Cuts of a model's layers into stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise


def all_cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield the layers per stage of every cut with at least one layer in each stage."""
    for ends in combinations(range(1, layers), stages - 1):
        edges = (0, *ends, layers)
        yield tuple(end - start for start, end in pairwise(edges))
