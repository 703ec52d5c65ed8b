"""Partitions that count transfers."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, pairwise
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.partition import rows_of
from planner.errors import LayoutError
from planner.partition import Choice, boundary_seconds, partition
from planner.schedule import Durations, build, simulate
from planner.spec import ModelProfile
from planner.spec.profile import LayerProfile, Measurement, SkipEdge

values = st.one_of(st.integers(0, 30), st.sampled_from((0, 1000)), st.floats(0, 1e6))


class Problem(NamedTuple):
    """Layers, boundaries and a number of parts that the layers can make."""

    costs: list[float]
    transfers: list[float]
    parts: int


@st.composite
def problems(draw: st.DrawFn, least: int = 1) -> Problem:
    """Unequal and zero costs, and transfers that are zero, small or larger than all costs."""
    costs = draw(st.lists(values, min_size=least, max_size=8))
    boundaries = len(costs) - 1
    transfers = draw(st.lists(values, min_size=boundaries, max_size=boundaries))
    return Problem(costs, transfers, draw(st.integers(least, len(costs))))


def all_terms(problem: Problem, *, exposed: bool) -> Iterator[list[Fraction]]:
    """Terms of equation (1) or (2), whose largest is the bottleneck, of every way to cut."""
    costs = [Fraction(cost) for cost in problem.costs]
    layers = len(costs)
    sent = [Fraction(0), *(Fraction(each) for each in problem.transfers), Fraction(0)]
    for cuts in combinations(range(1, layers), problem.parts - 1):
        terms = []
        for start, end in pairwise((0, *cuts, layers)):
            compute = sum(costs[start:end], Fraction(0))
            if exposed:
                terms.append(compute + (sent[start] + sent[end]) / 2)
            else:
                terms += [compute, sent[end]]
        yield terms


@pytest.mark.parametrize("exposed", [False, True])
@given(problem=problems())
@example(problem=Problem([1, 1, 1], [1000, 1000], 3))
@example(problem=Problem([0, 0, 0, 0], [3, 1, 2], 2))
@example(problem=Problem([5, 1, 1, 5], [0, 1000, 0], 2))
@example(problem=Problem([9, 0, 9], [1000, 0], 2))
def test_optimal_is_the_best_of_all(problem: Problem, exposed: bool) -> None:
    """Brute force finds no smaller bottleneck, and no smaller sum of squares among the best."""
    made = partition(
        problem.costs, problem.parts, "optimal", problem.transfers, exposed=exposed
    )
    ways = list(all_terms(problem, exposed=exposed))
    least = min(max(terms) for terms in ways)
    squares = [sum(term**2 for term in terms) for terms in ways if max(terms) == least]
    chosen = terms_of(problem, made.sizes, exposed=exposed)
    assert max(chosen) == least
    assert sum(term**2 for term in chosen) == min(squares)
    assert made.bottleneck == pytest.approx(float(least))
    cuts = made.boundaries[1:-1]
    assert made.transfers == tuple(problem.transfers[end - 1] for end in cuts)


def terms_of(
    problem: Problem, sizes: tuple[int, ...], *, exposed: bool
) -> list[Fraction]:
    """Terms of the way to cut that has these sizes."""
    layers = range(1, len(problem.costs))
    ways = combinations(layers, problem.parts - 1)
    terms = all_terms(problem, exposed=exposed)
    for cuts, found in zip(ways, terms, strict=True):
        edges = (0, *cuts, len(problem.costs))
        if tuple(end - start for start, end in pairwise(edges)) == sizes:
            return found
    raise AssertionError(sizes)


@given(problems())
def test_transfers_of_no_time_change_nothing(problem: Problem) -> None:
    """With zero transfers the partition is that of the layers' costs alone."""
    nothing = [0] * len(problem.transfers)
    plain = partition(problem.costs, problem.parts)
    assert partition(problem.costs, problem.parts, "optimal", nothing).sizes == (
        plain.sizes
    )


@given(problem=problems(least=2), micro_batches=st.integers(1, 24))
def test_1f1b_lies_between_both_bottlenecks(
    problem: Problem, micro_batches: int
) -> None:
    """A micro-batch of simulated 1F1B takes at most equation (2), and in the steady state at least half of (1)."""
    whole = Problem(
        [int(cost) for cost in problem.costs],
        [int(each) for each in problem.transfers],
        problem.parts,
    )
    overlapped = partition(whole.costs, whole.parts, "optimal", whole.transfers)
    exposed = partition(
        whole.costs, whole.parts, "optimal", whole.transfers, exposed=True
    )
    schedule = build("1f1b", ranks=whole.parts, micro_batches=micro_batches)
    third = tuple(Fraction(cost) / 3 for cost in exposed.costs)
    half = tuple(Fraction(each) / 2 for each in exposed.transfers)
    durations = Durations(third, third, third, (), half, half)  # type: ignore[arg-type]
    makespan = simulate(schedule, durations).makespan
    first = sum(exposed.costs) + sum(exposed.transfers)
    assert makespan <= first + (micro_batches - 1) * Fraction(exposed.bottleneck)
    steady = micro_batches - 2 * whole.parts
    assert 2 * makespan >= steady * overlapped.bottleneck


@pytest.mark.parametrize(
    ("transfers", "message"),
    [
        ((1,), "3 layers have 2 boundaries, got 1 transfers"),
        ((1, 2, 3), "got 3 transfers"),
        ((1, -2), r"transfers\[1\].*got -2"),
        ((float("nan"), 1), r"transfers\[0\].*got nan"),
    ],
)
def test_wrong_transfers_are_refused(
    transfers: tuple[float, ...], message: str
) -> None:
    """There is one finite transfer of at least 0 for every boundary."""
    with pytest.raises(LayoutError, match=message):
        partition((1, 2, 3), 2, "optimal", transfers)


@pytest.mark.parametrize("exposed", [False, True])
def test_more_parts_than_layers_are_refused(exposed: bool) -> None:
    """No part is empty, whatever the transfers cost."""
    with pytest.raises(LayoutError, match="2 layers cannot make 3 parts"):
        partition((1, 2), 3, "optimal", (0,), exposed=exposed)


@pytest.mark.parametrize("method", ["block", "histogram"])
def test_heuristics_refuse_transfers(method: str) -> None:
    """A method that would ignore transfers raises an error instead."""
    with pytest.raises(LayoutError, match=f"method {method} ignores transfers"):
        partition((1, 2, 3), 2, method, (1, 1))


def layer(name: str, output_bytes: int) -> LayerProfile:
    """A counted layer with one row: 2 samples of 10 tokens."""
    row = Measurement(
        micro_batch_size=2,
        sequence_length=10,
        forward_flops=0,
        backward_input_flops=0,
        backward_weight_flops=0,
        activation_bytes=0,
        output_bytes=output_bytes,
        temporary_bytes=0,
        source="counted",
    )
    return LayerProfile(name=name, kind=name, parameters=0, measurements=(row,))


def test_skip_edges_count_in_every_cut_they_cross() -> None:
    """An edge adds its bytes for all samples at the row's length to each boundary between its layers."""
    names, sizes = ("a", "b", "c", "d", "e"), (100, 200, 300, 400, 500)
    edges = (
        SkipEdge(from_="a", to="d", bytes=7),
        SkipEdge(from_="c", to="e", bytes=30, sequence_length=20),
    )
    profile = ModelProfile(
        model="skips",
        device="counted",
        layers=tuple(map(layer, names, sizes)),
        edges=edges,
    )
    one_way = (100 + 14, 200 + 14, 300 + 14 + 30, 400 + 30)
    expected = [2 * each / 1000 for each in one_way]
    assert boundary_seconds(profile, 1000, Choice()) == pytest.approx(expected)


def test_benchmark_of_transfers() -> None:
    """On U-Net at 1 GB/s, counting transfers lowers the bottleneck and the simulated step."""
    slow = rows_of("unet-5-64", parts=4)[0]
    assert slow.least_bottleneck_seconds < slow.blind_bottleneck_seconds
    assert slow.overlapped_step_seconds < slow.blind_step_seconds
