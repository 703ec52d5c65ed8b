"""Units for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.spec import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (12.345, "12.3 s"),
        (0.0123, "12.3 ms"),
        (4e-6, "4.00 us"),
        (5e-10, "0.500 ns"),
        (1234.5, "1234 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    """Seconds are shown in the largest unit that leaves at least one whole."""
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (989e12, "FLOP/s", "989 TFLOP/s"),
        (1.5625e9, "B/s", "1.56 GB/s"),
        (12, "B", "12.0 B"),
        (2500, "", "2.50 k"),
    ],
)
def test_scaled(value: float, unit: str, text: str) -> None:
    """Rates are shown by powers of a thousand."""
    assert units.scaled(value, unit) == text


def test_gibibytes() -> None:
    """Memory is shown by powers of 1024."""
    assert units.gibibytes(3 * 1024**3) == "3.00 GiB"


@given(st.floats(min_value=1e-9, max_value=1e12))
def test_significant_digits_are_kept(value: float) -> None:
    """Three significant digits are within half a percent of the value, and never in exponent form."""
    text = units.significant(value)
    assert "e" not in text
    assert abs(float(text) - value) <= 0.0051 * value
