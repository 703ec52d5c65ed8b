"""Whole nanoseconds: the unit in which simulation, solver and validator agree to the last digit."""

from __future__ import annotations

from planner.errors import SpecError

TICK_SECONDS = 1e-9
LONGEST_SECONDS = 1e7
"""Of one action or exchange: four months. Sums of longer ones would pass the solver's 64 bits."""


def ticks(seconds: float) -> int:
    """Seconds in whole ticks, rounded to nearest.

    Raises:
        SpecError: longer than `LONGEST_SECONDS`, or no number.
    """
    if not seconds <= LONGEST_SECONDS:
        raise SpecError(
            f"one action, exchange or copy takes {seconds:.3g} s; the longest that is priced takes "
            f"{LONGEST_SECONDS:.0e} s.",
            field="profile, cluster",
            mend="look for a number in a wrong unit: seconds and FLOPs of the profile, peak FLOP/s of the device, "
            "bytes per second of its memory and links.",
        )
    return round(seconds / TICK_SECONDS)
