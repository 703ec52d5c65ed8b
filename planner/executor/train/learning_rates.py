"""The learning rate of every step, from its number alone: a run that resumes goes on along the same curve. Torch-free.

R is the learning rate, M the least one, W the steps of the warm-up and D the step at which the decay ends; steps t
count from 0 over all runs of a training.

    warm-up, t < W    R t / W                                                                       (1)
    constant          R                                                                             (2)
    linear            M + (R - M) (1 - p)              p = (t - W) / (D - W), from D on 1           (3)
    cosine            M + (R - M) (1 + cos(pi p)) / 2                                               (4)

Equations (1) to (4) -> implemented in `LearningRates.__call__`.

Sources: (1) to (3) transformers' `get_constant_schedule_with_warmup` and `get_linear_schedule_with_warmup`; (4) its
`get_cosine_with_min_lr_schedule_with_warmup`, one period of Loshchilov, Hutter 2017, "SGDR", equation (5).
transformers' cosine rises again behind D; here the rate stays at M.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

SCHEDULES = ("constant", "linear", "cosine")
CONSTANT = SCHEDULES[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRates:
    """A schedule; called with a step, it tells the rate of its update."""

    peak: float
    """R."""
    schedule: str = CONSTANT
    warmup_steps: int = 0
    """W."""
    least: float = 0.0
    """M; a constant schedule has none."""
    end: int = 0
    """D, above W; a constant schedule has none."""

    def __call__(self, step: int) -> float:
        """Of the step's update."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == CONSTANT:
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / (self.end - self.warmup_steps))
        left = (
            1 - progress
            if self.schedule == "linear"
            else (1 + math.cos(math.pi * progress)) / 2
        )
        return self.least * (1 - left) + self.peak * left  # both ends come out exactly


def learning_rates(given: float | Callable[[int], float]) -> Callable[[int], float]:
    """By the step; a number is the rate of all of them."""
    return given if callable(given) else LearningRates(peak=given)
