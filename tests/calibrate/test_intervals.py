"""Intervals from held-out residuals: weights of sources, coverage of new ones."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from planner.calibrate.intervals import (
    COVERAGE,
    GRID,
    KINDS,
    Residual,
    coverage,
    distributions,
)


def residuals(
    source: str, spread: float, count: int = 20, *, bias: float = 0.0
) -> list[Residual]:
    """Evenly spread residuals of one source."""
    found = []
    for place in range(count):
        found.append((source, bias + spread * (2 * place / (count - 1) - 1)))
    return found


def test_every_source_has_the_same_weight() -> None:
    """A source with a thousand runs moves the interval as much as one with twenty."""
    small = [*residuals("a", 0.1), *residuals("b", 0.1)]
    few = distributions({"runtime": [*small, *residuals("c", 0.5, 20)]})["runtime"]
    many = distributions({"runtime": [*small, *residuals("c", 0.5, 1000)]})["runtime"]
    assert few.high == pytest.approx(many.high, abs=0.02)
    assert few.low == pytest.approx(many.low, abs=0.02)


def test_wider_kinds_are_never_narrower() -> None:
    """An unknown runtime has at least the uncertainty of a known one, at every quantile."""
    known = [one for name in "abcd" for one in residuals(name, 0.3)]
    unknown = [one for name in "abcd" for one in residuals(name, 0.1)]
    found = distributions({"runtime": known, "architecture": unknown})
    for narrow, wide in pairwise(KINDS):
        assert found[wide].low <= found[narrow].low
        assert found[wide].high >= found[narrow].high
        assert len(found[wide].quantiles) == len(GRID)
        assert list(found[wide].quantiles) == sorted(found[wide].quantiles)
        for place, probability in enumerate(GRID):
            inner = found[narrow].quantiles[place]
            outer = found[wide].quantiles[place]
            assert outer <= inner if probability < 0.5 else outer >= inner


def test_a_kind_of_few_sources_has_the_residuals_of_all() -> None:
    """Two sources are no sample of the next one."""
    known = [one for name in "abcd" for one in residuals(name, 0.3)]
    rare = [*residuals("e", 0.01), *residuals("f", 0.01)]
    found = distributions({"runtime": rare, "architecture": known})
    assert found["runtime"].high > 0.1


def test_intervals_cover_new_sources() -> None:
    """Sources of unlike bias: the interval contains about 80 % of sources never seen."""
    generator = random.Random(7)

    def source(name: str) -> list[Residual]:
        bias = generator.gauss(0, 0.15)
        return [(name, generator.gauss(bias, 0.08)) for _ in range(30)]

    known = [one for place in range(25) for one in source(f"known {place}")]
    table = distributions({"runtime": known})["runtime"]
    unseen = [value for place in range(400) for _, value in source(f"new {place}")]
    inside = sum(table.low <= value <= table.high for value in unseen) / len(unseen)
    assert inside == pytest.approx(COVERAGE, abs=0.07)


def test_coverage_leaves_the_source_out() -> None:
    """A source that is unlike all others is not covered by its own runs."""
    found = [
        *residuals("a", 0.1),
        *residuals("b", 0.1),
        *residuals("c", 0.01, bias=2.0),
    ]
    assert coverage(found, 0.99) <= 2 / 3


def test_without_residuals_the_interval_is_wide() -> None:
    """A calibration of no held-out run has one wide interval for every kind."""
    found = distributions({})
    assert {found[kind].high for kind in KINDS} == {0.4}
    assert len(found["runtime"].quantiles) == len(GRID)
