"""Fit the constants of the cost model to measured runs, partially pooled.

A constant of a run is the product of a global value and the factor of one owner: the
architecture of the device, the runtime, the number format, or the source that measured
(Gelman and Hill 2006, chapter 12, "partial pooling"). Runs of one owner move its factor
only as far as they outweigh its prior, so that what few runs say stays near what all
others say; an owner without runs has the factor one.

    log c(run) = log global(c) + offset(c, owner(run))

    minimise    sum over runs of w^2 rho(log(predicted / measured) / sigma)
              + sum over globals of ((log value - log prior) / width)^2
              + sum over offsets of (offset / width)^2

rho is soft L1: a run that a slow node spoilt pulls little. A source weighs at most as
much as `MOST_ROWS` runs. Predictions come from `planner.cost.predict`, linearised in
the logarithms of the constants by finite differences, so the fit needs no formula of
its own; every iteration predicts again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.cost.predict import PricedRun
from planner.spec.calibration import Constants
from planner.spec.devices import catalogue

Floats = NDArray[np.float64]
Owner = Literal["architecture", "runtime", "format", "source", "runtime x architecture"]

SIGMA = 0.06
"""Relative error of a run that counts as one unit: what repeated runs differ by."""
MOST_ROWS = 40
"""Runs of one source weigh at most as much as so many."""
STEP = 0.02
"""Of finite differences, in the logarithm of a constant."""
REWEIGHTINGS = 12
"""Of iteratively reweighted least squares."""
LEAST_ROWS = 6
"""Runs below which an owner has no factor of its own."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a constant before any run."""

    value: float
    width: float
    """Spread of the logarithm of the global value."""
    owner: Owner
    owner_width: float
    """Spread of the logarithm of an owner's factor."""
    least: float = 0.0
    most: float = math.inf


PRIORS: dict[str, Prior] = {
    "matmul_fraction": Prior(0.88, 0.07, "architecture", 0.1, 0.3, 1.1),
    "matmul_edge": Prior(60.0, 0.4, "architecture", 0.3, 0.0, 400.0),
    "unaligned_fraction": Prior(0.35, 0.1, "architecture", 0.3, 0.05, 1.0),
    "grouped_fraction": Prior(0.8, 0.2, "architecture", 0.1, 0.3, 1.0),
    "kernel_fraction": Prior(1.0, 0.02, "runtime x architecture", 0.12, 0.3, 2.0),
    "fp8_fraction": Prior(0.8, 0.15, "format", 0.15, 0.3, 1.0),
    "memory_fraction": Prior(0.8, 0.12, "architecture", 0.1, 0.3, 1.0),
    "softmax_fraction": Prior(0.7, 0.3, "architecture", 0.1, 0.2, 1.2),
    "attention_fraction": Prior(0.55, 0.2, "architecture", 0.2, 0.2, 1.0),
    "attention_backward": Prior(2.7, 0.1, "architecture", 0.05, 2.0, 4.0),
    "memory_backward": Prior(1.7, 0.1, "architecture", 0.05, 1.0, 3.0),
    "kernel_seconds": Prior(2.5e-6, 0.2, "architecture", 0.2, 5e-7, 2e-5),
    "host_forward_seconds": Prior(1.2e-5, 0.7, "runtime", 0.4, 1e-6, 1e-4),
    "host_backward_seconds": Prior(8e-6, 0.7, "runtime", 0.4, 1e-6, 1e-4),
    "collective_seconds": Prior(2e-5, 0.4, "architecture", 0.2, 1e-6, 2e-4),
    "intra_node_fraction": Prior(0.75, 0.15, "architecture", 0.1, 0.3, 1.0),
    "inter_node_fraction": Prior(0.65, 0.2, "source", 0.3, 0.1, 0.95),
    "transfer_seconds": Prior(3e-4, 1.0, "runtime", 1.0, 1e-6, 2e-2),
    "optimizer_passes": Prior(1.3, 0.3, "runtime", 0.2, 1.0, 4.0),
    "step_seconds": Prior(1e-2, 1.0, "runtime", 0.5, 1e-4, 0.2),
    "overlap_fraction": Prior(0.7, 0.15, "runtime", 0.15, 0.2, 1.0),
}
"""Of the constants of time. Bounds follow from physics: a fraction of a data sheet's
figure is at most one, the optimizer moves its states at least once."""
FIXED = {"ring_copies": 1.0, "rail_fraction": 0.9}
"""Constants of time that are not fitted."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A measured run as the fit sees it."""

    run: PricedRun
    source: str
    measured_seconds: float

    def owner(self, kind: Owner) -> str:
        """Return the owner of a constant for this run."""
        job = self.run.run.job
        if kind == "source":
            return self.source
        if kind == "runtime":
            return self.run.runtime.calibration_owner
        if kind == "format":
            scaling = self.run.runtime.fp8_scaling
            return f"fp8-{scaling}" if job.precision == "fp8" else job.precision
        architecture = architecture_of(self.run)
        if kind == "architecture":
            return architecture
        return f"{self.run.runtime.calibration_owner} x {architecture}"


def architecture_of(run: PricedRun) -> str:
    """Return the architecture of the run's device; empty: not in the catalogue."""
    known = catalogue().get(run.work.device.id)
    return known.architecture if known else ""


@dataclass(frozen=True)
class Pooled:
    """Global constants and the factors of owners."""

    constants: Mapping[str, float]
    offsets: Mapping[str, Mapping[str, float]]
    """By constant and owner, in the logarithm."""

    def constants_of(self, run: Timed) -> Constants:
        """Return the constants of a run."""
        values = {}
        for name, prior in PRIORS.items():
            offset = self.offsets.get(name, {}).get(run.owner(prior.owner), 0.0)
            value = self.constants[name] * math.exp(offset)
            values[name] = min(max(value, prior.least), prior.most)
        return replace(Constants(), **values, **FIXED)


def unfitted() -> Pooled:
    """Return the priors, without any run."""
    return Pooled({name: prior.value for name, prior in PRIORS.items()}, {})


@dataclass(frozen=True)
class Linear:
    """Predictions of runs, linear in the logarithms of the constants at a point."""

    runs: Sequence[Timed]
    at: Pooled
    errors: Floats
    """log(predicted / measured) of every run."""
    slopes: Floats
    """Shape (runs, constants): of the error by the logarithm of a constant."""


def linearise(runs: Sequence[Timed], at: Pooled) -> Linear:
    """Predict all runs, and again with every constant moved."""
    rows = [_linearised(run, at) for run in runs]
    errors = np.array([row[0] for row in rows])
    return Linear(runs, at, errors, np.array([row[1:] for row in rows]))


def _linearised(timed: Timed, at: Pooled) -> list[float]:
    constants = at.constants_of(timed)
    seconds = timed.run.step_seconds(constants)
    found = [math.log(seconds / timed.measured_seconds)]
    for name in PRIORS:
        moved = getattr(constants, name) * math.exp(STEP)
        other = timed.run.step_seconds(replace(constants, **{name: moved}))
        found.append(math.log(other / seconds) / STEP)
    return found


def solve(linear: Linear, chosen: Sequence[int]) -> Pooled:
    """Return the constants under which the chosen runs are predicted best."""
    names = list(PRIORS)
    runs = [linear.runs[place] for place in chosen]
    weights = _weights(runs)
    columns = [(name, "") for name in names]
    for name in names:
        columns += [(name, owner) for owner in _owners(runs, PRIORS[name].owner)]
    slopes = linear.slopes[list(chosen)]
    matrix = np.zeros((len(runs), len(columns)))
    for place, (name, owner) in enumerate(columns):
        of_constant = slopes[:, names.index(name)]
        if owner:
            kind = PRIORS[name].owner
            mine = np.array([run.owner(kind) == owner for run in runs])
            of_constant = of_constant * mine
        matrix[:, place] = of_constant
    start = np.array([_value(linear.at, *column) for column in columns])
    centre = np.array(
        [0.0 if owner else math.log(PRIORS[name].value) for name, owner in columns]
    )
    width = np.array(
        [
            PRIORS[name].owner_width if owner else PRIORS[name].width
            for name, owner in columns
        ]
    )
    errors = linear.errors[list(chosen)]
    point = _reweighted(matrix, errors, weights, start, centre, width)
    return _pooled(columns, point)


def _reweighted(
    matrix: Floats,
    errors: Floats,
    weights: Floats,
    start: Floats,
    centre: Floats,
    width: Floats,
) -> Floats:
    """Minimise soft L1 of the errors and the squares of the priors."""
    point = start
    for _ in range(REWEIGHTINGS):
        left = errors + matrix @ (point - start)
        soft = weights / SIGMA / (1 + (left / SIGMA) ** 2) ** 0.25
        scaled = matrix * soft[:, None]
        target = soft * (matrix @ start - errors)
        system = np.vstack([scaled, np.diag(1 / width)])
        wanted = np.concatenate([target, centre / width])
        point = np.linalg.lstsq(system, wanted, rcond=None)[0]
    return np.asarray(point)


def _weights(runs: Sequence[Timed]) -> Floats:
    counts = Counter(run.source for run in runs)
    return np.array(
        [math.sqrt(min(1.0, MOST_ROWS / counts[run.source])) for run in runs]
    )


def _owners(runs: Sequence[Timed], kind: Owner) -> list[str]:
    counts = Counter(run.owner(kind) for run in runs)
    return [owner for owner, rows in counts.items() if rows >= LEAST_ROWS]


def _value(at: Pooled, name: str, owner: str) -> float:
    if owner:
        return at.offsets.get(name, {}).get(owner, 0.0)
    return math.log(at.constants[name])


def _pooled(columns: Sequence[tuple[str, str]], point: Floats) -> Pooled:
    constants: dict[str, float] = {}
    offsets: dict[str, dict[str, float]] = {}
    for (name, owner), value in zip(columns, point, strict=True):
        if owner:
            offsets.setdefault(name, {})[owner] = float(value)
        else:
            prior = PRIORS[name]
            bounded = min(max(math.exp(float(value)), prior.least), prior.most)
            constants[name] = bounded
    return Pooled(constants, offsets)


def fit(
    runs: Sequence[Timed],
    *,
    iterations: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Pooled, Linear]:
    """Return the fitted constants, and the last linearisation."""
    at = unfitted()
    linear = linearise(runs, at)
    for iteration in range(iterations):
        at = solve(linear, range(len(runs)))
        if progress:
            progress(iteration + 1, iterations)
        linear = linearise(runs, at)
    return at, linear


def hold_out(linear: Linear) -> dict[str, Pooled]:
    """Return the constants that the runs of all other sources give, by source."""
    sources = dict.fromkeys(run.source for run in linear.runs)
    found = {}
    for source in sources:
        others = [
            place for place, run in enumerate(linear.runs) if run.source != source
        ]
        found[source] = solve(linear, others)
    return found
