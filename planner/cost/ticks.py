"""Whole nanoseconds: the unit in which simulation, solver and validator agree to the last digit."""

from __future__ import annotations

TICK_SECONDS = 1e-9


def ticks(seconds: float) -> int:
    """Seconds in whole ticks, rounded to nearest."""
    return round(seconds / TICK_SECONDS)
