"""One solve in a process of its own, because only a process can be stopped for certain.

CP-SAT may overrun its time limit, and nothing may be raised inside its callbacks; killing the process always works, and
a crash takes one job with it, not the service. A process is spawned (not forked: the service has threads), imports the
search, answers one task, and ends.

    parent                        child (`_serve_one`)
      Process.start()      ->       import the search
      send(task)           ->       work(task, report)
      messages()           <-       Ready, Reported ... Reported, then Answered | Refused | Crashed
      kill()                        (or the pipe ends: the process died)
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from planner.api.documents import Answer
from planner.api.errors import SolverError
from planner.errors import PlannerError
from planner.spec import Cluster, Job, ModelProfile, Plan, PlanRequest, PredictionLayout

SECONDS_BETWEEN_REPORTS = 0.25
"""A better plan is reported at once, other progress no more often than this."""
START_SECONDS = 60.0
"""A process that has not imported the search by then will not."""


@dataclass(frozen=True, slots=True)
class PlanTask:
    """Find the best plan."""

    request: PlanRequest
    profile: ModelProfile


@dataclass(frozen=True, slots=True)
class PredictTask:
    """Price one layout."""

    profile: ModelProfile
    cluster: Cluster
    job: Job
    layout: PredictionLayout
    model: str | None


Task = PlanTask | PredictTask


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has its imports, and starts on its task."""


@dataclass(frozen=True, slots=True)
class Reported:
    """Progress of the search; None stands for a number that is not known yet."""

    layouts_considered: int
    layouts_done: int
    incumbent_seconds: float | None
    lower_bound_seconds: float | None
    gap: float | None
    elapsed_seconds: float
    improved: bool
    """The incumbent is new."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The task is done."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Refused:
    """The planner cannot answer, for a reason that the client can fix."""

    error: PlannerError


@dataclass(frozen=True, slots=True)
class Crashed:
    """A mistake of the planner itself: the traceback, for the log."""

    traceback: str


Message = Ready | Reported | Answered | Refused | Crashed


class Work(Protocol):
    """What a solver process does; must be importable by the child (spawned processes get it by name)."""

    def prepare(self) -> None:
        """Import what is slow to import."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """Do one task; `report` takes each `planner.search.Progress`."""


@dataclass(frozen=True, slots=True)
class Search:
    """The real work: `planner.search`, and no plan without the independent check of `planner.validate`."""

    def prepare(self) -> None:
        """Import the search, and OR-Tools with it."""
        importlib.import_module("planner.search")
        importlib.import_module("planner.validate")

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """Plan or predict."""
        from planner.search import Callbacks, plan, predict

        if isinstance(task, PredictTask):
            return predict(
                task.profile, task.cluster, task.job, task.layout, model=task.model
            )
        answer = plan(
            task.request, task.profile, callbacks=Callbacks(on_progress=report)
        )
        if isinstance(answer, Plan):
            _check(answer, task.profile)
        return answer


def _check(plan: Plan, profile: ModelProfile) -> None:
    from planner.validate import check

    found = check(plan, profile)
    if not found.ok:
        raise SolverError(
            f"the plan did not pass the check, which shares no code with the search: {'; '.join(found.problems)}.",
            hint="report it, with the request.",
        )


class SolverProcess:
    """The parent's side of one solver process. `kill` may be called from any thread."""

    def __init__(self, work: Work, memory_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, work, memory_bytes)
        self._process = context.Process(
            target=_serve_one, args=arguments, daemon=True, name="planner-solver"
        )
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        """The process can take its task."""
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; negative: the signal that ended it."""
        return self._process.exitcode

    def send(self, task: Task) -> None:
        """Hand over the task. A process that died meanwhile shows as an end of `messages`."""
        try:
            self._connection.send(task)
        except OSError:
            self.kill()

    def messages(self, seconds: float) -> Iterator[Message]:
        """What the process says, until it ends.

        Raises:
            TimeoutError: the process still runs `seconds` after it was ready, or does not get ready.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            if not wait(
                [self._connection], timeout=max(0.0, deadline - time.monotonic())
            ):
                raise TimeoutError
            try:
                message: Message = self._connection.recv()
            except (EOFError, OSError):
                self._process.join()
                return
            if isinstance(message, Ready):
                deadline = time.monotonic() + seconds
            yield message

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()

    def close(self) -> None:
        """End the process and free what belongs to it."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()


def _serve_one(connection: Connection, work: Work, memory_bytes: int) -> None:
    """What the child runs."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal; the service decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work.prepare()
        connection.send(Ready())
        connection.send(_answer(work, connection.recv(), connection))
    except (EOFError, BrokenPipeError):
        return  # the service ended before there was a task, or does not want the answer any more
    except Exception:
        connection.send(Crashed(traceback.format_exc()))


def _answer(work: Work, task: Task, connection: Connection) -> Answered | Refused:
    try:
        return Answered(work(task, _Reporter(connection)))
    except PlannerError as error:
        return Refused(error)
    except MemoryError:
        return Refused(
            SolverError(
                "the solver needs more memory than it may use.",
                hint="constrain the job further, or raise max_solver_bytes of the service.",
            )
        )


class _Reporter:
    """Sends progress to the parent, not too often."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._incumbent: float | None = None
        self._next = 0.0

    def __call__(self, progress: Any) -> None:
        moment, improved = (
            time.monotonic(),
            progress.incumbent_seconds != self._incumbent,
        )
        if not improved and moment < self._next:
            return
        self._incumbent, self._next = (
            progress.incumbent_seconds,
            moment + SECONDS_BETWEEN_REPORTS,
        )
        self._connection.send(
            Reported(
                layouts_considered=progress.layouts_considered,
                layouts_done=progress.layouts_done,
                incumbent_seconds=_finite(progress.incumbent_seconds),
                lower_bound_seconds=_finite(progress.lower_bound_seconds),
                gap=_finite(progress.gap),
                elapsed_seconds=progress.elapsed_seconds,
                improved=improved,
            )
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
