"""Fit what an allocator loses to nothing but runs that ran and runs that ran out of memory.

Where a source tells no bytes, its decisions still do: with m = bytes / capacity of a run under a factor,

    minimise  sum over runs of w log(1 + exp(-s log(m) / SHARPNESS)),  s = 1 when it ran out, -1 when it ran
              + (log factor / WIDTH)^2 / 2

w is OVERFLOW_WEIGHT for a run that ran out, else 1: a plan that dies costs more than one that is not tried. Solved by
trying every factor of a grid: the sum is no smooth function of few runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.fidelity.predict import predict_run
from planner.fidelity.rows import Run
from planner.spec.calibration import DEFAULT, Constants

SHARPNESS = 0.02
"""Relative distance from the capacity at which a decision is as good as certain."""
WIDTH = 0.3
"""Spread of the factor's logarithm that is known before."""
OVERFLOW_WEIGHT = 3.0
"""Runs that were refused though they fit, which are as bad as one that ran out though it was said to fit."""
GRID = np.arange(0.8, 2.01, 0.01)


@dataclass(frozen=True, slots=True)
class Decision:
    """One run: its ranks' bytes as fixed + factor * scaled, the device's memory, and whether it ran out."""

    fixed: tuple[float, ...]
    scaled: tuple[float, ...]
    capacity_bytes: int
    ran_out: bool

    def filling(self, factor: float) -> float:
        """Bytes of the fullest rank / the device's memory."""
        needs = (
            fixed + factor * scaled
            for fixed, scaled in zip(self.fixed, self.scaled, strict=True)
        )
        return max(needs) / self.capacity_bytes


def decision(run: Run) -> Decision:
    """What a run that ran, or ran out of memory, tells."""
    plain = predict_run(run, replace(DEFAULT, allocated_factor=1.0))
    doubled = predict_run(run, replace(DEFAULT, allocated_factor=2.0))
    once, twice = plain.prediction.memory, doubled.prediction.memory
    scaled = tuple(
        float(b.peak_bytes - a.peak_bytes) for a, b in zip(once, twice, strict=True)
    )
    fixed = tuple(row.peak_bytes - more for row, more in zip(once, scaled, strict=True))
    return Decision(fixed, scaled, plain.capacity_bytes, run.ran_out)


def fit_decisions(decisions: Sequence[Decision]) -> Constants:
    """The `allocated_factor` under which the decisions are most likely."""
    return replace(
        DEFAULT,
        allocated_factor=float(
            round(min(GRID, key=lambda each: _loss(decisions, each)), 2)
        ),
    )


def _loss(decisions: Sequence[Decision], factor: float) -> float:
    margins = np.log([one.filling(factor) for one in decisions]) / SHARPNESS
    signs = np.array([1.0 if one.ran_out else -1.0 for one in decisions])
    weights = np.where(signs > 0, OVERFLOW_WEIGHT, 1.0)
    return float(
        (weights * np.logaddexp(0, -signs * margins)).sum()
        + (np.log(factor) / WIDTH) ** 2 / 2
    )
