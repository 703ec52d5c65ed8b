"""Partitions are what their methods promise."""

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planner.errors import LayoutError, UnknownNameError
from planner.partition import METHODS, Partition, partition

CLASSIC = (10, 40, 30, 10, 20, 50, 10)

whole_costs = st.lists(st.integers(0, 30), min_size=1, max_size=9)
real_costs = st.lists(st.floats(0, 1e9, allow_subnormal=False), min_size=1, max_size=9)
every_method = pytest.mark.parametrize("method", sorted(METHODS))


@st.composite
def problems(
    draw: st.DrawFn, costs: st.SearchStrategy[Any] = whole_costs
) -> tuple[list[Any], int]:
    """Costs, and a number of parts that they can make."""
    drawn = draw(costs)
    return drawn, draw(st.integers(1, len(drawn)))


def all_partitions(costs: list[int], parts: int) -> Iterator[list[int]]:
    """Part costs of every way to cut."""
    for cuts in combinations(range(1, len(costs)), parts - 1):
        edges = [0, *cuts, len(costs)]
        yield [sum(costs[start:end]) for start, end in pairwise(edges)]


@every_method
@given(problem=st.one_of(problems(), problems(real_costs)))
@example(problem=([0, 0, 0, 5], 3))
@example(problem=([1, 100, 1], 3))
@example(problem=([1, 1, 50, 5], 4))
@example(problem=([0, 0, 0], 2))
def test_parts_are_contiguous_and_whole(
    problem: tuple[list[float], int], method: str
) -> None:
    """Every layer stands in exactly one part, in order; no part is empty; costs are those of the layers."""
    costs, parts = problem
    made = partition(costs, parts, method)
    assert len(made.sizes) == parts
    assert min(made.sizes) >= 1
    assert [layer for part in made.parts for layer in part] == list(range(len(costs)))
    assert made.costs == pytest.approx(
        [sum(costs[layer] for layer in part) for part in made.parts]
    )
    assert made.bottleneck == max(made.costs)


@given(problems())
def test_optimal_is_the_best_of_all(problem: tuple[list[int], int]) -> None:
    """Brute force finds no smaller largest part, and no more even parts among the best."""
    costs, parts = problem
    ways = list(all_partitions(costs, parts))
    made = partition(costs, parts, "optimal")
    least = min(max(way) for way in ways)
    assert made.bottleneck == least
    assert sum(cost * cost for cost in made.costs) == min(
        sum(c * c for c in way) for way in ways if max(way) == least
    )


@every_method
@given(problem=problems(real_costs))
def test_optimal_is_never_worse(problem: tuple[list[float], int], method: str) -> None:
    """No method beats the optimum, whatever the costs."""
    costs, parts = problem
    best, other = partition(costs, parts, "optimal"), partition(costs, parts, method)
    assert best.bottleneck <= other.bottleneck


@given(st.one_of(problems(), problems(real_costs)))
def test_block_partition_keeps_its_theorem(problem: tuple[list[float], int]) -> None:
    """The largest and the smallest part differ by no more than the largest layer."""
    costs, parts = problem
    made = partition(costs, parts, "block")
    assert max(made.costs) <= (min(made.costs) + max(costs)) * (1 + 1e-12)


@given(problems())
def test_histogram_follows_the_shares(problem: tuple[list[int], int]) -> None:
    """Where the published rule leaves no part empty, the parts are those of the rule."""
    costs, parts = problem
    total = sum(costs)
    if not total:
        return
    rule = [
        min(parts * sum(costs[: layer + 1]) // total, parts - 1)
        for layer in range(len(costs))
    ]
    if set(rule) == set(range(parts)):
        assert partition(costs, parts, "histogram").sizes == tuple(
            map(rule.count, range(parts))
        )


@pytest.mark.parametrize(
    ("method", "sizes", "bottleneck"),
    [
        ("histogram", (2, 3, 2), 60),
        ("block", (2, 2, 3), 80),
        ("optimal", (2, 3, 2), 60),
    ],
)
def test_classic_example(method: str, sizes: tuple[int, ...], bottleneck: int) -> None:
    """Layers [1, 2], [3, 4, 5], [6, 7] by shares and at the optimum; the block partition is content with less."""
    made = partition(CLASSIC, 3, method)
    assert (made.sizes, made.bottleneck) == (sizes, bottleneck)


def test_parts_name_their_layers() -> None:
    """Boundaries and parts count layers from 0."""
    made = partition(CLASSIC, 3, "histogram")
    assert made.boundaries == (0, 2, 5, 7)
    assert made.parts == (range(2), range(2, 5), range(5, 7))


def test_methods_differ() -> None:
    """Equal layers: only the histogram does not split them evenly, because each ends on a share."""
    assert partition((1,) * 8, 4, "histogram").sizes == (1, 2, 2, 3)
    assert (
        partition((1,) * 8, 4, "block").sizes
        == partition((1,) * 8, 4).sizes
        == (2, 2, 2, 2)
    )


def test_exactness_beyond_floating_point() -> None:
    """A difference that a sum of floats would lose still decides."""
    costs = [2.0**53, 1.0, 1.0, 2.0**53]
    assert partition(costs, 2, "optimal").sizes == (2, 2)
    assert partition([1e-300, 1e300], 2, "block").sizes == (1, 1)


def test_large_models_are_quick_work() -> None:
    """A thousand layers in 64 parts: every part is near the mean."""
    costs = [1 + layer % 7 for layer in range(1000)]
    made = partition(costs, 64, "optimal")
    assert sum(made.sizes) == 1000
    assert made.bottleneck - sum(costs) / 64 < 7


def test_methods_may_be_written_in_any_case() -> None:
    """Names are names, not passwords."""
    assert partition(CLASSIC, 3, "Optimal") == partition(CLASSIC, 3)
    assert isinstance(partition(CLASSIC, 3), Partition)


def test_unknown_method_lists_the_known() -> None:
    """The error names all methods."""
    with pytest.raises(UnknownNameError, match="histogram, block, optimal"):
        partition(CLASSIC, 3, "greedy")


@every_method
@pytest.mark.parametrize(
    ("costs", "parts", "says"),
    [
        ((), 1, "no costs"),
        ((1, 2), 3, "2 layers cannot make 3 parts"),
        ((1, 2), 0, "at least 1 part, got 0"),
        ((1, -2), 1, r"costs\[1\].*got -2"),
        ((float("nan"), 1), 1, r"costs\[0\].*got nan"),
        ((1, float("inf")), 1, r"costs\[1\].*got inf"),
    ],
)
def test_impossible_problems_are_refused(
    method: str, costs: tuple[float, ...], parts: int, says: str
) -> None:
    """Every method refuses them in the same words."""
    with pytest.raises(LayoutError, match=says):
        partition(costs, parts, method)
