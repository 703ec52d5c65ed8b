"""`--server URL`: a service plans and predicts instead of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from planner.cli.options import option
from planner.profiler.resolve import Question
from planner.spec import (
    Forecast,
    Infeasible,
    Options,
    Plan,
    PlanRequest,
    PredictionLayout,
    digest,
)
from planner.spec.calibration import CalibrationTable
from planner.version import __version__

if TYPE_CHECKING:
    from planner.client import Client
    from planner.spec.answers import JobView

Function = TypeVar("Function", bound=Callable[..., Any])

QUEUE_SECONDS = 600.0
"""Longest wait for a search that other searches of the service precede."""


def server_option(function: Function) -> Function:
    """``--server URL``."""
    return option(
        "--server",
        metavar="URL",
        help="Service that does the work: `planner serve` [default: this process]",
    )(function)


def plan_by_server(
    address: str,
    question: Question,
    options: Options,
    calibration: CalibrationTable | None,
    on_progress: Callable[[JobView], None],
) -> Plan | Infeasible:
    """Return the plan that a service finds.

    Args:
        address: of the service.
        question: model, cluster and job.
        options: of the search.
        calibration: None: the one of the service's release.
        on_progress: is called about once a second while the search runs.

    Raises:
        PlannerError: the request is wrong, or the service cannot answer.
    """
    request = _request(question, options, calibration)
    timeout_seconds = options.time_limit_seconds + QUEUE_SECONDS
    with client_of(address) as client:
        return client.plan(
            request, timeout_seconds=timeout_seconds, on_progress=on_progress
        )


def predict_by_server(
    address: str,
    question: Question,
    layout: PredictionLayout,
    calibration: CalibrationTable | None,
) -> Forecast:
    """Return a service's prediction of one layout; errors as of `plan_by_server`."""
    request = _request(question, Options(), calibration)
    with client_of(address) as client:
        return client.predict(request, layout)


def client_of(address: str) -> Client:
    """Return a client of the service of ``--server``.

    Raises:
        DocumentError: this is no address.
    """
    from planner.client import Client, check_address

    check_address(address, option="--server")
    return Client(address)


def _request(
    question: Question, options: Options, calibration: CalibrationTable | None
) -> PlanRequest:
    return PlanRequest(
        model=question.model,
        profile_id=digest(question.profile),
        profile=None if question.model else question.profile,
        cluster=question.cluster,
        job=question.job,
        options=options,
        calibration=calibration,
        planner_version=__version__,
    )
