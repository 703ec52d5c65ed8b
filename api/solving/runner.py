"""Runs stored jobs on the solvers of this process: the service's own, or a worker's."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from planner.api.documents import Answer
from planner.api.errors import InternalError, SolverError
from planner.api.http.problems import document_of
from planner.api.metrics import SolverMetrics
from planner.api.profiles import Profiles
from planner.api.settings import Settings
from planner.api.solving.jobs import requested
from planner.api.solving.solver import PlanTask, Reported
from planner.api.solving.solvers import Place, Solvers
from planner.api.storage.database import StoreError
from planner.api.storage.store import JobRow, PlanRow, Store, now
from planner.errors import PlannerError
from planner.spec import Infeasible, Plan, PlanRequest

logger = logging.getLogger("planner.api")

Result = TypeVar("Result")

MAX_DEATHS = 3
"""A job fails after this many processes died while they ran it alone, and one more for
every other job of which that is true."""
FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 15.0


class Runner:
    """Runs jobs, from their turn to the stored result. Belongs to one event loop."""

    def __init__(
        self,
        store: Store,
        profiles: Profiles,
        solvers: Solvers,
        settings: Settings,
        metrics: SolverMetrics,
    ) -> None:
        self._store, self._profiles, self._solvers = store, profiles, solvers
        self._settings, self._metrics = settings, metrics
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.unstored: set[str] = set()
        """Jobs whose start or end the database does not accept yet."""

    def start(self, job: JobRow) -> asyncio.Task[None]:
        """Run a queued job when its turn comes."""
        task = asyncio.create_task(self._run(job), name=f"job {job.id}")
        self._tasks[job.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job.id, None))
        return task

    def cancel(self, job_id: str) -> None:
        """Kill the process of a job that a client has cancelled, if it runs here."""
        task = self._tasks.get(job_id)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        """Stop all jobs; they stay queued."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def take_back(self, job_ids: list[str] | None = None) -> list[JobRow]:
        """Queue the jobs of a dead process again, and fail the one that killed several.

        Args:
            job_ids: of all jobs of the process; None: all jobs.

        Returns:
            All unfinished jobs, in the order in which they start.
        """
        for job in self._store.take_back(job_ids):
            logger.info("job %s: queued again, because its process died", job.id)
        unfinished = self._store.unfinished_jobs()
        guilty = [job for job in unfinished if self._is_guilty(job)]
        for job in guilty:
            error = SolverError(
                f"{job.deaths} processes died while they ran this job alone.",
                hint="report this error.",
            )
            self._store.finish(job.id, "failed", _problem_json(error))
        return [job for job in unfinished if job not in guilty]

    def _is_guilty(self, job: JobRow) -> bool:
        """Whether this job is the reason of the deaths, not somebody who kills processes."""
        if job.deaths < MAX_DEATHS:
            return False
        return job.deaths >= MAX_DEATHS + self._store.others_that_died(job)

    async def _run(self, job: JobRow) -> None:
        attempt = _Attempt(job)
        try:
            end = await self._until_stored(job, lambda: self._solve(attempt))
            if end is not None:
                await self._until_stored(job, lambda: asyncio.to_thread(end))
        except asyncio.CancelledError:
            # Changes nothing if a client has cancelled the job, or it never started.
            await asyncio.to_thread(self._requeue, attempt.job)
            raise
        finally:
            self.unstored.discard(job.id)

    async def _until_stored(
        self, job: JobRow, change: Callable[[], Awaitable[Result]]
    ) -> Result:
        """Repeat a change until the database accepts it."""
        seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                return await change()
            except StoreError as error:
                self.unstored.add(job.id)
                logger.error("job %s: the database fails: %s", job.id, error.orig)
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_RETRY_SECONDS)

    async def _solve(self, attempt: _Attempt) -> Callable[[], None] | None:
        """Solve a job; what then stores its end, or None if it has been cancelled."""
        job = attempt.job
        try:
            request = requested(job)
            answer = await self._solvers.plans.run(
                Place(job.turn, job.client, job.company),
                partial(self._begin, attempt, request),
                seconds=request.options.time_limit_seconds
                + self._settings.solver_grace_seconds,
                on_progress=partial(self._note, attempt, asyncio.get_running_loop()),
            )
            if answer is None:
                return None
            row = await asyncio.to_thread(self._plan_row, job, request, answer)
            document = answer.model_dump_json(by_alias=True)
            return partial(self._end, attempt.job, row, document)
        except PlannerError as error:
            return partial(self._fail, attempt.job, error)
        except StoreError:
            raise
        except Exception:
            logger.exception("job %s: an unexpected error", job.id)
            bug = InternalError("an unexpected error.", hint="report this error.")
            return partial(self._fail, attempt.job, bug)

    def _begin(self, attempt: _Attempt, request: PlanRequest) -> PlanTask | None:
        """Start a job, in a thread of the solvers; None if it has been cancelled."""
        profile = self._profiles.get(attempt.job.profile_id)
        started = self._store.start_job(attempt.job.id, attempt.id)
        if started is None:
            return None
        attempt.job = started
        logger.info("job %s: started", started.id)
        if request.model is None:  # the stored request has no profile
            request = request.model_copy(update={"profile": profile})
        return PlanTask(request, profile)

    def _note(
        self, attempt: _Attempt, loop: asyncio.AbstractEventLoop, report: Reported
    ) -> None:
        """Store the progress of a job, in a thread of the solvers."""
        event = "incumbent" if report.improved else "progress"
        try:
            runs = self._store.progress(attempt.job, event, json.dumps(asdict(report)))
        except StoreError as error:
            logger.warning(
                "job %s: progress was not stored: %s", attempt.job.id, error.orig
            )
            return
        if not runs:  # cancelled, or started again by another process
            loop.call_soon_threadsafe(self.cancel, attempt.job.id)

    def _end(self, job: JobRow, row: PlanRow, document: str) -> None:
        if self._store.finish_with_result(job, row, document):
            self._metrics.solves.labels(status=row.status).inc()
            logger.info("job %s: %s, plan %s", job.id, row.status, row.id)

    def _fail(self, job: JobRow, error: PlannerError) -> None:
        if self._store.fail(job, _problem_json(error)):
            self._metrics.solves.labels(status="failed").inc()
            self._metrics.failures.labels(code=error.code).inc()
            logger.warning("job %s: failed: %s", job.id, error)

    def _requeue(self, job: JobRow) -> None:
        try:
            self._store.requeue(job)
        except StoreError as error:
            logger.error("job %s: not queued again: %s", job.id, error.orig)

    def _plan_row(self, job: JobRow, request: PlanRequest, answer: Answer) -> PlanRow:
        if not isinstance(answer, Plan | Infeasible) or (
            isinstance(answer, Plan) and answer.id != job.plan_id
        ):
            got = getattr(answer, "id", answer)
            raise TypeError(f"job of plan {job.plan_id} returned {got!r}")
        return PlanRow(
            number=0,  # assigned by the database
            id=job.plan_id,
            profile_id=job.profile_id,
            status="succeeded" if isinstance(answer, Plan) else "infeasible",
            model=self._profiles.get(job.profile_id).model,
            devices=request.cluster.devices,
            step_seconds=answer.prediction.step_seconds
            if isinstance(answer, Plan)
            else None,
            final=isinstance(answer, Plan)
            or answer.search is None
            or answer.search.optimal,
            created_at=now(),
        )


class _Attempt:
    """One attempt at a job, whose row is replaced by the running one at the start."""

    def __init__(self, job: JobRow) -> None:
        self.id = uuid.uuid4().hex
        self.job = job


def _problem_json(error: PlannerError) -> str:
    return document_of(error).model_dump_json(exclude_none=True)
