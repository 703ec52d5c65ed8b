"""The best cut with one stage per rank, against all cuts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.cost import Workload, workload
from planner.search.engine.best_cut import MOST_BOUNDS, best_cut
from planner.search.engine.rule import CutBounds, RuleCuts
from tests.search.engine.exact import Layouts, all_cuts, all_maps, step_of
from tests.search.engine.test_engine import tight, whole
from tests.search.engine.test_groups import mixed_works
from tests.strategies import Instance, instances


@settings(max_examples=200)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 8), st.integers(0, 2**30))
def test_no_cut_has_a_shorter_longest_rank(
    layers: int, ranks: int, most: int, seed: int
) -> None:
    """Random bounds of every stage on every rank; some stages fit nowhere."""
    assume(ranks <= layers)
    chooser = np.random.default_rng(seed)
    table = chooser.integers(1, 20, size=(layers + 1, layers + 1, ranks)).astype(float)
    table[chooser.random(table.shape) < 0.2] = np.inf

    def longest(sizes: tuple[int, ...]) -> float:
        ends = np.cumsum(sizes)
        return max(
            float(table[end - size, end, rank])
            for rank, (end, size) in enumerate(zip(ends, sizes, strict=True))
        )

    found = best_cut(layers, ranks, most, lambda starts, ends: table[starts, ends])
    cuts = [sizes for sizes in all_cuts(layers, ranks) if max(sizes) <= most]
    least = min(map(longest, cuts), default=np.inf)
    if np.isinf(least):
        assert found is None
    else:
        assert found is not None
        assert sum(found) == layers
        assert longest(found) == least


def test_equal_layers_are_cut_evenly() -> None:
    """The rank that takes longest leaves the others free: they share evenly."""

    def bound(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        sizes = (ends - starts)[:, None].astype(float)
        return sizes + np.array([0.0, 0.0, 0.0, 100.0])

    assert best_cut(13, 4, 13, bound) == (4, 4, 4, 1)


def test_too_many_stages_are_not_bounded() -> None:
    """The rule's own cut has to do."""

    def bound(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        pytest.fail("bounded")

    layers = int(MOST_BOUNDS**0.5)
    assert best_cut(layers, 8, layers, bound) is None


def compare_with_all_cuts(layouts: Layouts, chooser: random.Random) -> None:
    """Compare the best cut of a random row with every possible cut."""
    rows = [layouts.row(index) for index in range(len(layouts.table))]
    rows = [row for row in rows if row.virtual_stages == 1 < row.pipeline]
    assume(rows)
    row, option = layouts.any(chooser, rows)
    prices = layouts.prices(row, option)
    order = layouts.order(row)
    bounds = CutBounds(prices.stacks, order)
    found = RuleCuts(prices, order).sizes
    cuts = list(all_cuts(len(prices.kind_of), row.pipeline))
    starts = [np.cumsum((0, *sizes))[:-1] for sizes in cuts]
    of_ranks = [
        bounds.of_stages(start, start + np.array(sizes)).diagonal()
        for start, sizes in zip(starts, cuts, strict=True)
    ]
    longest = [float(each.max()) for each in of_ranks]
    if any(map(bounds.recomputes, found)) and min(longest) < np.inf:
        for sizes in found:
            assert longest[cuts.index(sizes)] <= min(longest) * (1 + 1e-5)
    costs = layouts.pricing.costs(row, option)
    for sizes, least in zip(cuts, longest, strict=True):
        assert bounds.bounds([sizes])[0] >= least * (1 - 1e-6)
        if np.isinf(least):
            steps = [step_of(costs, one) for one in all_maps(prices, sizes)]
            assert steps == [None] * len(steps)


@settings(max_examples=60, deadline=None)
@given(instances(most_layers=4), st.integers(0, 2**30))
def test_the_best_cut_of_a_row_is_the_best_of_all(
    instance: Instance, seed: int
) -> None:
    """On tight devices, shared parameters among the layers."""
    if workload(instance.profile, instance.cluster, instance.job).groups:
        return
    work = tight(instance, seed)
    layouts = Layouts(work, whole(work))
    compare_with_all_cuts(layouts, random.Random(seed))


@settings(max_examples=30, deadline=None)
@given(mixed_works(), st.integers(0, 2**30))
def test_the_best_cut_of_unlike_ranks_is_the_best_of_all(
    work: Workload, seed: int
) -> None:
    """Devices and replicas of several kinds."""
    compare_with_all_cuts(Layouts(work, whole(work)), random.Random(seed))
