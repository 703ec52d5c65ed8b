"""How fast a run was, by the seconds of its steps. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypedDict

from planner.executor.elastic.drift import WARM_UP_STEPS
from planner.spec.plan import Plan


class Speed(TypedDict):
    """Fields of `planner.spec.measured.MeasuredRun`."""

    median_step_seconds: float
    tokens_per_second: float
    mfu: float | None


def warm_up_steps(steps: int) -> int:
    """How many of so many steps say nothing about the speed: all but the last one, at most."""
    return min(WARM_UP_STEPS, steps - 1)


def speed_of(plan: Plan, seconds: Sequence[float]) -> Speed:
    """Of steps by this plan, at least one, the first ones left out."""
    median = statistics.median(seconds[warm_up_steps(len(seconds)) :])
    job, predicted = plan.request.job, plan.prediction
    return Speed(
        median_step_seconds=median,
        tokens_per_second=job.global_batch_size * (job.sequence_length or 1) / median,
        mfu=None
        if predicted.mfu is None
        else predicted.mfu * predicted.step_seconds / median,
    )
