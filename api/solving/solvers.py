"""Runs tasks in solver processes: plans in one lane, predictions in another.

Predictions are short: they have processes of their own, which stay for the next one,
and never wait behind plans. A plan gets a fresh process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from planner.api.documents import Answer
from planner.api.errors import (
    NotReadyError,
    QueueFullError,
    SolverError,
    TooManyJobsError,
)
from planner.api.metrics import SolverMetrics
from planner.api.settings import Settings
from planner.api.solving.solver import (
    Answered,
    Crashed,
    Outcome,
    Refused,
    Reported,
    SolverProcess,
    Task,
    Work,
)
from planner.errors import PlannerError

logger = logging.getLogger("planner.api")

ProgressHandler = Callable[[Reported], None]
TASKS_PER_PROCESS = 1000
"""A process of predictions is replaced after this many, which bounds its memory."""
SEARCH_NICENESS = 5
"""Searches take what the service and predictions leave of the processors: on busy cores
health checks would wait for them."""


@dataclass(frozen=True, slots=True)
class Place:
    """A task's place in the queue of a lane."""

    turn: int = 0
    """Tasks start in the order of their turns."""
    client: str = ""
    company: int | None = None
    """Most tasks that may run at a time with this one, itself included; None: any number."""


class Lane:
    """A queue of tasks, of which `slots` run at a time. Belongs to one event loop."""

    def __init__(
        self,
        work: Work,
        settings: Settings,
        metrics: SolverMetrics,
        *,
        tasks_per_process: int,
        niceness: int,
    ) -> None:
        self._work, self._settings, self._metrics = work, settings, metrics
        self._slots = settings.concurrency
        self._tasks_per_process = tasks_per_process
        self._niceness = niceness
        self._threads = ThreadPoolExecutor(self._slots, thread_name_prefix="solver")
        self._waiting: dict[asyncio.Future[None], Place] = {}
        self._running: dict[asyncio.Future[None], Place] = {}
        self._lock = threading.Lock()
        self._idle: list[SolverProcess] = []
        self._busy: set[SolverProcess] = set()
        self._last_turn = 0
        self._stopping = False

    @property
    def waiting(self) -> int:
        """Number of tasks that have not started."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of tasks that have started."""
        return len(self._running)

    def number_of(self, client: str) -> int:
        """Number of waiting and running tasks of a client."""
        places = (*self._waiting.values(), *self._running.values())
        return sum(place.client == client for place in places)

    def next_turn(self, client: str) -> int:
        """The turn after the client's last one, but none that has passed."""
        places = self._waiting.values()
        present = min((place.turn for place in places), default=self._last_turn)
        own = (place.turn + 1 for place in places if place.client == client)
        return max(present, max(own, default=0))

    async def run(
        self,
        place: Place,
        make_task: Callable[[], Task | None],
        *,
        seconds: float,
        on_progress: ProgressHandler = lambda report: None,
    ) -> Answer | None:
        """Run a task when its turn comes. Cancelling the call kills the task's process.

        Args:
            place: of the task in the queue.
            make_task: is called in a thread when the task starts; None: no task.
            seconds: time limit, without the time in the queue.
            on_progress: is called in the same thread.

        Returns:
            The answer; None if there was no task.

        Raises:
            PlannerError: the planner refused the task.
            SolverError: the process crashed, died or timed out.
            NotReadyError: the service is stopping.
        """
        if self._stopping:
            raise _stopping()
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting[turn] = place
        self._start_next()
        try:
            await turn
            attempt = _Attempt()
            done = loop.run_in_executor(
                self._threads, self._do, attempt, make_task, seconds, on_progress
            )
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                attempt.cancel()
                await asyncio.gather(done, return_exceptions=True)
                raise
        finally:
            self._waiting.pop(turn, None)
            self._running.pop(turn, None)
            self._start_next()

    def warm_up(self) -> None:
        """Start the idle processes that the settings ask for."""
        with self._lock:
            wanted = 0 if self._stopping else self._settings.spare_solvers
            while len(self._idle) < wanted:
                self._idle.append(self._new_process())

    async def stop(self) -> None:
        """Kill every process and wait for its thread; refuse waiting tasks."""
        with self._lock:
            self._stopping = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.kill()
        for process in idle:
            process.close()
        for turn in tuple(self._waiting):
            if not turn.done():
                turn.set_exception(_stopping())
        await asyncio.to_thread(self._threads.shutdown)

    def _start_next(self) -> None:
        """Start waiting tasks in the order of their turns, as long as slots are free.

        A task that waits for less company holds back those after it, so that it does
        not wait for ever.
        """
        ordered = sorted(self._waiting.items(), key=lambda item: item[1].turn)
        for turn, place in ordered:
            if turn.done():
                continue
            companies = [other.company for other in self._running.values()]
            limits = [c for c in (place.company, *companies) if c is not None]
            if self.running >= min([self._slots, *limits]):
                return
            self._last_turn = place.turn
            self._running[turn] = self._waiting.pop(turn)
            turn.set_result(None)

    def _do(
        self,
        attempt: _Attempt,
        make_task: Callable[[], Task | None],
        seconds: float,
        on_progress: ProgressHandler,
    ) -> Answer | None:
        task = make_task()
        if task is None:
            return None
        started = time.monotonic()
        process = self._take_process()
        outcome: Outcome | None = None
        try:
            attempt.attach(process)
            outcome = process.run(task, seconds, on_progress)
            return self._answer_of(outcome, process)
        except TimeoutError:
            raise _timed_out(seconds) from None
        finally:
            self._metrics.solve_seconds.observe(time.monotonic() - started)
            attempt.attach(None)
            self._give_back(process, healthy=_is_healthy(outcome))

    def _answer_of(self, outcome: Outcome | None, process: SolverProcess) -> Answer:
        match outcome:
            case Answered(answer):
                return answer
            case Refused(error):
                raise error
            case Crashed(trace):
                logger.error("solver crashed:\n%s", trace)
                raise _crashed()
        if self._stopping:
            raise _stopping()
        raise _died(process.exit_code)

    def _new_process(self) -> SolverProcess:
        memory_bytes = self._settings.max_solver_bytes
        return SolverProcess(self._work, memory_bytes, self._niceness)

    def _take_process(self) -> SolverProcess:
        with self._lock:
            if self._stopping:
                raise _stopping()
            process = self._idle.pop() if self._idle else None
            if process is not None and not process.alive:
                process.close()
                process = None
            process = process or self._new_process()
            self._busy.add(process)
            return process

    def _give_back(self, process: SolverProcess, *, healthy: bool) -> None:
        with self._lock:
            self._busy.remove(process)
            fresh = process.tasks < self._tasks_per_process
            wanted = len(self._idle) < self._slots and not self._stopping
            if healthy and fresh and wanted:
                self._idle.append(process)
                return
        process.close()
        self.warm_up()


class Solvers:
    """The two lanes. All async methods belong to one event loop."""

    def __init__(self, work: Work, settings: Settings, metrics: SolverMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        self.plans = Lane(
            work,
            settings,
            metrics,
            tasks_per_process=1,
            niceness=SEARCH_NICENESS,
        )
        self.predictions = Lane(
            work,
            settings,
            metrics,
            tasks_per_process=TASKS_PER_PROCESS,
            niceness=0,
        )

    async def predict(self, make_task: Callable[[], Task], client: str) -> Answer:
        """Run a prediction when the client's turn comes. Cancelling the call ends it.

        Raises:
            QueueFullError: too many predictions are waiting.
            TooManyJobsError: the client has too many predictions.
            NotReadyError: the service is stopping.
            PlannerError: the planner refused the prediction, or its process failed.
        """
        lane = self.predictions
        free = self._settings.concurrency - lane.running
        self.check_capacity(lane.waiting, lane.running, free)
        self.check_share(client, lane.number_of(client))
        answer = await lane.run(
            Place(lane.next_turn(client), client),
            make_task,
            seconds=self._settings.max_solver_seconds,
        )
        assert answer is not None
        return answer

    def check_capacity(self, waiting: int, running: int, free: int) -> None:
        """Raise `QueueFullError` if no more tasks may wait, besides `free` ones."""
        settings = self._settings
        if waiting < settings.queue_length + free:
            return
        raise QueueFullError(
            f"{running} jobs are running and {waiting} are waiting.",
            hint="try again later, or raise queue_length or concurrency of the service.",
            limits={
                "queue_length": settings.queue_length,
                "concurrency": settings.concurrency,
            },
            retry_after_seconds=self._mean_seconds(),
        )

    def check_share(self, client: str, own: int) -> None:
        """Raise `TooManyJobsError` if the client has as many tasks as it may have."""
        most = self._settings.max_jobs_per_client
        if most and client and own >= most:
            raise TooManyJobsError(
                f"{client} has {own} queued or running jobs.",
                hint="wait until one has finished, or cancel one: DELETE /v1/jobs/{id}.",
                limits={"max_jobs_per_client": most},
                retry_after_seconds=self._mean_seconds(),
            )

    def warm_up(self, *, plans: bool) -> None:
        """Start the idle processes that the settings ask for; `plans`: for plans too."""
        if plans:
            self.plans.warm_up()
        self.predictions.warm_up()

    async def stop(self) -> None:
        """Kill every process, and refuse waiting tasks."""
        await asyncio.gather(self.plans.stop(), self.predictions.stop())

    def _mean_seconds(self) -> int:
        return max(1, math.ceil(self._metrics.mean_solve_seconds))


class _Attempt:
    """Lets the event loop kill the process that a thread waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: SolverProcess | None = None
        self._cancelled = False

    def attach(self, process: SolverProcess | None) -> None:
        with self._lock:
            self._process = process
            if process is not None and self._cancelled:
                process.kill()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                self._process.kill()


def _is_healthy(outcome: Outcome | None) -> bool:
    """Whether the process of this outcome may get another task."""
    if isinstance(outcome, Refused):
        return not isinstance(outcome.error, SolverError)
    return isinstance(outcome, Answered)


def _stopping() -> NotReadyError:
    return NotReadyError(
        "the service is stopping.",
        hint="try again in a moment.",
        retry_after_seconds=1,
    )


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
