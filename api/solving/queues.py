"""Two queues: jobs run in the service itself, or go through PostgreSQL to workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from planner.api.settings import Settings
from planner.api.solving.news import News, follow_store, listen
from planner.api.solving.runner import Runner
from planner.api.storage.store import JobRow, Store

if TYPE_CHECKING:
    import procrastinate

TASK = "planner.solve"
QUEUE = "plans"
CONNECT_SECONDS = 5.0


class LocalQueue:
    """The default: this process runs the jobs, and its SQLite file is the queue."""

    def __init__(
        self, store: Store, runner: Runner, news: News, settings: Settings
    ) -> None:
        self._store, self._runner, self._news = store, runner, news
        self._slots = settings.concurrency

    async def start(self) -> None:
        """Continue the jobs that the previous process left."""
        follow_store(self._news, self._store)
        for job in await asyncio.to_thread(self._runner.take_back):
            self._runner.start(job)

    async def stop(self) -> None:
        """Stop all jobs; they stay queued."""
        await self._runner.stop()

    def enqueue(self, connection: Connection, job: JobRow) -> None:
        """Do nothing: the row of the job is its place in the queue."""

    def added(self, job: JobRow) -> None:
        """Run the job when its turn comes."""
        self._runner.start(job)

    def cancel(self, job_id: str) -> None:
        """Kill the process of a job."""
        self._runner.cancel(job_id)

    @property
    def unstored(self) -> int:
        """Number of jobs whose end the database does not accept yet."""
        return len(self._runner.unstored)

    def free_slots(self, running: int) -> int:
        """Number of jobs that could start at once."""
        return max(0, self._slots - running)


class SharedQueue:
    """Procrastinate's queue in PostgreSQL, for `planner worker` on any machine."""

    def __init__(self, news: News, url: str) -> None:
        self._news, self._url = news, url
        self._app = queue_app()
        self._listener: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen to what other processes do."""
        self._listener = asyncio.create_task(listen(self._news, self._url))

    async def stop(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])

    def enqueue(self, connection: Connection, job: JobRow) -> None:
        """Add a job in the transaction that stores it."""
        task = self._app.configure_task(
            TASK,
            queue=QUEUE,
            priority=-job.turn,
            connection=connection.connection.driver_connection,
        )
        task.defer(job_id=job.id)

    def added(self, job: JobRow) -> None:
        """Do nothing: PostgreSQL has notified the workers."""

    def cancel(self, job_id: str) -> None:
        """Do nothing: PostgreSQL has notified the worker that runs the job."""

    @property
    def unstored(self) -> int:
        """None of this process: workers run the jobs."""
        return 0

    def free_slots(self, running: int) -> int:
        """None that this process knows of."""
        return 0


def queue_app(url: str | None = None) -> procrastinate.App:
    """Procrastinate's application.

    Args:
        url: of PostgreSQL, for a worker; None: jobs are only added.
    """
    import procrastinate

    if url is None:
        return procrastinate.App(connector=procrastinate.SyncPsycopgConnector())
    connector = procrastinate.PsycopgConnector(conninfo=url, timeout=CONNECT_SECONDS)
    return procrastinate.App(connector=connector)
