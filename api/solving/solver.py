"""Runs searches in processes of their own, because only a process can always be stopped.

CP-SAT may exceed its time limit, and its callbacks must not raise. Killing the process
always works, and a crash ends one job instead of the service. A process is spawned (not
forked, because the service has threads), imports the search, and answers tasks.

    parent                        child (`_serve`)
      SolverProcess()      ->       import the search, Ready
      run(task)            ->       work(task, report)
                           <-       Reported ... Reported, then Answered | Refused | Crashed
      kill()                        (or end of file: the process died)
"""

from __future__ import annotations

import importlib
import io
import math
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from planner.api.documents import Answer
from planner.api.errors import SolverError
from planner.errors import DocumentError, PlannerError
from planner.spec import (
    CalibrationTable,
    Cluster,
    Job,
    ModelProfile,
    Plan,
    PlanRequest,
    PredictionLayout,
    Run,
)
from planner.spec.calibration import shipped

SECONDS_BETWEEN_REPORTS = 0.25
"""Better plans are reported at once, other progress at this interval."""
START_SECONDS = 60.0
"""A process must have imported the search by then."""
PROFILES_PER_PROCESS = 8
"""Profiles that a process keeps for its next tasks."""


@dataclass(frozen=True, slots=True)
class PlanTask:
    """Find the best plan."""

    request: PlanRequest
    profile: ModelProfile


@dataclass(frozen=True, slots=True)
class PredictTask:
    """Predict one layout."""

    profile: ModelProfile
    cluster: Cluster
    job: Job
    layout: PredictionLayout
    model: str | None
    calibration: CalibrationTable | None


@dataclass(frozen=True, slots=True)
class FitTask:
    """Fit a calibration to measured runs, from that of this release."""

    runs: tuple[Run, ...]
    name: str
    """Of the calibration."""


Task = PlanTask | PredictTask | FitTask


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has imported the search and starts its task."""


@dataclass(frozen=True, slots=True)
class Reported:
    """Progress of the search; None for a number that is not known yet."""

    layouts_considered: int
    layouts_done: int
    incumbent_seconds: float | None
    lower_bound_seconds: float | None
    gap: float | None
    elapsed_seconds: float
    improved: bool
    """Whether the incumbent is new."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The task is done."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Refused:
    """The planner refused the task, for a reason that the client can fix."""

    error: PlannerError


@dataclass(frozen=True, slots=True)
class Crashed:
    """A bug in the planner, with the traceback for the log."""

    traceback: str


Outcome = Answered | Refused | Crashed
Message = Ready | Reported | Outcome


class Work(Protocol):
    """What a solver process runs; spawned processes import it by name."""

    def prepare(self) -> None:
        """Do slow imports."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """Do one task; `report` is called with every `planner.search.Progress`."""


@dataclass(frozen=True, slots=True)
class Search:
    """Search with `planner.search`, and check every plan with `planner.check`."""

    def prepare(self) -> None:
        """Import the search, and OR-Tools with it."""
        importlib.import_module("planner.search")
        importlib.import_module("planner.check")

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """Plan, predict or fit."""
        if isinstance(task, FitTask):
            return _fitted(task)
        from planner.search import Callbacks, plan, predict

        if isinstance(task, PredictTask):
            return predict(
                task.profile,
                task.cluster,
                task.job,
                task.layout,
                model=task.model,
                calibration=task.calibration,
            )
        answer = plan(
            task.request, task.profile, callbacks=Callbacks(on_progress=report)
        )
        if isinstance(answer, Plan):
            _check(answer, task.profile)
        return answer


def _fitted(task: FitTask) -> CalibrationTable:
    from planner.calibrate.fit import fit
    from planner.calibrate.run_errors import run_errors

    prior = shipped()
    errors = run_errors(task.runs, prior)
    usable = [error.run for error in errors if not error.failure]
    if not usable:
        raise DocumentError(
            "the cost model can predict none of the measured runs.",
            hint=f"the first one: {errors[0].failure}",
        )
    return fit(usable, prior).model_copy(update={"name": task.name})


def _check(plan: Plan, profile: ModelProfile) -> None:
    from planner.check import check

    found = check(plan, profile)
    if not found.ok:
        raise SolverError(
            f"the plan failed the independent check: {'; '.join(found.problems)}.",
            hint="report this error with the request.",
        )


class SolverProcess:
    """One solver process, as its parent sees it. `kill` may be called from any thread.

    Args:
        work: what it runs.
        memory_bytes: largest address space.
        niceness: above that of the service; 0: the same priority.
    """

    def __init__(self, work: Work, memory_bytes: int, niceness: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        arguments = (child_end, work, memory_bytes, niceness)
        self._process = context.Process(
            target=_serve, args=arguments, daemon=True, name="planner-solver"
        )
        self._process.start()
        child_end.close()
        self._ready = False
        self._profiles: dict[int, ModelProfile] = {}
        self.tasks = 0
        """Number of tasks that it got."""

    @property
    def alive(self) -> bool:
        """Whether the process can receive a task."""
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the process runs, negative for a signal."""
        return self._process.exitcode

    def run(
        self, task: Task, seconds: float, on_progress: Callable[[Reported], None]
    ) -> Outcome | None:
        """Run a task; None if the process died.

        Args:
            task: to do.
            seconds: time limit, without the start of the process.
            on_progress: is called in this thread.

        Raises:
            TimeoutError: the process does not become ready, or needs more than `seconds`.
        """
        self.tasks += 1
        try:
            self._send(task)
            if not self._ready:
                outcome = self._receive(START_SECONDS)
                self._ready = isinstance(outcome, Ready)
            deadline = time.monotonic() + seconds
            while self._ready:
                outcome = self._receive(deadline - time.monotonic())
                if not isinstance(outcome, Reported):
                    break
                on_progress(outcome)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            self._process.join()
            return None
        assert not isinstance(outcome, Ready | Reported)
        return outcome

    def _send(self, task: Task) -> None:
        """Send a task, and its profile only if the process has forgotten that: a large
        profile takes longer to send than a prediction to make."""
        if isinstance(task, FitTask):
            self._connection.send((0, None))
            self._connection.send_bytes(pickle.dumps(task))
            return
        slots = [
            slot for slot, known in self._profiles.items() if known is task.profile
        ]
        slot = slots[0] if slots else self.tasks % PROFILES_PER_PROCESS
        self._profiles[slot] = task.profile
        self._connection.send((slot, None if slots else task.profile))
        buffer = io.BytesIO()
        _TaskPickler(buffer, task.profile, slot).dump(task)
        self._connection.send_bytes(buffer.getvalue())

    def _receive(self, seconds: float) -> Message:
        if not self._connection.poll(max(0.0, seconds)):
            raise TimeoutError
        message: Message = self._connection.recv()
        return message

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and free its resources."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()


def _serve(
    connection: Connection, work: Work, memory_bytes: int, niceness: int
) -> None:
    """The main function of the child process."""
    os.nice(niceness)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # Ctrl-C reaches all processes of a terminal; only the service handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work.prepare()
        connection.send(Ready())
        profiles: dict[int, ModelProfile] = {}
        while True:
            slot, profile = connection.recv()
            if profile is not None:
                profiles[slot] = profile
            pickled = io.BytesIO(connection.recv_bytes())
            task = _TaskUnpickler(pickled, profiles).load()
            connection.send(_answer(work, task, connection))
    except (EOFError, BrokenPipeError):
        return  # the service ended, or does not need the answer any more
    except Exception:
        connection.send(Crashed(traceback.format_exc()))


def _answer(work: Work, task: Task, connection: Connection) -> Outcome:
    try:
        return Answered(work(task, _Reporter(connection)))
    except PlannerError as error:
        return Refused(error)
    except MemoryError:
        return Refused(
            SolverError(
                "the solver exceeded its memory limit.",
                hint="add constraints, or raise max_solver_bytes of the service.",
            )
        )


class _TaskPickler(pickle.Pickler):
    """Writes a number in place of the profile."""

    def __init__(self, file: io.BytesIO, profile: ModelProfile, slot: int) -> None:
        super().__init__(file)
        self._profile, self._slot = profile, slot

    def persistent_id(self, obj: Any) -> int | None:
        """The number of the profile; None for everything else, which is written."""
        return self._slot if obj is self._profile else None


class _TaskUnpickler(pickle.Unpickler):
    """Reads what `_TaskPickler` has written."""

    def __init__(self, file: io.BytesIO, profiles: dict[int, ModelProfile]) -> None:
        super().__init__(file)
        self._profiles = profiles

    def persistent_load(self, pid: Any) -> ModelProfile:
        """The profile with this number."""
        return self._profiles[pid]


class _Reporter:
    """Sends progress to the parent at a limited rate."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._incumbent: float | None = None
        self._next = 0.0

    def __call__(self, progress: Any) -> None:
        moment = time.monotonic()
        improved = progress.incumbent_seconds != self._incumbent
        if not improved and moment < self._next:
            return
        self._incumbent = progress.incumbent_seconds
        self._next = moment + SECONDS_BETWEEN_REPORTS
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
