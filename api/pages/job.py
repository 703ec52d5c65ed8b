"""The page of a job: its progress, a button to cancel it, and then its plan."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from planner.api.dependencies import JobDependency, ServicesDependency
from planner.api.documents import FINISHED, JobView
from planner.api.jobs import view_of
from planner.api.pages.html import Node, link, moment, page, pairs, section, tag
from planner.api.pages.problem import problem_text
from planner.api.store import JobRow
from planner.spec import PlanRequest
from planner.spec.units import percent, seconds
from planner.spec.words import counted

router = APIRouter()

REFRESH_SECONDS = 2
SEE_OTHER = 303


@router.get("/jobs/{job_id}", response_class=HTMLResponse)
async def show_job(job: JobDependency, request: Request) -> Response:
    """Progress of a job; once it has a result, redirect there."""
    view = view_of(job)
    if view.plan_url is not None:
        return RedirectResponse(f"/plans/{view.plan_id}", SEE_OTHER)
    refresh = None if view.status in FINISHED else REFRESH_SECONDS
    return page(
        request,
        f"{subject(job)}: {view.status}",
        *_content(view, runtime_of(job)),
        refresh_seconds=refresh,
    )


@router.post("/jobs/{job_id}/cancel", response_class=RedirectResponse)
async def cancel(job: JobDependency, parts: ServicesDependency) -> RedirectResponse:
    """Cancel the job and show its page."""
    await parts.jobs.cancel(job.id)
    return RedirectResponse(f"/jobs/{job.id}", SEE_OTHER)


def subject(job: JobRow) -> str:
    """``gpt2 on 8 devices``."""
    request = PlanRequest.model_validate_json(job.request)
    model = request.model or f"profile {request.profile_id[:12]}"
    return f"{model} on {counted(request.cluster.devices, 'device')}"


def runtime_of(job: JobRow) -> str:
    """Framework that the plan of a job is for."""
    return PlanRequest.model_validate_json(job.request).job.runtime


def _content(view: JobView, runtime: str) -> Iterator[Node]:
    yield pairs(_facts(view, runtime))
    if view.problem is not None:
        yield section("Why it failed", problem_text(view.problem))
    if view.status in FINISHED:
        yield tag("p", link("/plan", "New plan"))
        return
    yield tag(
        "p",
        f"This page refreshes every {REFRESH_SECONDS} seconds and then shows the plan.",
    )
    yield tag(
        "form",
        tag("button", "Cancel", type="submit"),
        method="post",
        action=f"/jobs/{view.id}/cancel",
    )
    yield tag(
        "p",
        "Clients that requested the same plan share this job; cancelling affects them.",
        class_="hint",
    )


def _facts(view: JobView, runtime: str) -> Iterator[tuple[Node, Node]]:
    yield "Status", tag("strong", view.status)
    yield "Runtime", runtime
    yield "Plan", tag("code", view.plan_id)
    if view.progress is not None:
        done = f"{view.progress.layouts_done} of {view.progress.layouts_considered} layouts"
        yield "Progress", f"{done} after {seconds(view.progress.elapsed_seconds)}"
    if view.incumbent is not None:
        yield "Best step so far", seconds(view.incumbent)
    if view.bound is not None:
        yield "Lower bound", seconds(view.bound)
    if view.gap is not None:
        yield "Gap", percent(view.gap)
    for label, text in (
        ("Requested", view.created_at),
        ("Started", view.started_at),
        ("Finished", view.finished_at),
    ):
        if text is not None:
            yield label, moment(text)
