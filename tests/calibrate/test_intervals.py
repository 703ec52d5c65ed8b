"""Intervals from held-out residuals: kinds, weights of sources, coverage of new ones."""

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
    intervals,
    kinds_of,
    row_counts,
)


def residuals(
    source: str,
    spread: float,
    count: int = 20,
    *,
    bias: float = 0.0,
    runtime: str = "nemo",
    architecture: str = "Hopper",
) -> list[Residual]:
    """Evenly spread residuals of one source."""
    found = []
    for place in range(count):
        value = bias + spread * (2 * place / (count - 1) - 1)
        found.append(Residual(value, source, runtime, architecture))
    return found


def test_kinds_are_what_other_sources_make_known() -> None:
    """A source's own runs do not make its runtime or architecture known."""
    found = [
        *residuals("a", 0.1),
        *residuals("b", 0.1),
        *residuals("c", 0.1, runtime="torchtitan"),
        *residuals("d", 0.1, runtime="torchtitan", architecture="CDNA3"),
        *residuals("e", 0.1, 3, architecture="CDNA3"),
    ]
    kinds = dict(zip((one.source for one in found), kinds_of(found), strict=True))
    assert kinds == {
        "a": "runtime",
        "b": "runtime",
        "c": "architecture",
        "d": "neither",
        "e": "architecture",
    }


def test_every_source_has_the_same_weight() -> None:
    """A source with a thousand runs moves the interval as much as one with twenty."""
    small = [residuals(name, 0.1) for name in "ab"]
    few = [*small[0], *small[1], *residuals("c", 0.5, 20)]
    many = [*small[0], *small[1], *residuals("c", 0.5, 1000)]
    one = intervals(few, few)["runtime"].time
    other = intervals(many, many)["runtime"].time
    assert one.high == pytest.approx(other.high, abs=0.02)
    assert one.low == pytest.approx(other.low, abs=0.02)


def test_wider_kinds_are_never_narrower() -> None:
    """An unknown runtime has at least the uncertainty of a known one, at every quantile."""
    found = []
    for name in "abcd":
        found += residuals(name, 0.3)
        runtime, architecture = f"runtime {name}", "Blackwell"
        found += residuals(
            f"{name} too", 0.1, runtime=runtime, architecture=architecture
        )
    table = intervals(found, found)
    for narrow, wide in pairwise(KINDS):
        for quantity in ("time", "memory"):
            inner = getattr(table[narrow], quantity)
            outer = getattr(table[wide], quantity)
            assert outer.low <= inner.low
            assert outer.high >= inner.high
            assert len(outer.quantiles) == len(GRID)
            assert list(outer.quantiles) == sorted(outer.quantiles)


def test_intervals_cover_new_sources() -> None:
    """Sources of unlike bias: the interval contains about 80 % of sources never seen."""
    generator = random.Random(7)

    def source(name: str) -> list[Residual]:
        bias = generator.gauss(0, 0.15)
        values = [generator.gauss(bias, 0.08) for _ in range(30)]
        return [Residual(value, name, "nemo", "Hopper") for value in values]

    known = [one for place in range(25) for one in source(f"known {place}")]
    table = intervals(known, known)["runtime"].time
    unseen = [one.value for place in range(400) for one in source(f"new {place}")]
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


def test_row_counts() -> None:
    """Runs are counted by runtime, by architecture and by both."""
    found = [*residuals("a", 0.1, 3), *residuals("b", 0.1, 2, runtime="torchtitan")]
    counts = row_counts(found)
    assert counts.runtime == {"nemo": 3, "torchtitan": 2}
    assert counts.architecture == {"Hopper": 5}
    assert counts.runtime_architecture == {
        "nemo x Hopper": 3,
        "torchtitan x Hopper": 2,
    }
