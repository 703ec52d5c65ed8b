"""Fit the constants of a framework and device architecture to measured runs.

Robust least squares on the logarithm of predicted / measured seconds (scipy's trust region, soft L1: a run that a slow
node or a restart spoilt pulls little), with a prior on every constant: what the runs do not tell stays what it is
known to be elsewhere. Constants are positive and fitted as logarithms.

    minimise    sum over runs of rho((log(predicted / measured) / sigma)^2)
              + sum over constants of ((log c - log prior) / width)^2
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.spec.calibration import Constants

SIGMA = 0.05
"""Relative error of a run that counts as one unit: what repeated runs differ by."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a constant before any run: its usual value, and the logarithm's spread."""

    value: float
    width: float


PRIORS: dict[str, Prior] = {
    "matmul_fraction": Prior(0.9, 0.1),
    "matmul_edge": Prior(60.0, 0.7),
    "unaligned_fraction": Prior(0.35, 0.1),
    "memory_fraction": Prior(0.8, 0.12),
    "softmax_fraction": Prior(0.7, 0.3),
    "attention_fraction": Prior(0.6, 0.3),
    "attention_backward": Prior(2.8, 0.15),
    "memory_backward": Prior(1.6, 0.15),
    "kernel_seconds": Prior(2.5e-6, 0.4),
    "host_forward_seconds": Prior(1.5e-5, 1.0),
    "host_backward_seconds": Prior(1e-5, 1.0),
    "ring_copies": Prior(1.0, 0.4),
    "rail_fraction": Prior(0.9, 1.0),
    "collective_seconds": Prior(2e-5, 0.8),
    "intra_node_fraction": Prior(0.75, 0.15),
    "inter_node_fraction": Prior(0.6, 0.4),
    "transfer_seconds": Prior(3e-4, 1.5),
    "optimizer_passes": Prior(1.3, 0.4),
    "step_seconds": Prior(5e-3, 1.5),
    "overlap_fraction": Prior(0.7, 0.3),
}
FP8_PRIOR = Prior(0.8, 0.15)
"""Of `Constants.fp8_fraction`, which is fitted apart (`planner.fidelity.fit_fp8`): products in fp8 reach less of a peak
twice as high, since memory and power are those of bf16. Set with published fp8 runs in sight."""
BY_ARCHITECTURE: dict[str, dict[str, Prior]] = {
    # FlashAttention-2 reaches 35 % of the peak (Shah et al. 2024, FlashAttention-3, abstract), and rows that start at
    # no multiple of 16 bytes shut out the tensor memory accelerator and the products of warp groups.
    "Hopper": {
        "attention_fraction": Prior(0.48, 0.2),
        "unaligned_fraction": Prior(0.16, 0.1),
    },
}
"""Where an architecture is known to differ."""
Predictor = Callable[[Constants], Sequence[float]]
"""Predicted seconds of all runs under these constants."""


def priors_of(architecture: str) -> dict[str, Prior]:
    """What is known of the constants of this architecture."""
    return PRIORS | BY_ARCHITECTURE.get(architecture, {})


def start(priors: dict[str, Prior] | None = None) -> Constants:
    """The constants that the priors stand for."""
    return replace(
        Constants(), **{name: prior.value for name, prior in (priors or PRIORS).items()}
    )


def fit(
    predict: Predictor,
    measured: Sequence[float],
    *,
    priors: dict[str, Prior] | None = None,
    sigma: float = SIGMA,
    evaluations: int = 12,
) -> Constants:
    """Constants under which the runs are predicted best.

    Args:
        predict: seconds of all runs, in the order of `measured`.
        measured: seconds.
        priors: the constants that are fitted; None: `PRIORS`.
        sigma: relative error of a run that counts as one unit.
        evaluations: most evaluations of the gradient.
    """
    from scipy.optimize import least_squares

    known = priors or PRIORS
    names = list(known)
    centre = np.log([known[name].value for name in names])
    width = np.array([known[name].width for name in names])
    target = np.log(np.asarray(measured))

    def residuals(shifted: NDArray[np.float64]) -> NDArray[np.float64]:
        point = shifted - 1
        constants = _constants(names, centre + point * width)
        errors = (np.log(np.asarray(predict(constants))) - target) / sigma
        return np.concatenate([_soft(errors), point])

    # Steps are relative to the point, so the priors lie at one; whole nanoseconds ask for steps that are not tiny.
    found = least_squares(
        residuals, np.ones(len(names)), diff_step=1e-2, max_nfev=evaluations
    )
    return _constants(names, centre + (found.x - 1) * width)


def _soft(errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Errors whose squares are soft L1: 2 (sqrt(1 + e^2) - 1); the priors stay quadratic."""
    return np.asarray(np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1)))


def _constants(names: Sequence[str], logarithms: NDArray[np.float64]) -> Constants:
    values = {
        name: math.exp(value) for name, value in zip(names, logarithms, strict=True)
    }
    values = {
        name: min(1.0, value) if name.endswith("_fraction") else value
        for name, value in values.items()
    }
    return replace(Constants(), **values)
