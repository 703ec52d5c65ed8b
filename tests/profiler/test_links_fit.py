"""The fit of latency and bandwidth: exact on rows that follow the formulas, and the best one on rows that do not."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import SpecError
from planner.profiler.links_fit import factors_of, fit, fit_levels, predict, residual
from planner.profiler.links_measure import OPERATIONS
from planner.spec import Link, LinkFit, LinkMeasurement

latencies = st.floats(1e-6, 1e-2)
bandwidths = st.floats(1e8, 1e12)
operations = st.sampled_from(OPERATIONS)
ranks = st.integers(2, 16)


def row(operation: str, size: int, ranks: int, seconds: float = 1.0) -> LinkMeasurement:
    return LinkMeasurement(
        operation=operation, bytes=size, ranks=ranks, seconds=seconds
    )


def follow(link: Link, rows: list[LinkMeasurement]) -> list[LinkMeasurement]:
    """The rows with the seconds that the link's formulas give."""
    return [
        each.model_copy(update={"seconds": seconds_of(link, each)}) for each in rows
    ]


def seconds_of(link: Link | LinkFit, row: LinkMeasurement) -> float:
    return predict(link.latency_seconds, link.bandwidth_bytes_per_second, row)


def misfit(link: Link, rows: list[LinkMeasurement]) -> float:
    """The objective of the fit, equation (4)."""
    ratios = [seconds_of(link, each) / each.seconds for each in rows]
    return math.fsum(ratio + 1 / ratio - 2 for ratio in ratios)


def test_operations_are_those_of_the_document() -> None:
    """The profiler measures every operation that the link document knows."""
    assert get_args(LinkMeasurement.model_fields["operation"].annotation) == OPERATIONS


@pytest.mark.parametrize(
    ("operation", "hops", "moved"),
    [
        ("all_reduce", 6, 1536),
        ("all_gather", 3, 768),
        ("reduce_scatter", 3, 768),
        ("all_to_all", 3, 768),
        ("broadcast", 1, 1024),
        ("point_to_point", 1, 1024),
    ],
)
def test_ring_formulas(operation: str, hops: float, moved: float) -> None:
    """Four ranks and 1024 bytes give the hops and bytes worked out by hand from equations (1) to (3)."""
    assert factors_of(row(operation, 1024, 4)) == (hops, moved)


@given(latencies, bandwidths, operations, ranks)
def test_fit_recovers_latency_and_bandwidth(
    latency: float, bandwidth: float, operation: str, ranks: int
) -> None:
    """Rows that follow the formulas, from latency-bound to bandwidth-bound, give back what they were made from."""
    link = Link(latency_seconds=latency, bandwidth_bytes_per_second=bandwidth)
    rows = [row(operation, 1 << exponent, ranks) for exponent in range(8, 35, 2)]
    fitted = fit(follow(link, rows))
    assert fitted.latency_seconds == pytest.approx(latency, rel=1e-6)
    assert fitted.bandwidth_bytes_per_second == pytest.approx(bandwidth, rel=1e-6)
    assert fitted.relative_residual == pytest.approx(0, abs=1e-6)
    assert [fit.operation for fit in fitted.fits] == [operation]
    assert len(fitted.measurements) == len(rows)


noisy_rows = st.lists(
    st.builds(row, operations, st.integers(4, 1 << 30), ranks, st.floats(1e-6, 10.0)),
    min_size=2,
    max_size=12,
)


@given(noisy_rows, st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_no_other_link_is_closer(
    rows: list[LinkMeasurement], slower: float, faster: float
) -> None:
    """On arbitrary rows, no scaling of latency and bandwidth comes closer than the fit, where the fit sees both."""
    fitted = fit(rows)
    best_rate = max(factors_of(each)[1] / each.seconds for each in rows)
    if fitted.latency_seconds == 0 or fitted.bandwidth_bytes_per_second == best_rate:
        return
    other = Link(
        latency_seconds=fitted.latency_seconds * slower,
        bandwidth_bytes_per_second=fitted.bandwidth_bytes_per_second * faster,
    )
    assert misfit(fitted, rows) <= misfit(other, rows) * (1 + 1e-9) + 1e-9


def test_rows_without_bandwidth_promise_only_what_was_seen() -> None:
    """When time does not grow with size, the bandwidth is the best rate that any row reached."""
    rows = [row("broadcast", 1024, 2, 1e-3), row("broadcast", 4096, 2, 1e-3)]
    assert fit(rows).bandwidth_bytes_per_second == pytest.approx(4096 / 1e-3)


def test_rows_without_latency_give_zero() -> None:
    """When time grows faster than size, no latency is left."""
    rows = [row("broadcast", 1024, 2, 1e-6), row("broadcast", 4096, 2, 1e-5)]
    assert fit(rows).latency_seconds == 0.0


def test_one_row_is_refused() -> None:
    """Two unknowns need two rows, and the error says so."""
    with pytest.raises(SpecError, match="at least two sizes"):
        fit([row("broadcast", 1024, 2)])


def test_each_operation_has_its_own_fit() -> None:
    """Two operations of different speed are each fitted exactly, while the one fit over both is off by their ratio."""
    fast = Link(latency_seconds=1e-5, bandwidth_bytes_per_second=4e9)
    slow = Link(latency_seconds=1e-5, bandwidth_bytes_per_second=1e9)
    sizes = [1 << exponent for exponent in range(10, 31, 2)]
    rows = follow(fast, [row("broadcast", size, 2) for size in sizes])
    rows += follow(slow, [row("all_gather", size, 4) for size in sizes])
    fitted = fit(rows)
    assert [each.operation for each in fitted.fits] == ["broadcast", "all_gather"]
    assert [each.bandwidth_bytes_per_second for each in fitted.fits] == pytest.approx(
        [4e9, 1e9]
    )
    assert all(each.relative_residual < 1e-6 for each in fitted.fits)
    assert fitted.relative_residual is not None
    assert fitted.relative_residual > 0.3


def test_the_residual_is_the_typical_error() -> None:
    """Predictions that are twice and half of what was measured have a residual of log 2."""
    rows = [row("broadcast", 1000, 2, 0.5), row("broadcast", 1000, 2, 2.0)]
    assert residual(0.0, 1000.0, rows) == pytest.approx(math.log(2))


def test_levels_are_fitted_apart() -> None:
    """Rows inside and between nodes give two links; rows over both are kept, but no ring over one link fits them."""
    inside, between = (
        Link(latency_seconds=a, bandwidth_bytes_per_second=b)
        for a, b in ((1e-6, 1e11), (1e-5, 1e10))
    )
    sizes = [1 << exponent for exponent in range(10, 31, 2)]
    rows = follow(inside, [row("all_reduce", size, 4) for size in sizes])
    rows += [
        each.model_copy(update={"nodes": 2})
        for each in follow(between, [row("all_reduce", s, 2) for s in sizes])
    ]
    rows += [
        row("all_reduce", size, 8, 1.0).model_copy(update={"nodes": 2})
        for size in sizes
    ]
    links = fit_levels(rows, {False: 1.5}, 1.25)
    assert links.intra_node is not None
    assert links.inter_node is not None
    assert links.intra_node.bandwidth_bytes_per_second == pytest.approx(1e11)
    assert links.inter_node.bandwidth_bytes_per_second == pytest.approx(1e10)
    assert (links.intra_node.overlap_slowdown, links.inter_node.overlap_slowdown) == (
        1.5,
        None,
    )
    assert (links.intra_node.pipeline_slowdown, links.inter_node.pipeline_slowdown) == (
        1.25,
        None,
    )
    assert len(links.inter_node.measurements) == 2 * len(sizes)
