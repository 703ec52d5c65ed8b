"""Predictions of measured runs, linear in the logarithms of the constants.

The slopes are finite differences of the cost model itself (`planner.cost.predict`), so
that the fit has no formula of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.calibrate.pooling import Linear, Owners, Pooled, Prior
from planner.cost.predict import (
    PricedRun,
    counted_bytes,
    data_format,
    priced_run,
)
from planner.errors import PlannerError
from planner.spec.calibration import Constants, pair_name
from planner.spec.devices import catalogue
from planner.spec.run import Run

STEP = 0.02
"""Of finite differences, in the logarithm of a constant."""
SIZE_SIGMA = 0.04
"""Relative error of a memory that counts as one unit."""
FITS_WEIGHT = 1.0
"""Of a decision to fit, relative to a measured memory."""

TIME: dict[str, Prior] = {
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
"""Constants of time. Bounds follow from physics: a fraction of a data sheet's figure is
at most one (but for errors of the sheet), the optimizer moves its states at least
once."""
MEMORY: dict[str, Prior] = {
    "allocated_factor": Prior(1.01, 0.01, "runtime", 0.14, 0.8, 1.5),
    "workspace_bytes": Prior(8e7, 0.3, "architecture", 0.3, 1e6, 2e9),
    "cached_fraction": Prior(0.15, 0.5, "runtime", 0.3, 1e-3, 1.0),
}
"""Constants of memory."""
FIXED = {"ring_copies": 1.0, "rail_fraction": 0.9}
"""Constants of time that are not fitted."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured run, priced, with the owners of its constants."""

    priced: PricedRun
    owners: Owners
    source: str
    use_time: bool
    use_memory: bool
    use_fit: bool

    @property
    def run(self) -> Run:
        """The run's document."""
        return self.priced.run

    def constants(self, times: Pooled, sizes: Pooled) -> Constants:
        """Return the constants of this run."""
        values = times.values(TIME, self.owners) | sizes.values(MEMORY, self.owners)
        return replace(Constants(), **FIXED, **values)


def measured_run(
    run: Run,
    *,
    source: str,
    use_time: bool = True,
    use_memory: bool = True,
    use_fit: bool = True,
) -> Measured | None:
    """Price a run; None: the cost model refuses its documents."""
    try:
        priced = priced_run(run)
        priced.memory(Constants())
    except PlannerError:
        return None
    known = catalogue().get(priced.work.device.id)
    architecture = known.architecture if known else ""
    runtime = priced.runtime.calibration_owner
    owners: Owners = {
        "architecture": architecture,
        "runtime": runtime,
        "format": data_format(priced),
        "source": source,
        "runtime x architecture": pair_name(runtime, architecture),
    }
    result = run.result
    has_time = result.step_seconds is not None and result.outcome == "ok"
    return Measured(
        priced=priced,
        owners=owners,
        source=source,
        use_time=use_time and has_time,
        use_memory=use_memory and result.memory_bytes is not None,
        use_fit=use_fit,
    )


def times(
    runs: Sequence[Measured], at: Pooled, progress: Callable[[int], None] | None = None
) -> Linear:
    """Return the errors of all step times, linear around a point."""
    rows = []
    for done, run in enumerate(runs, 1):
        rows.append(_time_row(run, at))
        if progress:
            progress(done)
    table = np.array(rows).reshape(len(runs), 1 + len(TIME))
    owners = [run.owners for run in runs]
    return Linear(TIME, owners, at, table[:, 0], table[:, 1:], np.ones(len(runs)))


def moved(linear: Linear, runs: Sequence[Measured], at: Pooled) -> Linear:
    """Return the errors of step times at another point, with the same slopes."""
    errors = [_time_error(run, at) for run in runs]
    return replace(linear, at=at, errors=np.array(errors))


def _time_error(run: Measured, at: Pooled) -> float:
    constants = replace(Constants(), **FIXED, **at.values(TIME, run.owners))
    measured = run.run.result.step_seconds
    assert measured is not None
    return math.log(run.priced.step_seconds(constants) / measured)


def _time_row(run: Measured, at: Pooled) -> list[float]:
    constants = replace(Constants(), **FIXED, **at.values(TIME, run.owners))
    measured = run.run.result.step_seconds
    assert measured is not None
    seconds = run.priced.step_seconds(constants)
    found = [math.log(seconds / measured)]
    for name in TIME:
        moved = getattr(constants, name) * math.exp(STEP)
        other = run.priced.step_seconds(replace(constants, **{name: moved}))
        found.append(math.log(other / seconds) / STEP)
    return found


def sizes(runs: Sequence[Measured], at: Pooled) -> Linear:
    """Return the errors of memories, and of decisions to fit, around a point.

    A decision that is right has no error; a wrong one is off by the logarithm of the
    predicted peak / the device's memory.
    """
    rows = []
    owners = []
    weights = []
    for run in runs:
        memory = _size_row(run, at)
        if run.use_memory:
            rows.append(memory.counted)
            owners.append(run.owners)
            weights.append(1.0)
        if run.use_fit:
            rows.append(_decision_row(run, memory.peak))
            owners.append(run.owners)
            weights.append(FITS_WEIGHT)
    table = np.array(rows).reshape(len(rows), 1 + len(MEMORY))
    return Linear(
        priors=MEMORY,
        owners=owners,
        at=at,
        errors=table[:, 0],
        slopes=table[:, 1:],
        weights=np.array(weights),
        sigma=SIZE_SIGMA,
    )


@dataclass(frozen=True, slots=True)
class _SizeRow:
    """Errors and slopes of what was counted, and of the peak / the device's memory."""

    counted: list[float]
    peak: list[float]


def _size_row(run: Measured, at: Pooled) -> _SizeRow:
    result = run.run.result
    values = at.values(MEMORY, run.owners)
    constants = replace(Constants(), **values)
    measured = float(result.memory_bytes or 1)
    device = float(run.priced.work.device.memory_bytes)
    base = _sizes_under(run, constants)
    counted = [math.log(base[0] / measured)]
    peak = [math.log(base[1] / device)]
    for name in MEMORY:
        moved = replace(constants, **{name: values[name] * math.exp(STEP)})
        other = _sizes_under(run, moved)
        counted.append(math.log(other[0] / base[0]) / STEP)
        peak.append(math.log(other[1] / base[1]) / STEP)
    return _SizeRow(counted, peak)


def _sizes_under(run: Measured, constants: Constants) -> tuple[float, float]:
    """Return the bytes that were counted, and the peak of the fullest rank."""
    result = run.run.result
    rows = run.priced.memory(constants)
    counted = counted_bytes(
        rows, result.memory_kind, result.memory_rank, constants.cached_fraction
    )
    return counted, float(max(row.peak_bytes for row in rows))


def _decision_row(run: Measured, peak: list[float]) -> list[float]:
    fits = peak[0] <= 0
    is_right = fits == (run.run.result.outcome == "ok")
    return [0.0] * len(peak) if is_right else peak
