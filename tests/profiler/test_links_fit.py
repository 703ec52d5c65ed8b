"""The fit of latency and bandwidth: exact on rows that follow the formulas, and the best one on rows that do not."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import SpecError
from planner.spec import Link, LinkMeasurement
from profiler.links_fit import factors_of, fit, predict, residual
from profiler.links_measure import OPERATIONS

latencies = st.floats(1e-6, 1e-2)
bandwidths = st.floats(1e8, 1e12)
operations = st.sampled_from(OPERATIONS)
ranks = st.integers(2, 16)


def row(operation: str, size: int, ranks: int, seconds: float = 1.0) -> LinkMeasurement:
    return LinkMeasurement(operation=operation, bytes=size, ranks=ranks, seconds=seconds)


def follow(link: Link, rows: list[LinkMeasurement]) -> list[LinkMeasurement]:
    """The rows with the seconds that the link's formulas give."""
    return [each.model_copy(update={"seconds": predict(link, each)}) for each in rows]


def misfit(link: Link, rows: list[LinkMeasurement]) -> float:
    """The objective of the fit, equation (4)."""
    ratios = [predict(link, each) / each.seconds for each in rows]
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
def test_fit_recovers_latency_and_bandwidth(latency: float, bandwidth: float, operation: str, ranks: int) -> None:
    """Rows that follow the formulas, from latency-bound to bandwidth-bound, give back what they were made from."""
    link = Link(latency_seconds=latency, bandwidth_bytes_per_second=bandwidth)
    rows = [row(operation, 1 << exponent, ranks) for exponent in range(8, 35, 2)]
    fitted = fit(follow(link, rows))
    assert fitted.latency_seconds == pytest.approx(latency, rel=1e-6)
    assert fitted.bandwidth_bytes_per_second == pytest.approx(bandwidth, rel=1e-6)
    assert residual(fitted) < 1e-6
    assert len(fitted.measurements) == len(rows)


noisy_rows = st.lists(
    st.builds(row, operations, st.integers(4, 1 << 30), ranks, st.floats(1e-6, 10.0)), min_size=2, max_size=12
)


@given(noisy_rows, st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_no_other_link_is_closer(rows: list[LinkMeasurement], slower: float, faster: float) -> None:
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


def test_residual_is_zero_without_rows() -> None:
    """A link from a data sheet has no residual."""
    assert residual(Link(latency_seconds=1e-6, bandwidth_bytes_per_second=1e9)) == 0.0
