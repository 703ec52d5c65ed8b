"""Sweeps: the plans of models x clusters x batches as one table."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel

from planner.api.dependencies import (
    ClientDependency,
    Services,
    ServicesDependency,
    StoredResult,
    WaitDependency,
)
from planner.api.documents import LongPlanCreate
from planner.api.errors import OutdatedError, QueueFullError, TooManyJobsError
from planner.api.http.bodies import DocumentRoute
from planner.api.planning import RETRY_AFTER, RETRY_SECONDS, find_or_submit, result_of
from planner.api.storage.store import JobRow
from planner.errors import SpecError
from planner.spec.sweep import (
    Sweep,
    SweepPoint,
    SweepRow,
    SweepTable,
    pareto_rows,
    row_of,
)

router = APIRouter(prefix="/v1/sweeps", tags=["sweeps"], route_class=DocumentRoute)

UNFINISHED: dict[int | str, dict[str, Any]] = {
    202: {
        "model": SweepTable,
        "description": "Some searches still run or wait: send the same request again.",
        "headers": {"Retry-After": RETRY_AFTER},
    }
}


@router.post("", responses=UNFINISHED)
async def create_sweep(
    body: Sweep,
    response: Response,
    parts: ServicesDependency,
    client: ClientDependency,
    wait: WaitDependency,
) -> SweepTable:
    """Plan every model on every cluster with every batch, and mark the Pareto front.

    Known plans are in the table at once. The others are searched as jobs of the client,
    as many as it may have; the service waits for them as long as ``Prefer: wait=N`` says.
    The answer is 202 until all have ended: the same request again queues the next ones.
    A sweep is no resource of its own: its rows are plans and jobs.
    """
    deadline = time.monotonic() + wait.seconds
    points = [(point, _request(body, point)) for point in body.points()]
    found = [await _find(parts, request, client) for _, request in points]
    rows = []
    for (point, _), result in zip(points, found, strict=True):
        if isinstance(result, JobRow):
            left_seconds = max(0.0, deadline - time.monotonic())
            result = await parts.jobs.finished(result.id, left_seconds)
        rows.append(await run_in_threadpool(_row, parts, point, result))
    finished = all(row.status not in ("waiting", "queued", "running") for row in rows)
    if not finished:
        response.status_code = 202
        response.headers["Retry-After"] = RETRY_SECONDS
    return SweepTable(rows=tuple(rows), pareto=pareto_rows(rows), finished=finished)


def _request(sweep: Sweep, point: SweepPoint) -> LongPlanCreate:
    return LongPlanCreate(
        model=point.model,
        cluster=point.cluster,
        job=point.job,
        options=sweep.options,
    )


Found = StoredResult | JobRow | SpecError | None
"""A result, the job that searches for it, why there is none, or None: not queued yet."""


async def _find(parts: Services, request: LongPlanCreate, client: str) -> Found:
    try:
        return await find_or_submit(parts, request, client, repeat_failed=False)
    except SpecError as error:
        return error
    except (QueueFullError, TooManyJobsError):
        return None


def _row(parts: Services, point: SweepPoint, found: Found) -> SweepRow:
    if found is None:
        return row_of(point, status="waiting")
    if isinstance(found, SpecError):
        return row_of(point, status="failed", reason=str(found))
    if isinstance(found, StoredResult):
        return _row_of_result(point, found)
    result = result_of(parts, found)
    if result is not None:
        return _row_of_result(point, result, job_id=found.id)
    job = {"plan_id": found.plan_id, "job_id": found.id}
    if found.status in ("succeeded", "infeasible"):
        return row_of(point, **job, status="failed", reason="the plan was deleted.")
    reason = _Problem.model_validate_json(found.problem or "{}").detail
    return row_of(point, **job, status=found.status, reason=reason)


def _row_of_result(
    point: SweepPoint, found: StoredResult, job_id: str | None = None
) -> SweepRow:
    known: dict[str, Any] = {"plan_id": found.row.id, "job_id": job_id}
    try:
        return row_of(point, **known, **_result(found))
    except OutdatedError as error:
        return row_of(point, **known, status="failed", reason=str(error))


def _result(found: StoredResult) -> dict[str, Any]:
    """The figures of a plan, or why no layout fits."""
    status = found.row.status
    if status == "infeasible":
        reasons = found.read(_Reasons).reasons
        return {"status": status, "reason": " ".join(reasons)}
    prediction = found.read(_Result).prediction
    return {
        "status": status,
        "step_seconds": prediction.step_seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "peak_bytes": max(row.peak_bytes for row in prediction.memory),
    }


# Parts of stored documents: 64 whole plans would be slow to read.


class _Memory(BaseModel):
    peak_bytes: int


class _Prediction(BaseModel):
    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    memory: list[_Memory]


class _Result(BaseModel):
    prediction: _Prediction


class _Reasons(BaseModel):
    reasons: list[str]


class _Problem(BaseModel):
    detail: str = ""
