"""Errors of predicted runs, by runtime and architecture, own runs apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.calibrate.own_runs import is_own
from planner.cost.predict import PricedRun, priced_run
from planner.errors import PlannerError
from planner.spec.calibration import CalibrationTable, constants_for
from planner.spec.cluster import Link
from planner.spec.devices import catalogue
from planner.spec.run import Run


@dataclass(frozen=True, slots=True)
class RunError:
    """Relative errors of one run: predicted / measured - 1."""

    name: str
    """Runtime and architecture, such as ``nemo on Hopper``."""
    time: float | None
    """None: no time was measured."""
    memory: float | None
    """None: no memory was measured."""


@dataclass(frozen=True, slots=True)
class PricedRuns:
    """Runs that can be predicted, and why the others cannot."""

    runs: tuple[PricedRun, ...]
    left_out: tuple[str, ...]
    """Run and reason."""


def price_runs(
    runs: Sequence[Run], progress: Callable[[int, int], None] | None = None
) -> PricedRuns:
    """Read the documents of all runs.

    Args:
        runs: measured.
        progress: called with the number of runs read, and of all.
    """
    found = []
    left_out = []
    for done, run in enumerate(runs, 1):
        try:
            found.append(priced_run(run))
        except PlannerError as error:
            message = error.problems[0].message
            left_out.append(f"{run.source.name} {run.source.id}: {message}")
        if progress:
            progress(done, len(runs))
    return PricedRuns(tuple(found), tuple(left_out))


def run_errors(
    runs: Iterable[PricedRun], calibration: CalibrationTable
) -> tuple[RunError, ...]:
    """Return the errors of all runs under the constants of a calibration."""
    return tuple(_error(run, calibration) for run in runs)


def by_name(errors: Iterable[RunError]) -> Mapping[str, list[RunError]]:
    """Return the errors by runtime and architecture, in order of the names."""
    found: dict[str, list[RunError]] = {}
    for error in errors:
        found.setdefault(error.name, []).append(error)
    return dict(sorted(found.items()))


def _error(priced: PricedRun, calibration: CalibrationTable) -> RunError:
    run = priced.run
    group = run.cluster.node_groups[0]
    architecture = architecture_of(priced)
    constants = constants_for(
        priced.runtime.calibration_owner,
        architecture,
        calibration=calibration,
        has_intra_node=_is_measured(group.intra_node),
        has_inter_node=_is_measured(group.inter_node),
    )
    predicted = priced.prediction(constants)
    name = f"{run.runtime.name} on {architecture}"
    if is_own(run):
        name = f"{name} (own runs)"
    result = run.result
    return RunError(
        name=name,
        time=_relative(predicted.timed_seconds, result.step_seconds),
        memory=_relative(predicted.memory_bytes, result.memory_bytes),
    )


def _is_measured(link: Link | None) -> bool:
    """Whether a link has the figures that collectives reach, not a data sheet's."""
    return link is not None and not link.is_nominal


def architecture_of(priced: PricedRun) -> str:
    """Return the architecture of a run's device; empty: not in the catalogue."""
    known = catalogue().get(priced.work.device.id)
    return known.architecture if known else ""


def _relative(predicted: float, measured: float | None) -> float | None:
    return None if measured is None else predicted / measured - 1
