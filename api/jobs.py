"""Jobs: searches for plans, from the request to the stored result.

    submit -> queued -> running -> succeeded | infeasible | failed
                 or cancelled, from queued and running

Requests with the same plan id share one job. The database has the state of every job;
`Jobs` has what ends with the process: tasks, tickets of solver processes, and clients
that wait for events.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict
from functools import partial

from planner.api.documents import Answer, JobProgress, JobView, ProblemDocument
from planner.api.errors import InternalError, NotFoundError, SolverError
from planner.api.metrics import Metrics
from planner.api.problems import document_of
from planner.api.profiles import Profiles
from planner.api.settings import Settings
from planner.api.solver import PlanTask, Reported
from planner.api.solvers import Solvers, Ticket
from planner.api.store import EventRow, JobRow, PlanRow, Store, now
from planner.errors import PlannerError
from planner.spec import Infeasible, Plan, PlanRequest, canonical_json

logger = logging.getLogger("planner.api")

MAX_ATTEMPTS = 3
"""A job fails after the service has died during this many attempts."""


class Jobs:
    """The jobs of the service. All async methods belong to one event loop."""

    def __init__(
        self,
        store: Store,
        profiles: Profiles,
        solvers: Solvers,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._store, self._profiles, self._solvers = store, profiles, solvers
        self._settings, self._metrics = settings, metrics
        self._tickets: dict[str, Ticket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: dict[str, asyncio.Event] = {}
        self._submitting = asyncio.Lock()
        self._stopping = False

    async def start(self) -> None:
        """Continue the jobs that the previous process left."""
        for job in await asyncio.to_thread(self._store.unfinished_jobs):
            if job.attempts >= MAX_ATTEMPTS:
                error = SolverError(
                    f"the service died {job.attempts} times during this job.",
                    hint="report this error.",
                )
                self._store.finish(job.id, "failed", _problem_json(error))
                continue
            self._store.requeue(job.id)
            self._launch(job.id, self._solvers.admit("", beyond_limit=True))
            logger.info("job %s: queued again", job.id)

    async def stop(self) -> None:
        """Stop all solvers and answer waiting clients; unfinished jobs stay queued."""
        self._stopping = True
        await self._solvers.stop()
        await asyncio.gather(*self._tasks)

    async def submit(
        self, request: PlanRequest, profile_id: str, client: str
    ) -> JobRow:
        """The active job of the plan, or a new job, which counts for the client.

        Raises:
            QueueFullError: too many jobs are waiting.
            TooManyJobsError: the client has too many jobs.
        """
        plan_id = request.id
        async with self._submitting:  # otherwise equal requests could make two jobs
            active = await asyncio.to_thread(self._store.active_job, plan_id)
            if active is not None and active.id in self._tickets:
                return active
            job_id = active.id if active is not None else uuid.uuid4().hex
            text = canonical_json(
                request.model_dump(mode="json", by_alias=True, exclude={"profile"})
            )
            ticket = self._solvers.admit(client)
            try:
                if active is not None:  # its result could not be stored: run it again
                    await asyncio.to_thread(self._store.requeue, job_id)
                else:
                    add = partial(
                        self._store.add_job,
                        job_id,
                        plan_id=plan_id,
                        profile_id=profile_id,
                        request=text,
                    )
                    await asyncio.to_thread(add)
                self._launch(job_id, ticket)
            except BaseException:
                self._solvers.cancel(ticket)
                raise
        logger.info("job %s: queued for plan %s", job_id, plan_id)
        return self.get(job_id)

    def get(self, job_id: str) -> JobRow:
        """A job.

        Raises:
            NotFoundError: there is no such job.
        """
        job = self._store.job(job_id)
        if job is None:
            raise NotFoundError(
                f"there is no job {job_id!r}.",
                field="job_id",
                hint="request a plan with POST /v1/plans.",
            )
        return job

    async def cancel(self, job_id: str) -> None:
        """Cancel a job; does nothing if the job has finished."""
        self.get(job_id)
        if await asyncio.to_thread(self._store.finish, job_id, "cancelled"):
            self._metrics.solves.add(status="cancelled")
            logger.info("job %s: cancelled", job_id)
        ticket = self._tickets.get(job_id)
        if ticket is not None:
            self._solvers.cancel(ticket)
        self._wake(job_id)

    async def finished(self, job_id: str, seconds: float) -> JobRow:
        """The job when it has finished, or its state after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                news = self._news.get(job_id)
                while (
                    news is not None
                    and not self._stopping
                    and not self.get(job_id).finished
                ):
                    await news.wait()
                    news = self._news.get(job_id)
        except TimeoutError:
            pass
        return self.get(job_id)

    async def events(self, job_id: str, *, after: int) -> AsyncIterator[EventRow]:
        """Events after number `after`, as they happen, until the job or the service ends."""
        while True:
            # Read before the rows, so that no event is missed between the two.
            news = self._news.get(job_id)
            job = self.get(job_id)
            for event in self._store.events(job_id, after=after):
                after = event.number
                yield event
            if news is None or job.finished or self._stopping:
                return
            await news.wait()

    def _launch(self, job_id: str, ticket: Ticket) -> None:
        self._tickets[job_id] = ticket
        self._news[job_id] = asyncio.Event()
        task = asyncio.create_task(self._run(self.get(job_id), ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: JobRow, ticket: Ticket) -> None:
        """Run one job to its end, whatever happens."""
        try:
            await self._solve(job, ticket)
        except sqlite3.Error as error:
            # The row stays unfinished: the next request or start runs the job again.
            logger.error("job %s: its result could not be stored: %s", job.id, error)
        finally:
            del self._tickets[job.id]
            self._wake(job.id)
            del self._news[job.id]

    async def _solve(self, job: JobRow, ticket: Ticket) -> None:
        try:
            request = PlanRequest.model_validate_json(job.request)
            answer = await self._solvers.run(
                ticket,
                partial(self._begin, job, request, asyncio.get_running_loop()),
                seconds=request.options.time_limit_seconds
                + self._settings.solver_grace_seconds,
                on_progress=partial(self._note, job, asyncio.get_running_loop()),
            )
            await asyncio.to_thread(self._end, job, request, answer)
        except PlannerError as error:
            await asyncio.to_thread(self._fail, job, error)
        except sqlite3.Error:
            raise
        except Exception:
            logger.exception("job %s: an unexpected error", job.id)
            await asyncio.to_thread(
                self._fail,
                job,
                InternalError("an unexpected error.", hint="report this error."),
            )

    def _begin(
        self, job: JobRow, request: PlanRequest, loop: asyncio.AbstractEventLoop
    ) -> PlanTask | None:
        """Start a job, in a thread of the solvers; None if the job was cancelled."""
        profile = self._profiles.get(job.profile_id)
        if not self._store.start_job(job.id):
            return None
        loop.call_soon_threadsafe(self._wake, job.id)
        logger.info("job %s: started", job.id)
        if request.model is None:  # the stored request has no profile
            request = request.model_copy(update={"profile": profile})
        return PlanTask(request, profile)

    def _note(
        self, job: JobRow, loop: asyncio.AbstractEventLoop, report: Reported
    ) -> None:
        """Store the progress of a job, in a thread of the solvers."""
        self._store.progress(
            job.id,
            "incumbent" if report.improved else "progress",
            json.dumps(asdict(report)),
        )
        loop.call_soon_threadsafe(self._wake, job.id)

    def _end(self, job: JobRow, request: PlanRequest, answer: Answer | None) -> None:
        if answer is None:  # cancelled, or the service is stopping
            if self._stopping:
                self._store.requeue(job.id, uncounted=True)
            return
        if not isinstance(answer, Plan | Infeasible) or (
            isinstance(answer, Plan) and answer.id != job.plan_id
        ):
            raise TypeError(
                f"job of plan {job.plan_id} returned {getattr(answer, 'id', answer)!r}"
            )
        row = _plan_row(job, request, self._profiles.get(job.profile_id).model, answer)
        if self._store.finish_with_result(
            job, row, answer.model_dump_json(by_alias=True)
        ):
            self._metrics.solves.add(status=row.status)
            logger.info("job %s: %s, plan %s", job.id, row.status, row.id)

    def _fail(self, job: JobRow, error: PlannerError) -> None:
        if self._store.finish(job.id, "failed", _problem_json(error)):
            self._metrics.solves.add(status="failed")
            self._metrics.failures.add(code=error.code)
            logger.warning("job %s: failed: %s", job.id, error)

    def _wake(self, job_id: str) -> None:
        """Wake all clients that wait for events of a job."""
        news = self._news.get(job_id)
        if news is not None:
            self._news[job_id] = asyncio.Event()
            news.set()


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


def _plan_row(
    job: JobRow, request: PlanRequest, model: str, answer: Plan | Infeasible
) -> PlanRow:
    return PlanRow(
        number=0,  # assigned by the database
        id=job.plan_id,
        profile_id=job.profile_id,
        status="succeeded" if isinstance(answer, Plan) else "infeasible",
        model=model,
        devices=request.cluster.devices,
        step_seconds=answer.prediction.step_seconds
        if isinstance(answer, Plan)
        else None,
        final=isinstance(answer, Plan)
        or answer.search is None
        or answer.search.optimal,
        created_at=now(),
    )


def _problem_json(error: PlannerError) -> str:
    return document_of(error).model_dump_json(exclude_none=True)
