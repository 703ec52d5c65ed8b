"""The queue of solver processes: at most `concurrency` run and `queue_length` wait."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from planner.api.documents import Answer
from planner.api.errors import (
    NotReadyError,
    QueueFullError,
    SolverError,
    TooManyJobsError,
)
from planner.api.metrics import Metrics
from planner.api.settings import Settings
from planner.api.solver import (
    Answered,
    Crashed,
    Refused,
    Reported,
    SolverProcess,
    Task,
    Work,
)
from planner.errors import PlannerError

logger = logging.getLogger("planner.api")

ProgressHandler = Callable[[Reported], None]


class Ticket:
    """Handle of an admitted task, which cancels the task from any thread."""

    def __init__(self, client: str = "") -> None:
        self.client = client
        self._lock = threading.Lock()
        self._process: SolverProcess | None = None
        self.cancelled = False
        self.running = False
        """Whether the task has started."""

    def cancel(self) -> None:
        """Stop the task; does nothing if the task has ended."""
        with self._lock:
            self.cancelled = True
            if self._process is not None:
                self._process.kill()

    def attach(self, process: SolverProcess) -> None:
        """Note the process that runs the task."""
        with self._lock:
            self._process = process
            if self.cancelled:
                process.kill()

    def detach(self) -> None:
        """Forget the process of the task."""
        with self._lock:
            self._process = None


class Solvers:
    """Runs tasks in processes. All async methods, and `admit`, belong to one event loop."""

    def __init__(self, work: Work, settings: Settings, metrics: Metrics) -> None:
        self._work, self._settings, self._metrics = work, settings, metrics
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._threads = ThreadPoolExecutor(
            settings.concurrency, thread_name_prefix="solver"
        )
        self._admitted: set[Ticket] = set()
        self._lock = threading.Lock()
        self._spares: list[SolverProcess] = []
        self._stopping = False
        self.running = 0

    @property
    def waiting(self) -> int:
        """Number of admitted tasks that have not started."""
        return len(self._admitted) - self.running

    @property
    def has_capacity(self) -> bool:
        """Whether another task may be admitted."""
        return (
            len(self._admitted)
            < self._settings.concurrency + self._settings.queue_length
        )

    def admit(self, client: str, *, beyond_limit: bool = False) -> Ticket:
        """Add a task to the queue; the caller must then `run` the task.

        Args:
            client: whose share the task counts for; empty: nobody's.
            beyond_limit: admit the task even if the queue is full.

        Raises:
            QueueFullError: the queue is full.
            TooManyJobsError: the client has too many tasks.
            NotReadyError: the service is stopping.
        """
        if self._stopping:
            raise NotReadyError(
                "the service is stopping.",
                hint="try again in a moment.",
                retry_after_seconds=1,
            )
        if not beyond_limit and not self.has_capacity:
            raise self._full()
        if client:
            self._check_share(client)
        ticket = Ticket(client)
        self._admitted.add(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop a task. A task that has not started leaves the queue at once."""
        ticket.cancel()
        if not ticket.running:
            self._admitted.discard(ticket)

    async def run(
        self,
        ticket: Ticket,
        make_task: Callable[[], Task | None],
        *,
        seconds: float,
        on_progress: ProgressHandler,
    ) -> Answer | None:
        """Run an admitted task as soon as a process is free.

        Args:
            ticket: of the task.
            make_task: is called in a thread when the task starts; None cancels the task.
            seconds: time limit, without the time in the queue.
            on_progress: is called in the same thread.

        Returns:
            The answer; None if the task was cancelled.

        Raises:
            PlannerError: the planner refused the task.
            SolverError: the process crashed, died or timed out.
        """
        try:
            async with self._slots:
                if ticket.cancelled:
                    return None
                ticket.running = True
                self.running += 1
                try:
                    loop = asyncio.get_running_loop()
                    return await loop.run_in_executor(
                        self._threads, self._do, ticket, make_task, seconds, on_progress
                    )
                finally:
                    self.running -= 1
        finally:
            self._admitted.discard(ticket)

    def warm_up(self) -> None:
        """Start the idle processes that the settings ask for."""
        with self._lock:
            while (
                len(self._spares) < self._settings.spare_solvers and not self._stopping
            ):
                self._spares.append(
                    SolverProcess(self._work, self._settings.max_solver_bytes)
                )

    async def stop(self) -> None:
        """Kill every process and wait for its thread; cancel waiting tasks."""
        with self._lock:
            self._stopping = True
            spares, self._spares = self._spares, []
        for spare in spares:
            spare.close()
        for ticket in tuple(self._admitted):
            ticket.cancel()
        await asyncio.to_thread(self._threads.shutdown)

    def _check_share(self, client: str) -> None:
        most = self._settings.max_jobs_per_client
        own = sum(ticket.client == client for ticket in self._admitted)
        if most and own >= most:
            raise TooManyJobsError(
                f"{client} has {own} queued or running jobs.",
                hint="wait until one has finished, or cancel one: DELETE /v1/jobs/{id}.",
                limits={"max_jobs_per_client": most},
                retry_after_seconds=self._mean_seconds(),
            )

    def _mean_seconds(self) -> int:
        return max(1, math.ceil(self._metrics.solve_seconds.mean))

    def _full(self) -> QueueFullError:
        return QueueFullError(
            f"{self.running} jobs are running and {self.waiting} are waiting.",
            hint="try again later, or raise queue_length or concurrency of the service.",
            limits={
                "queue_length": self._settings.queue_length,
                "concurrency": self._settings.concurrency,
            },
            retry_after_seconds=self._mean_seconds(),
        )

    def _do(
        self,
        ticket: Ticket,
        make_task: Callable[[], Task | None],
        seconds: float,
        on_progress: ProgressHandler,
    ) -> Answer | None:
        task = make_task()
        if task is None:
            return None
        started = time.monotonic()
        process = self._process()
        try:
            ticket.attach(process)
            process.send(task)
            return self._follow(process, seconds, ticket, on_progress)
        finally:
            ticket.detach()
            process.close()
            self._metrics.solve_seconds.observe(time.monotonic() - started)
            self.warm_up()

    def _process(self) -> SolverProcess:
        with self._lock:
            spare = self._spares.pop() if self._spares else None
        if spare is not None and spare.alive:
            return spare
        if spare is not None:
            spare.close()
        return SolverProcess(self._work, self._settings.max_solver_bytes)

    def _follow(
        self,
        process: SolverProcess,
        seconds: float,
        ticket: Ticket,
        on_progress: ProgressHandler,
    ) -> Answer | None:
        try:
            for message in process.messages(seconds):
                match message:
                    case Reported():
                        on_progress(message)
                    case Answered(answer):
                        return answer
                    case Refused(error):
                        raise error
                    case Crashed(trace):
                        logger.error("solver crashed:\n%s", trace)
                        raise _crashed()
        except TimeoutError:
            raise _timed_out(seconds) from None
        if ticket.cancelled:
            return None
        raise _died(process.exit_code)


def _crashed() -> PlannerError:
    return SolverError(
        "an unexpected error in the solver; the service's log has the traceback.",
        hint="report this error.",
    )


def _timed_out(seconds: float) -> PlannerError:
    return SolverError(
        f"the solver did not finish within {seconds:g} s and was stopped.",
        field="options.time_limit_seconds",
        hint="add constraints, or send a smaller cluster or profile.",
    )


def _died(exit_code: int | None) -> PlannerError:
    return SolverError(
        f"the solver process exited with code {exit_code}, perhaps out of memory.",
        hint="add constraints, or give the service more memory.",
    )
