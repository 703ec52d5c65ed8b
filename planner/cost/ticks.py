"""Whole nanoseconds: the unit in which simulation, solver and validator agree to the last digit."""

from __future__ import annotations

from planner.errors import SpecError

TICK_SECONDS = 1e-9
LONGEST_SECONDS = 1e7
"""Of one action or exchange: four months."""
LONGEST_STEP_SECONDS = 1e8
"""Of the work of one pipeline: three years. Sums of longer ones would pass 64 bits."""


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
            hint="look for a number in a wrong unit: seconds and FLOPs of the profile, peak FLOP/s of the device, "
            "bytes per second of its memory and links.",
        )
    return round(seconds / TICK_SECONDS)


def check_step(micro_batches: int, micro_batch_ticks: int) -> None:
    """Refuse a step that is longer than whole numbers of 64 bits can tell.

    Args:
        micro_batch_ticks: of one micro-batch, all layers one after the other.

    Raises:
        SpecError: naming the batch.
    """
    if micro_batches * micro_batch_ticks * TICK_SECONDS > LONGEST_STEP_SECONDS:
        raise SpecError(
            f"{micro_batches} micro-batches, one after the other, take "
            f"{micro_batches * micro_batch_ticks * TICK_SECONDS:.3g} s; the longest step that is priced takes "
            f"{LONGEST_STEP_SECONDS:.0e} s.",
            field="job.global_batch_size",
            hint="give a smaller global batch, or look for a number in a wrong unit in the profile.",
        )
