"""Plans: create, list, read, delete, and report measured runs."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from planner.api.calibration import stored_run
from planner.api.dependencies import (
    ClientDependency,
    PlanId,
    ResultDependency,
    RootDependency,
    Services,
    ServicesDependency,
    StoredResult,
    Wait,
    WaitDependency,
    stored_result,
)
from planner.api.documents import (
    Explanation,
    MeasurementList,
    PageQuery,
    PlanCreate,
    StageMap,
)
from planner.api.errors import JobCancelledError, NotFoundError
from planner.api.http.bodies import DocumentRoute
from planner.api.http.body_errors import document_as_sent, errors_as_sent, long_form
from planner.api.http.caching import (
    FOREVER,
    NOT_MODIFIED,
    REVALIDATE,
    cacheable,
    check_if_match,
    tag_of,
)
from planner.api.http.cursors import read_page
from planner.api.http.links import root_of
from planner.api.http.problems import response_of
from planner.api.planning import RETRY_AFTER, RETRY_SECONDS, find_or_submit, result_of
from planner.api.solving.jobs import view_of
from planner.api.storage.store import LARGEST_INTEGER, JobRow, MeasurementRow, PlanRow
from planner.api.timeline import TimelineQuery, pictured, predicted_step, traced
from planner.errors import DocumentError, MismatchError
from planner.spec import Infeasible, MeasuredRun, Plan
from planner.spec.answers import JobView, MeasurementView, PlanPage, PlanSummary

logger = logging.getLogger("planner.api")

router = APIRouter(prefix="/v1/plans", tags=["plans"], route_class=DocumentRoute)

JSON = "application/json"
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {
        "model": JobView,
        "description": "The search is still running: follow the job.",
        "headers": {
            "Location": {"description": "The job.", "schema": {"type": "string"}},
            "Retry-After": RETRY_AFTER,
        },
    }
}
PICTURE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/svg+xml": {}}},
    **NOT_MODIFIED,
}


@router.post("", response_model=Plan | Infeasible, responses=ACCEPTED)
async def create_plan(
    body: PlanCreate,
    request: Request,
    parts: ServicesDependency,
    client: ClientDependency,
    wait: WaitDependency,
) -> Response:
    """Find the fastest plan that fits in memory. Send `model`, `devices`, `batch` and
    `sequence`, or documents: one of `model`, `profile` and `profile_id`, with `cluster`
    and `job`.

    A known plan is returned at once. Otherwise the service searches, waits as long as
    ``Prefer: wait=N`` says, and then answers 202 with the job. The plan's id is the
    sha256 of the canonical request, so that equal requests share one search.

    If no layout fits in memory the answer has status `infeasible`, with the reasons and
    the layouts that come closest.
    """
    with errors_as_sent(body):
        found = await find_or_submit(parts, long_form(body), client)
    if isinstance(found, StoredResult):
        return _answer(request, found, cache="hit")
    job = await parts.jobs.finished(found.id, wait.seconds)
    return await run_in_threadpool(_after_wait, request, parts, job, wait, body)


@router.get("")
def list_plans(
    parts: ServicesDependency,
    root: RootDependency,
    query: Annotated[PageQuery, Query()],
) -> PlanPage:
    """List plans, newest first; `next` is the cursor of the next page."""
    rows, cursor = read_page(parts.store.plans, query.cursor, query.limit)
    return PlanPage(plans=tuple(_summary(row, root) for row in rows), next=cursor)


@router.get("/{plan_id}", response_model=Plan | Infeasible, responses=NOT_MODIFIED)
def get_plan(plan_id: PlanId, request: Request, parts: ServicesDependency) -> Response:
    """Return a plan, or the reasons why no layout fits in memory."""
    return _answer(request, stored_result(plan_id, parts), cache="hit")


@router.delete("/{plan_id}", status_code=204, response_class=Response)
def delete_plan(
    request: Request, result: ResultDependency, parts: ServicesDependency
) -> None:
    """Delete a plan with its measured runs and finished jobs."""
    check_if_match(request, tag_of(result.document.encode()))
    parts.store.delete_plan(result.row.id)
    logger.info("plan %s: deleted", result.row.id)


@router.get("/{plan_id}/stage-map", response_model=StageMap, responses=NOT_MODIFIED)
def get_stage_map(request: Request, result: ResultDependency) -> Response:
    """Return the layers of every pipeline stage and the stage of every rank."""
    plan = result.plan()
    stage_map = StageMap(
        plan_id=plan.id,
        runtime=plan.request.job.runtime,
        layout=plan.layout,
        micro_batches=plan.micro_batches,
        stages=plan.stages,
        placement=plan.placement,
    )
    return cacheable(
        request, stage_map.model_dump_json(), media_type=JSON, cache_control=REVALIDATE
    )


@router.get(
    "/{plan_id}/timeline.json", response_class=JSONResponse, responses=NOT_MODIFIED
)
def get_timeline_json(
    request: Request,
    result: ResultDependency,
    parts: ServicesDependency,
    query: Annotated[TimelineQuery, Query()],
) -> Response:
    """Return one predicted step as a Chrome trace, for ui.perfetto.dev.

    A large step has three windows: first, steady and last micro-batches. The query moves
    the window. Clients that accept gzip get the trace compressed.
    """
    from planner.schedule.timeline import chrome_trace

    profile = parts.profiles.get(result.row.profile_id)
    step = predicted_step(result.plan(), profile)
    return cacheable(
        request,
        json.dumps(chrome_trace(traced(step, query))),
        media_type=JSON,
        cache_control=REVALIDATE,
        is_large=True,
    )


@router.get("/{plan_id}/timeline.svg", response_class=Response, responses=PICTURE)
def get_timeline_svg(
    request: Request,
    result: ResultDependency,
    parts: ServicesDependency,
    query: Annotated[TimelineQuery, Query()],
) -> Response:
    """Return one predicted step as a picture.

    A large step is shown in three windows: first, steady and last micro-batches. The
    query moves the window.
    """
    from planner.schedule.timeline import svg

    profile = parts.profiles.get(result.row.profile_id)
    step = predicted_step(result.plan(), profile)
    return cacheable(
        request,
        svg(pictured(step, query)),
        media_type="image/svg+xml",
        cache_control=REVALIDATE,
        is_large=True,
    )


@router.get(
    "/{plan_id}/explanation", response_model=Explanation, responses=NOT_MODIFIED
)
def get_explanation(request: Request, result: ResultDependency) -> Response:
    """Return why the plan is the best, how far that is proven, and the alternatives."""
    plan = result.plan()
    explanation = Explanation(
        plan_id=plan.id,
        runtime=plan.request.job.runtime,
        explanation=plan.explanation,
        search=plan.search,
        alternatives=plan.alternatives,
        cost_per_token=plan.cost_per_token,
        pareto=plan.pareto,
        relaxations=plan.relaxations,
        sensitivity=plan.sensitivity,
    )
    return cacheable(
        request,
        explanation.model_dump_json(),
        media_type=JSON,
        cache_control=REVALIDATE,
    )


@router.post("/{plan_id}/measurements", status_code=201)
def create_measurement(
    body: MeasuredRun,
    response: Response,
    result: ResultDependency,
    parts: ServicesDependency,
    root: RootDependency,
) -> MeasurementView:
    """Store a measured run of the plan: the measured.json of `planner run`."""
    plan = result.plan()
    if body.plan_id != plan.id:
        raise MismatchError(
            f"the run is of plan {body.plan_id!r}, not of {plan.id!r}.",
            field="plan_id",
            hint=f"send it to /v1/plans/{body.plan_id}/measurements.",
        )
    if not body.ranks and not body.unfinished:
        raise DocumentError(
            "the run is complete, and has no rank.",
            field="ranks",
            hint="send memory and communication of every rank, as `planner run` does.",
        )
    view = _measurement_view(
        parts.store.add_measurement(plan.id, body.model_dump_json()), result.row, root
    )
    response.headers["Location"] = f"/v1/plans/{plan.id}/measurements/{view.id}"
    return view


@router.get("/{plan_id}/measurements")
def list_measurements(
    result: ResultDependency, parts: ServicesDependency, root: RootDependency
) -> MeasurementList:
    """List the measured runs of a plan, newest first, with the error of the prediction."""
    result.check_feasible()
    rows = parts.store.measurements(result.row.id)
    return MeasurementList(
        measurements=tuple(_measurement_view(row, result.row, root) for row in rows)
    )


@router.get(
    "/{plan_id}/measurements/{measurement_id}",
    response_model=MeasuredRun,
    responses=NOT_MODIFIED,
)
def get_measurement(
    measurement_id: Annotated[
        int, Path(ge=1, le=LARGEST_INTEGER, description="Number of the run.")
    ],
    request: Request,
    result: ResultDependency,
    parts: ServicesDependency,
) -> Response:
    """Return a measured run as it was sent."""
    row = parts.store.measurement(result.row.id, measurement_id)
    if row is None:
        raise NotFoundError(
            f"plan {result.row.id} has no measurement {measurement_id}.",
            field="measurement_id",
            hint=f"GET /v1/plans/{result.row.id}/measurements lists all.",
        )
    return cacheable(request, row.document, media_type=JSON, cache_control=FOREVER)


def _after_wait(
    request: Request, parts: Services, job: JobRow, wait: Wait, body: PlanCreate
) -> Response:
    """The answer at the end of the wait: a plan, a problem, or 202 with the job."""
    result = result_of(parts, job)
    if result is not None:
        return _answer(request, result, cache="fwd=miss; stored")
    if job.status in ("succeeded", "infeasible"):
        raise NotFoundError(
            f"plan {job.plan_id} was deleted in the meantime.",
            hint="send the request again.",
        )
    if job.status == "cancelled":
        raise JobCancelledError(
            f"job {job.id} was cancelled by a client.", hint="send the request again."
        )
    view = view_of(job, root_of(request.scope))
    if job.status == "failed":
        assert view.problem is not None
        parts.metrics.problems.labels(code=view.problem.code).inc()
        problem = document_as_sent(body, view.problem)
        request_id = request.scope["request_id"]
        return response_of(problem.model_copy(update={"request_id": request_id}))
    headers = {"Location": f"/v1/jobs/{job.id}", "Retry-After": RETRY_SECONDS}
    if wait.applied:
        headers["Preference-Applied"] = wait.applied
    return Response(
        view.model_dump_json(), status_code=202, media_type=JSON, headers=headers
    )


def _answer(request: Request, result: StoredResult, *, cache: str) -> Response:
    """The stored document, byte by byte; final results never change."""
    response = cacheable(
        request,
        result.document,
        media_type=JSON,
        cache_control=FOREVER if result.row.final else REVALIDATE,
        location=f"/v1/plans/{result.row.id}",
    )
    response.headers["Cache-Status"] = f"planner; {cache}"  # RFC 9211
    return response


def _summary(row: PlanRow, root: str) -> PlanSummary:
    return PlanSummary(
        id=row.id,
        status=row.status,
        model=row.model,
        devices=row.devices,
        step_seconds=row.step_seconds,
        created_at=row.created_at,
        url=f"{root}/v1/plans/{row.id}",
    )


def _measurement_view(row: MeasurementRow, plan: PlanRow, root: str) -> MeasurementView:
    assert plan.step_seconds is not None
    run = stored_run(row.document)
    measured = None if run is None else run.median_step_seconds
    return MeasurementView(
        id=row.id,
        plan_id=row.plan_id,
        created_at=row.created_at,
        median_step_seconds=measured,
        predicted_step_seconds=plan.step_seconds,
        error=None if measured is None else measured / plan.step_seconds - 1,
        url=f"{root}/v1/plans/{row.plan_id}/measurements/{row.id}",
    )
