"""The page of a job: its progress, a button to cancel it, and then its plan."""

from __future__ import annotations

from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from planner.api.dependencies import JobDependency, ServicesDependency
from planner.api.errors import OutdatedError
from planner.api.pages.fields import answers_of
from planner.api.pages.rendering import page
from planner.api.solving.jobs import requested, view_of
from planner.api.storage.store import JobRow
from planner.spec.answers import FINISHED
from planner.spec.words import counted

router = APIRouter()

SEE_OTHER = 303


@router.get("/jobs/{job_id}", response_class=HTMLResponse)
async def show_job(job: JobDependency, request: Request) -> Response:
    """Progress of a job; once it has a result, redirect there."""
    view = view_of(job)
    if view.plan_url is not None:
        return RedirectResponse(f"/plans/{view.plan_id}", SEE_OTHER)
    asked = requested(job)
    answers = answers_of(asked)
    return page(
        request,
        "job.html",
        subject=subject(job),
        view=view,
        runtime=asked.job.runtime,
        finished=view.status in FINISHED,
        change=urlencode(answers or {}),
    )


@router.post("/jobs/{job_id}/cancel", response_class=RedirectResponse)
async def cancel(job: JobDependency, parts: ServicesDependency) -> RedirectResponse:
    """Cancel the job and show its page."""
    await parts.jobs.cancel(job.id)
    return RedirectResponse(f"/jobs/{job.id}", SEE_OTHER)


def subject(job: JobRow) -> str:
    """``gpt2 on 8 devices``; the id of the plan if the request is outdated."""
    try:
        request = requested(job)
    except OutdatedError:
        return f"plan {job.plan_id[:12]}"
    model = request.model or f"profile {request.profile_id[:12]}"
    return f"{model} on {counted(request.cluster.devices, 'device')}"
