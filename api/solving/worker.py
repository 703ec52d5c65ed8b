"""A worker: takes jobs from PostgreSQL and runs them, until SIGINT or SIGTERM.

A worker that is stopped queues its jobs again. One that dies does not: its heartbeat
ends, and after `worker_timeout_seconds` another worker queues them again. One that loses
the database waits until that is back, and begins again.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import procrastinate
import psycopg
from procrastinate.jobs import Job as QueuedJob

from planner.api.metrics import SolverMetrics
from planner.api.profiles import Profiles
from planner.api.settings import Settings
from planner.api.solving.news import News, listen
from planner.api.solving.queues import QUEUE, TASK, queue_app
from planner.api.solving.runner import Runner
from planner.api.solving.solver import Search, Work
from planner.api.solving.solvers import Solvers
from planner.api.storage.database import StoreError
from planner.api.storage.store import Store

logger = logging.getLogger("planner.api")

HEARTBEATS_PER_TIMEOUT = 4
SECONDS_BETWEEN_BEATS = 10.0
SECONDS_BETWEEN_CONNECTIONS = 1.0
RESCUE_LOCK = 0x72657363
"""Key of the advisory lock of PostgreSQL under which one worker rescues jobs."""
DATABASE_ERRORS = (
    procrastinate.exceptions.ConnectorException,
    psycopg.Error,
    StoreError,
)


def work(settings: Settings, task: Work | None = None) -> None:
    """Run jobs until SIGINT or SIGTERM.

    Args:
        settings: with the URL of the database.
        task: what a solver process runs; None: `planner.search`.

    Raises:
        DocumentError: the database or the port of the metrics cannot be used.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # One line per task and failed connection there; the worker's own lines say it all.
    for name in ("procrastinate", "psycopg.pool"):
        logging.getLogger(name).setLevel(logging.ERROR)
    asyncio.run(Worker(settings, task or Search()).run())


class StoppedError(Exception):
    """The worker stops, which is no end of its jobs: another worker takes them."""


class Worker:
    """Runs jobs of the queue in PostgreSQL."""

    def __init__(self, settings: Settings, work: Work) -> None:
        self._settings = settings
        self._store = Store(settings.database_url)
        self._metrics = metrics = SolverMetrics()
        profiles = Profiles(self._store, settings)
        self._solvers = Solvers(work, settings, metrics)
        self._runner = Runner(self._store, profiles, self._solvers, settings, metrics)
        self._app = self._new_app()
        self._unconfirmed: set[int] = set()
        """Jobs of the queue that this process has begun, and not confirmed as done."""

    async def run(self) -> None:
        """Run jobs until SIGINT or SIGTERM; serve metrics if the settings have a port."""
        port = self._settings.metrics_port
        if not port:
            await self._run()
            return
        plans = self._solvers.plans
        with self._metrics.served(self._settings.host, port, lambda: plans.running):
            await self._run()

    async def _run(self) -> None:
        this = asyncio.current_task()
        assert this is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
        self._solvers.plans.warm_up()
        news = News(on_done=self._runner.cancel)
        listener = asyncio.create_task(listen(news, self._settings.database_url))
        heart = asyncio.create_task(self._beat())
        logger.info("worker: waiting for jobs")
        try:
            while True:
                try:
                    await self._run_connected()
                except DATABASE_ERRORS as error:
                    logger.warning("worker: the database fails: %s", error)
                await asyncio.sleep(SECONDS_BETWEEN_CONNECTIONS)
        except asyncio.CancelledError:
            logger.info("worker: stopped")
        finally:
            listener.cancel()
            heart.cancel()
            await self._runner.stop()
            await self._solvers.stop()
            self._store.close()

    def _new_app(self) -> procrastinate.App:
        app = queue_app(self._settings.database_url)
        retry = procrastinate.RetryStrategy(retry_exceptions={StoppedError})
        solve = app.task(name=TASK, queue=QUEUE, pass_context=True, retry=retry)
        solve(self._solve)
        return app

    async def _beat(self) -> None:
        """Show that this process works, whether or not the database does."""
        while self._settings.worker_heartbeat_file:
            Path(self._settings.worker_heartbeat_file).touch()
            await asyncio.sleep(SECONDS_BETWEEN_BEATS)

    async def _run_connected(self) -> None:
        """Run jobs until the database fails."""
        self._app = self._new_app()
        async with self._app.open_async():
            await self._release()
            rescuer = asyncio.create_task(self._rescue_regularly())
            try:
                await self._app.run_worker_async(
                    queues=[QUEUE],
                    concurrency=self._settings.concurrency,
                    install_signal_handlers=False,
                    shutdown_graceful_timeout=0,
                    delete_jobs="always",
                    update_heartbeat_interval=self._settings.worker_timeout_seconds
                    / HEARTBEATS_PER_TIMEOUT,
                    stalled_worker_timeout=self._settings.worker_timeout_seconds,
                )
            finally:
                rescuer.cancel()

    async def _solve(self, context: procrastinate.JobContext, job_id: str) -> None:
        """Run one job of the queue to its end."""
        self._confirm_later(context.job)
        job = await asyncio.to_thread(self._store.job, job_id)
        if job is not None and not job.finished:
            task = self._runner.start(job)
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                stopped = not task.done()
                task.cancel()
                await asyncio.wait([task])
                if stopped:
                    raise StoppedError from None

    def _confirm_later(self, queued: QueuedJob) -> None:
        """Note the job until the queue knows how it ended."""
        number = queued.id
        task = asyncio.current_task()
        assert number is not None
        assert task is not None
        self._unconfirmed.add(number)

        def confirm(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is None:
                self._unconfirmed.discard(number)

        task.add_done_callback(confirm)

    async def _release(self) -> None:
        """Queue this worker's own jobs again, after it has lost the database."""
        running = await self._app.job_manager.list_jobs_async(
            queue=QUEUE, status="doing"
        )
        own = [queued for queued in running if queued.id in self._unconfirmed]
        for queued in own:
            job = await asyncio.to_thread(self._store.job, _job_id(queued))
            if job is not None and job.status == "running":
                await asyncio.to_thread(self._store.requeue, job)
        await self._retry(own)
        self._unconfirmed.clear()

    async def _rescue_regularly(self) -> None:
        """Take over the jobs of dead workers.

        Only if the database has answered for a whole timeout: after a failure the other
        workers need that time to show that they live.
        """
        answered = False
        while True:
            await asyncio.sleep(self._settings.worker_timeout_seconds)
            try:
                if answered:
                    await self._rescue()
                else:
                    await asyncio.to_thread(self._store.check_writable)
                answered = True
            except DATABASE_ERRORS as error:
                answered = False
                logger.warning("worker: the database fails: %s", error)

    async def _rescue(self) -> None:
        url = self._settings.database_url
        async with await psycopg.AsyncConnection.connect(url) as connection:
            # Until the transaction ends; two workers would start the same jobs twice.
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", [RESCUE_LOCK])
            stalled = await self._app.job_manager.get_stalled_jobs(
                queue=QUEUE,
                seconds_since_heartbeat=self._settings.worker_timeout_seconds,
            )
            of_worker: dict[int | None, list[QueuedJob]] = {}
            for queued in stalled:
                if queued.id not in self._unconfirmed:
                    of_worker.setdefault(queued.worker_id, []).append(queued)
            for jobs in of_worker.values():
                ids = [_job_id(queued) for queued in jobs]
                await asyncio.to_thread(self._runner.take_back, ids)
                await self._retry(jobs)
            await self._add_missing()

    async def _add_missing(self) -> None:
        """Queue the unfinished jobs that the queue has lost, for instance with a worker
        that lived on after its jobs had been taken over.

        A job that is in the queue twice does no harm: it starts once.
        """
        unfinished = await asyncio.to_thread(self._store.unfinished_jobs)
        queued = await self._app.job_manager.list_jobs_async(queue=QUEUE)
        known = {_job_id(each) for each in queued}
        missing = [job for job in unfinished if job.id not in known]
        if missing:
            await asyncio.to_thread(self._store.take_back, [job.id for job in missing])
        for job in missing:
            logger.warning("job %s: was missing in the queue", job.id)
            task = self._app.configure_task(TASK, queue=QUEUE, priority=-job.turn)
            await task.defer_async(job_id=job.id)

    async def _retry(self, jobs: Iterable[QueuedJob]) -> None:
        for queued in jobs:
            assert queued.id is not None
            job = await asyncio.to_thread(self._store.job, _job_id(queued))
            await self._app.job_manager.retry_job_by_id_async(
                queued.id,
                retry_at=datetime.now(UTC),
                priority=None if job is None else -job.turn,
            )


def _job_id(queued: QueuedJob) -> str:
    return str(queued.task_kwargs["job_id"])
