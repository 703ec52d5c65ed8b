"""Errors of predicted runs, by runtime and architecture, own runs apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.calibrate.own_runs import is_own
from planner.cost.predict import predict_run
from planner.errors import PlannerError
from planner.spec.calibration import CalibrationTable
from planner.spec.devices import catalogue, find_device
from planner.spec.run import Run

Progress = Callable[[int, int], None]
"""Called with the number of runs predicted, and of all."""


@dataclass(frozen=True, slots=True)
class RunError:
    """Relative errors of one run: predicted / measured - 1."""

    run: Run
    time: float | None = None
    """None: no time was measured."""
    memory: float | None = None
    """None: no memory was measured."""
    failure: str = ""
    """Why the run cannot be predicted."""

    @property
    def name(self) -> str:
        """Runtime and architecture, such as ``nemo on Hopper``; own runs are named so."""
        group = self.run.cluster.node_groups[0]
        known = catalogue().get(find_device(group.device).id)
        architecture = known.architecture if known else "own device"
        name = f"{self.run.runtime.name} on {architecture}"
        return f"{name} (own runs)" if is_own(self.run) else name


def run_errors(
    runs: Sequence[Run],
    calibration: CalibrationTable,
    progress: Progress | None = None,
) -> tuple[RunError, ...]:
    """Return the errors of all runs under a calibration, in their order."""
    found = []
    for done, run in enumerate(runs, 1):
        found.append(_error(run, calibration))
        if progress:
            progress(done, len(runs))
    return tuple(found)


def by_name(errors: Iterable[RunError]) -> Mapping[str, list[RunError]]:
    """Return the errors by runtime and architecture, in order of the names."""
    found: dict[str, list[RunError]] = {}
    for error in errors:
        found.setdefault(error.name, []).append(error)
    return dict(sorted(found.items()))


def _error(run: Run, calibration: CalibrationTable) -> RunError:
    try:
        predicted = predict_run(run, calibration)
    except PlannerError as error:
        return RunError(run, failure=error.problems[0].message)
    result = run.result
    return RunError(
        run,
        time=_relative(predicted.timed_seconds, result.step_seconds),
        memory=_relative(predicted.memory_bytes, result.memory_bytes),
    )


def _relative(predicted: float, measured: float | None) -> float | None:
    return None if measured is None else predicted / measured - 1
