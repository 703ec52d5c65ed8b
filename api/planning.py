"""From a request to its plan or prediction."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from planner.api.calibration import calibration_of, fit_task
from planner.api.dependencies import Services, StoredResult
from planner.api.documents import LongPlanCreate, LongPredictionCreate
from planner.api.errors import LimitError, NotReadyError
from planner.api.profiles import ResolvedProfile
from planner.api.solving.solver import PredictTask
from planner.api.storage.store import JobRow, PlanRow
from planner.spec import CalibrationTable, Forecast, Options, PlanRequest

Result = TypeVar("Result")

RETRY_SECONDS = "1"
RETRY_AFTER: dict[str, Any] = {
    "description": "Seconds to wait before the next request.",
    "schema": {"type": "integer"},
}
"""The header of an unfinished answer, for the OpenAPI document."""


async def find_or_submit(
    parts: Services,
    request: LongPlanCreate,
    client: str,
    *,
    repeat_failed: bool = True,
) -> StoredResult | JobRow:
    """The result if it is known and final, else the job that searches for it.

    Args:
        parts: of the running service.
        request: from a client or from the form.
        client: who sent the request.
        repeat_failed: search again if the last search failed or was cancelled; False:
            return its job.

    Raises:
        SpecError: the request is wrong.
        LimitError: the request exceeds a limit of this service.
        QueueFullError: too many jobs are waiting.
        TooManyJobsError: this client has too many jobs.
    """
    profile, canonical, known = await run_in_threadpool(_look_up, request, parts)
    if known is not None and known[0].final:
        parts.metrics.count_known_plan()
        return StoredResult(*known)
    if not repeat_failed:
        last = await run_in_threadpool(parts.store.last_job, canonical.id)
        if last is not None and last.status in ("failed", "cancelled"):
            return last
    await run_in_threadpool(parts.profiles.add, profile)
    job = await parts.jobs.submit(canonical, canonical.profile_id, client)
    # Counted after it has joined its job: a client that sees the count and cancels the
    # job cancels this request's job too.
    parts.metrics.plan_requests.inc()
    return job


def result_of(parts: Services, job: JobRow) -> StoredResult | None:
    """Return the stored result of a job; None: there is none, or it was deleted."""
    if job.status not in ("succeeded", "infeasible"):
        return None
    found = parts.store.plan(job.plan_id)
    return StoredResult(*found) if found else None


async def predict(
    parts: Services, request: LongPredictionCreate, client: str
) -> Forecast:
    """Time and memory of one layout. Cancelling the call ends the prediction.

    Raises:
        SpecError: the request is wrong.
        LimitError: the request exceeds a limit of this service.
        QueueFullError: too many predictions are waiting.
        TooManyJobsError: this client has too many predictions.
    """
    found = await run_in_threadpool(parts.profiles.resolve, request)
    calibration = await run_in_threadpool(calibration_of, request, parts.store)
    task = PredictTask(
        found.profile,
        request.cluster,
        request.job,
        request.layout,
        found.model,
        calibration,
    )
    answer = await parts.solvers.predict(lambda: task, client)
    assert isinstance(answer, Forecast)
    return answer


async def fit(parts: Services, name: str, client: str) -> CalibrationTable:
    """A calibration fitted to the stored runs. Cancelling the call ends the fit.

    Raises:
        DocumentError: no stored run can be used.
        LimitError: there are too many.
        QueueFullError: too many predictions are waiting.
        TooManyJobsError: this client has too many predictions.
    """
    make_task = partial(fit_task, name, parts.store, parts.profiles.get)
    answer = await parts.solvers.predict(make_task, client)
    assert isinstance(answer, CalibrationTable)
    return answer


async def while_connected(
    request: Request, work: Coroutine[Any, Any, Result]
) -> Result:
    """Do work for a client, and cancel it when the client closes its connection.

    Raises:
        NotReadyError: the work was cancelled; nobody receives this answer.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        finished = task.done()
        task.cancel()
    if not finished:
        raise NotReadyError("the client has closed its connection.")
    return task.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _look_up(
    request: LongPlanCreate, parts: Services
) -> tuple[ResolvedProfile, PlanRequest, tuple[PlanRow, str] | None]:
    """The profile, the canonical request, and its stored result if there is one."""
    profile, canonical = _canonical_request(request, parts)
    return profile, canonical, parts.store.plan(canonical.id)


def _canonical_request(
    request: LongPlanCreate, parts: Services
) -> tuple[ResolvedProfile, PlanRequest]:
    from planner.search import make_request

    options = _options_within_limits(request.options, parts)
    resolved = parts.profiles.resolve(request)
    canonical = make_request(
        resolved.profile,
        request.cluster,
        request.job,
        options,
        model=resolved.model,
        calibration=calibration_of(request, parts.store),
    )
    return resolved, canonical


def _options_within_limits(options: Options, parts: Services) -> Options:
    """The options, with the default time limit reduced to the service's limit.

    Raises:
        LimitError: the client sent a higher time limit.
    """
    limit = parts.settings.max_solver_seconds
    if options.time_limit_seconds <= limit:
        return options
    if "time_limit_seconds" not in options.model_fields_set:
        return options.model_copy(update={"time_limit_seconds": limit})
    raise LimitError(
        f"{options.time_limit_seconds:g} s is above this service's limit of {limit:g} s.",
        field="options.time_limit_seconds",
        hint=f"send at most {limit:g}.",
        limits={"max_solver_seconds": limit},
    )
