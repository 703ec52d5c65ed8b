"""The page of a job: how far it is, and a button to cancel it; it leads to the plan."""

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
    """How far a solve is; of one that has a result, the way to it."""
    view = view_of(job)
    if view.plan_url is not None:
        return RedirectResponse(f"/plans/{view.plan_id}", SEE_OTHER)
    refresh = None if view.status in FINISHED else REFRESH_SECONDS
    return page(
        request,
        f"{subject(job)}: {view.status}",
        *_content(view),
        refresh_seconds=refresh,
    )


@router.post("/jobs/{job_id}/cancel", response_class=RedirectResponse)
async def cancel(job: JobDependency, parts: ServicesDependency) -> RedirectResponse:
    """Cancel the solve, and show that."""
    await parts.jobs.cancel(job.id)
    return RedirectResponse(f"/jobs/{job.id}", SEE_OTHER)


def subject(job: JobRow) -> str:
    """``gpt2 on 8 devices``."""
    wanted = PlanRequest.model_validate_json(job.request)
    return f"{wanted.model or f'profile {wanted.profile_id[:12]}'} on {counted(wanted.cluster.devices, 'device')}"


def _content(view: JobView) -> Iterator[Node]:
    yield pairs(_facts(view))
    if view.problem is not None:
        yield section("Why it failed", problem_text(view.problem))
    if view.status in FINISHED:
        yield tag("p", link("/plan", "Ask again"))
        return
    yield tag(
        "p",
        f"This page asks again every {REFRESH_SECONDS} seconds, and leads to the plan.",
    )
    yield tag(
        "form",
        tag("button", "Cancel", type="submit"),
        method="post",
        action=f"/jobs/{view.id}/cancel",
    )
    yield tag(
        "p",
        "All who asked for this plan share the job, and lose it when it is cancelled.",
        class_="hint",
    )


def _facts(view: JobView) -> Iterator[tuple[Node, Node]]:
    yield "Status", tag("strong", view.status)
    yield "Plan", tag("code", view.plan_id)
    if view.progress is not None:
        done = f"{view.progress.layouts_done} of {view.progress.layouts_considered} layouts"
        yield "Progress", f"{done} after {seconds(view.progress.elapsed_seconds)}"
    if view.incumbent is not None:
        yield "Best step so far", seconds(view.incumbent)
    if view.bound is not None:
        yield "No plan is faster than", seconds(view.bound)
    if view.gap is not None:
        yield "Gap", percent(view.gap)
    for words, text in (
        ("Asked for", view.created_at),
        ("Begun", view.started_at),
        ("Ended", view.finished_at),
    ):
        if text is not None:
            yield words, moment(text)
