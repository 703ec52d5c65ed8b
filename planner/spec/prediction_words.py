"""How certain a prediction is, as text that every interface shows."""

from __future__ import annotations

from planner.spec.job import Job
from planner.spec.plan import Prediction, RankMemory
from planner.spec.units import seconds


def step_interval(prediction: Prediction) -> str:
    """Return ``80 %: 5.29 s to 7.58 s``; empty if the prediction has no interval."""
    interval = prediction.step_seconds_80
    if interval is None:
        return ""
    low, high = interval
    return f"80 %: {seconds(low)} to {seconds(high)}"


def memory_risk(prediction: Prediction) -> str:
    """Return ``12 % risk of running out``; empty if the probability is not known."""
    probability = prediction.out_of_memory_probability
    if probability is None:
        return ""
    return f"{_rounded(probability)} risk of running out"


def calibration_text(prediction: Prediction) -> str:
    """Return the calibration and the runs behind the prediction; empty: not known."""
    calibration = prediction.calibration
    if calibration is None:
        return ""
    return f"{calibration.name}: {calibration.note}"


def limit_bytes(row: RankMemory, job: Job) -> int:
    """Return the memory that a rank may fill: the capacity, or the whole device.

    A prediction for a job without a ``memory_headroom`` may fill the whole device; the
    job of a plan has one.
    """
    if job.memory_headroom is None and row.device_bytes is not None:
        return row.device_bytes
    return row.capacity_bytes


def _rounded(probability: float) -> str:
    """Return whole per cent; values that round to 0 or 100 % are given as bounds."""
    share = round(100 * probability)
    if share < 1:
        return "under 1 %"
    if share > 99:
        return "over 99 %"
    return f"{share} %"
