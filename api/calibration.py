"""Stored runs as run documents, for `planner calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

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
        plan = Plan.model_validate_json(plan_text)
        run = MeasuredRun.model_validate_json(run_text)
        try:
            profile = plan.request.profile or profile_of(plan.request.profile_id)
            yield own_run(plan, run, profile, name=f"measurement-{number}")
        except PlannerError:
            continue  # not predictable from sizes, or its profile was deleted
