"""Stored calibrations, and stored runs to fit them to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pydantic import ValidationError

from planner.api.documents import LongPlanCreate, LongPredictionCreate
from planner.api.errors import LimitError, NotFoundError
from planner.api.limits import LONGEST_NAME, MOST_FITTED_RUNS
from planner.api.solving.solver import FitTask
from planner.api.storage.store import CalibrationRow, Store
from planner.api.storage.stored import read_stored
from planner.calibrate.own_runs import own_run
from planner.errors import DocumentError, PlannerError
from planner.spec import (
    CalibrationTable,
    MeasuredRun,
    ModelProfile,
    Plan,
    Run,
    digest,
)

Request = LongPlanCreate | LongPredictionCreate
ProfileOf = Callable[[str], ModelProfile]
"""Returns the profile with this id."""


FIT_AGAIN = "fit it again: planner calibrate."


def calibration_of(request: Request, store: Store) -> CalibrationTable | None:
    """The calibration of a request; None: that of this release.

    Raises:
        NotFoundError: there is no calibration with this id.
        OutdatedError: an earlier version stored it, and this one refuses it.
    """
    if request.calibration_id is None:
        return request.calibration
    _, document = stored_calibration(store, request.calibration_id)
    name = f"the calibration {request.calibration_id}"
    return read_stored(CalibrationTable, document, name=name, hint=FIT_AGAIN)


def stored_calibration(store: Store, calibration_id: str) -> tuple[CalibrationRow, str]:
    """A stored calibration and its JSON.

    Raises:
        NotFoundError: there is no calibration with this id.
    """
    found = store.calibration(calibration_id)
    if found is None:
        raise NotFoundError(
            f"there is no calibration {calibration_id!r}.",
            field="calibration_id",
            hint="GET /v1/calibrations lists all.",
        )
    return found


def add_calibration(store: Store, table: CalibrationTable) -> tuple[str, bool]:
    """Store a calibration.

    Returns:
        Its id, and whether it was not stored before.

    Raises:
        LimitError: its name is too long.
    """
    if len(table.name) > LONGEST_NAME:
        raise LimitError(
            f"the name has {len(table.name)} characters.",
            field="name",
            hint=f"send at most {LONGEST_NAME}.",
            limits={"max_name_characters": LONGEST_NAME},
        )
    calibration_id = digest(table)
    is_new = store.add_calibration(
        calibration_id,
        name=table.name,
        measured_runs=table.measured_runs,
        document=table.canonical_json(),
    )
    return calibration_id, is_new


def fit_task(name: str, store: Store, profile_of: ProfileOf) -> FitTask:
    """The fit of a calibration to all stored runs.

    Raises:
        DocumentError: no stored run can be used.
        LimitError: there are too many.
    """
    runs = tuple(stored_runs(store.measured_plans(), profile_of))
    if not runs:
        raise DocumentError(
            "this service has no measured run that a calibration can be fitted to.",
            hint="report runs of decoders: POST /v1/plans/{id}/measurements.",
        )
    if len(runs) > MOST_FITTED_RUNS:
        raise LimitError(
            f"this service has {len(runs)} measured runs.",
            hint="fit elsewhere, with planner calibrate --runs URL, and send the result.",
            limits={"max_fitted_runs": MOST_FITTED_RUNS},
        )
    return FitTask(runs, name)


def stored_runs(
    measured: Iterable[tuple[int, str, str]], profile_of: ProfileOf
) -> Iterator[Run]:
    """Yield every measured run that calibration can use.

    Args:
        measured: number, plan.json and measured.json of each run.
        profile_of: finds a profile by its id.
    """
    for number, plan_text, run_text in measured:
        run = stored_run(run_text)
        if run is None:
            continue
        try:
            plan = Plan.model_validate_json(plan_text)
            profile = plan.request.profile or profile_of(plan.request.profile_id)
            yield own_run(plan, run, profile, name=f"measurement-{number}")
        except (PlannerError, ValidationError):
            continue  # not predictable from sizes, or its profile was deleted


def stored_run(document: str) -> MeasuredRun | None:
    """A stored run; None if it was stored by a version that accepted other values."""
    try:
        return MeasuredRun.model_validate_json(document)
    except ValidationError:
        return None
