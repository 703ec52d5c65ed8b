"""Stored runs as run documents, for `planner calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pydantic import ValidationError

from planner.calibrate.own_runs import own_run
from planner.errors import PlannerError
from planner.spec import MeasuredRun, ModelProfile, Plan, Run

ProfileOf = Callable[[str], ModelProfile]
"""Returns the profile with this id."""


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
