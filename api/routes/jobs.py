"""Jobs: progress, events, and cancellation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from fastapi import APIRouter, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from planner.api.dependencies import (
    JobDependency,
    LastEventDependency,
    RootDependency,
    ServicesDependency,
)
from planner.api.solving.jobs import view_of
from planner.spec.answers import JobView

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

RECONNECT_MILLISECONDS = 1000


@router.get("/{job_id}")
async def get_job(job: JobDependency, root: RootDependency) -> JobView:
    """Return the status of a job, the best step time so far, and the lower bound."""
    return view_of(job, root)


@router.get("/{job_id}/events", response_class=EventSourceResponse)
async def get_job_events(
    job: JobDependency, parts: ServicesDependency, last_event_id: LastEventDependency
) -> AsyncIterator[ServerSentEvent]:
    """Stream the events of a job: queued, started, incumbent, progress, done.

    The stream begins after ``Last-Event-ID``, or with the first event, and ends after
    `done`.
    """
    async for event in parts.jobs.events(job.id, after=last_event_id):
        yield ServerSentEvent(
            data=json.loads(event.data),
            event=event.name,
            id=str(event.number),
            retry=RECONNECT_MILLISECONDS,
        )


@router.delete("/{job_id}", status_code=204, response_class=Response)
async def cancel_job(job: JobDependency, parts: ServicesDependency) -> None:
    """Cancel a job, for all clients that share it; does nothing if the job has finished."""
    await parts.jobs.cancel(job.id)
