"""Predict every run of a data set; a prediction that fails is an outcome too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from planner.fidelity.calibrations import Calibration, constants_for
from planner.fidelity.metrics import Outcome
from planner.fidelity.predict import predict_run
from planner.fidelity.remarks import PLAIN, Remarks, RowKey
from planner.fidelity.rows import Run
from planner.spec.calibration import DEFAULT, Constants
from planner.spec.devices import catalogue

Pair = tuple[str, str]
"""Framework and device architecture."""
ConstantsOf = Callable[[Run], Constants | None]
"""Constants that a run is predicted with; None: those that come with the package."""


def pair_of(run: Run) -> Pair:
    """Whose constants a run needs."""
    return run.framework.name, catalogue()[run.device].architecture


def shipped_constants(run: Run) -> Constants | None:
    """Those that come with the package."""
    return None


def constants_from(calibrations: tuple[Calibration, ...]) -> ConstantsOf:
    """Only what these calibrations hold, else the defaults: nothing that comes with the package."""
    return lambda run: (
        constants_for(*pair_of(run), calibrations) if calibrations else DEFAULT
    )


def outcomes(
    runs: Iterable[Run],
    remarks: Mapping[RowKey, Remarks],
    constants_of: ConstantsOf = shipped_constants,
    progress: Callable[[], None] | None = None,
) -> tuple[Outcome, ...]:
    """One outcome per run, in order.

    Args:
        runs: in scope.
        remarks: what is said about their figures.
        constants_of: what to predict each with.
        progress: called after each run.
    """
    found = []
    for run in runs:
        found.append(
            outcome(
                run, remarks.get((run.family, run.source_id), PLAIN), constants_of(run)
            )
        )
        if progress:
            progress()
    return tuple(found)


def outcome(
    run: Run, remarks: Remarks = PLAIN, constants: Constants | None = None
) -> Outcome:
    """Predict one run. Whatever its prediction raises is kept: it is a defect of the cost model, to be told."""
    try:
        return Outcome(run, predict_run(run, constants), remarks=remarks)
    except Exception as error:
        return Outcome(run, None, f"{type(error).__name__}: {error}", remarks)
