"""Jobs: searches for plans, from the request to the stored result.

    submit -> queued -> running -> succeeded | infeasible | failed
                 or cancelled, from queued and running

Requests with the same plan id share one job. The database has the state of every job; a
`Queue` brings it to a solver, of this process or of a worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Protocol

from sqlalchemy import Connection

from planner.api.errors import NotFoundError, NotReadyError
from planner.api.metrics import Metrics
from planner.api.solving.news import News
from planner.api.solving.solvers import Solvers
from planner.api.storage.store import EventRow, JobCounts, JobRow, Store
from planner.api.storage.stored import read_stored
from planner.spec import PlanRequest, canonical_json
from planner.spec.answers import JobProgress, JobView, ProblemDocument

logger = logging.getLogger("planner.api")


class Queue(Protocol):
    """Brings queued jobs to solvers."""

    async def start(self) -> None:
        """Continue the jobs that an earlier process left."""

    async def stop(self) -> None:
        """Stop; unfinished jobs stay queued."""

    def enqueue(self, connection: Connection, job: JobRow) -> None:
        """Add a job in the transaction that stores it."""

    def added(self, job: JobRow) -> None:
        """The job is stored."""

    def cancel(self, job_id: str) -> None:
        """Stop a job that is cancelled in the database."""

    @property
    def unstored(self) -> int:
        """Number of jobs whose end the database does not accept yet."""

    def free_slots(self, running: int) -> int:
        """How many jobs this process could start at once."""


class Jobs:
    """The jobs of the service. All async methods belong to one event loop."""

    def __init__(
        self,
        store: Store,
        queue: Queue,
        news: News,
        solvers: Solvers,
        metrics: Metrics,
    ) -> None:
        self._store, self._queue, self._news = store, queue, news
        self._solvers, self._metrics = solvers, metrics
        self._stopping = False

    async def start(self) -> None:
        """Continue the jobs that an earlier process left."""
        await self._queue.start()

    async def stop(self) -> None:
        """Stop all solvers and answer waiting clients; unfinished jobs stay queued."""
        self._stopping = True
        self._news.wake_all()
        await self._queue.stop()
        await self._solvers.stop()
        self._news.wake_all()

    @property
    def unstored(self) -> int:
        """Number of jobs of this process whose end the database does not accept yet."""
        return self._queue.unstored

    def counts(self) -> JobCounts:
        """Numbers of unfinished jobs, of all processes."""
        return self._store.job_counts()

    async def submit(
        self, request: PlanRequest, profile_id: str, client: str
    ) -> JobRow:
        """The active job of the plan, or a new job, which counts for the client.

        Raises:
            QueueFullError: too many jobs are waiting.
            TooManyJobsError: the client has too many jobs.
        """
        if self._stopping:
            raise NotReadyError(
                "the service is stopping.",
                hint="try again in a moment.",
                retry_after_seconds=1,
            )
        text = canonical_json(
            request.model_dump(mode="json", by_alias=True, exclude={"profile"})
        )
        job_id = uuid.uuid4().hex
        add = partial(
            self._store.add_job,
            job_id,
            plan_id=request.id,
            profile_id=profile_id,
            request=text,
            client=client,
            admit=partial(self._admit, client),
            enqueue=self._queue.enqueue,
        )
        # Shielded: a job that is stored must also start.
        return await asyncio.shield(self._add(job_id, add))

    async def _add(self, job_id: str, add: Callable[[], JobRow]) -> JobRow:
        job = await asyncio.to_thread(add)
        if job.id == job_id:
            logger.info("job %s: queued for plan %s", job.id, job.plan_id)
            self._queue.added(job)
        return job

    async def get(self, job_id: str) -> JobRow:
        """A job.

        Raises:
            NotFoundError: there is no such job.
        """
        job = await asyncio.to_thread(self._store.job, job_id)
        if job is None:
            raise NotFoundError(
                f"there is no job {job_id!r}.",
                field="job_id",
                hint="request a plan with POST /v1/plans.",
            )
        return job

    async def cancel(self, job_id: str) -> None:
        """Cancel a job; does nothing if the job has finished."""
        await self.get(job_id)
        if await asyncio.to_thread(self._store.finish, job_id, "cancelled"):
            self._metrics.solves.labels(status="cancelled").inc()
            logger.info("job %s: cancelled", job_id)
        self._queue.cancel(job_id)

    async def finished(self, job_id: str, seconds: float) -> JobRow:
        """The job when it has finished, or its state after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    news = self._news.next_of(job_id)
                    job = await self.get(job_id)
                    if job.finished or self._stopping:
                        return job
                    await news.wait()
        except TimeoutError:
            return await self.get(job_id)

    async def events(self, job_id: str, *, after: int) -> AsyncIterator[EventRow]:
        """Events after number `after`, as they happen, until the job or the service ends."""
        while True:
            news = self._news.next_of(job_id)
            job = await self.get(job_id)
            found = await asyncio.to_thread(self._store.events, job_id, after=after)
            for event in found:
                after = event.number
                yield event
            if job.finished or self._stopping:
                return
            await news.wait()

    def _admit(self, client: str, counts: JobCounts) -> None:
        free = self._queue.free_slots(counts.running)
        self._solvers.check_capacity(counts.queued, counts.running, free)
        self._solvers.check_share(client, counts.of_client)


def requested(job: JobRow) -> PlanRequest:
    """The request of a job, without its profile.

    Raises:
        OutdatedError: an earlier version stored it, and this one refuses it.
    """
    hint = "send the request again: POST /v1/plans."
    return read_stored(PlanRequest, job.request, name=f"the job {job.id}", hint=hint)


def view_of(job: JobRow, root: str = "") -> JobView:
    """The document of a job; `root` is the prefix of a reverse proxy."""
    progress = json.loads(job.progress) if job.progress else {}
    counts = {
        name: progress[name] for name in JobProgress.model_fields if name in progress
    }
    return JobView(
        id=job.id,
        status=job.status,
        plan_id=job.plan_id,
        plan_url=f"{root}/v1/plans/{job.plan_id}"
        if job.status in ("succeeded", "infeasible")
        else None,
        events_url=f"{root}/v1/jobs/{job.id}/events",
        progress=JobProgress(**counts) if counts else None,
        incumbent=progress.get("incumbent_seconds"),
        bound=progress.get("lower_bound_seconds"),
        gap=progress.get("gap"),
        problem=ProblemDocument.model_validate_json(job.problem)
        if job.problem
        else None,
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
    )
