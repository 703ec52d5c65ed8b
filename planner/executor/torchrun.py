"""Starts torchrun for a plan on this machine, follows it, and tells how it ended. Torch-free."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import planner
from planner.errors import DocumentError, PlannerError, RunError, StoppedError
from planner.executor.failures.failure import (
    LATE_NOTE,
    STOPPED_NOTE,
    killed_ranks,
    read_failure,
    read_stopped,
)
from planner.executor.failures.unfinished import StepLog, unfinished_run
from planner.executor.settings import RunSettings
from planner.executor.train.metrics import Metrics
from planner.spec.document import read
from planner.spec.measured import MeasuredRun
from planner.spec.plan import Plan
from planner.spec.words import counted

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Whole seconds; torch knows it from 2.13 on, and takes 30 before."""
RESUME = "start it again; with --resume where checkpoints are kept."
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a launch ended."""

    measured: MeasuredRun | None
    """What happened, when it ran to its last step."""
    error: PlannerError | None
    """Why it did not."""
    killed: tuple[int, ...] = ()
    """Ranks that a signal ended; torchrun then ended the others."""
    was_stopped: bool = False
    """It was told to stop, by `Torchrun.stop` or by SIGTERM."""
    by_signal: bool = False
    """By SIGTERM to this process."""


class Torchrun:
    """One launch of all ranks of a plan on this machine.

    Args:
        path: the plan's file.
        folder: an empty one, for what the ranks leave.
        metrics: file for one JSON line per step.
        devices: indices of this machine's CUDA devices that the ranks get; None: as many as there are ranks.
    """

    def __init__(
        self,
        plan: Plan,
        path: Path,
        settings: RunSettings,
        folder: Path,
        *,
        metrics: str | Path | None = None,
        devices: Sequence[int] | None = None,
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._log = StepLog(plan)
        self._folder = folder
        self._output = folder / "measured.json"
        self._command = [
            *interpreter(),
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--log-dir",
            str(folder / "logs"),
        ]
        self._command += [
            f"--nproc-per-node={len(plan.placement)}",
            "--no-python",
            *interpreter(),
            "-u",
        ]
        self._command += ["-m", "planner.executor.worker", str(path)]
        self._command += [
            *settings.to_arguments(),
            "--output",
            str(self._output),
            "--failures",
            str(folder),
        ]
        if metrics is not None:
            self._command += ["--metrics", str(metrics)]
        shown = None if settings.device == "cpu" else devices
        self._environment = (
            environment(plan)
            | grace(settings)
            | visible(shown, os.environ.get(VISIBLE_DEVICES))
        )
        self._process: subprocess.Popen[str] | None = None
        self._told = False

    def run(self, on_step: Callable[[Metrics], None], log: Log) -> Ended:
        """Run to the end.

        Args:
            on_step: called after every step.
            log: takes what the ranks print besides.
        """
        stderr = self._folder / "stderr.txt"

        def record(step: Metrics) -> None:
            self._log.record(step)
            on_step(step)

        try:
            with (
                started(self._command, self._environment, stderr, log) as process,
                passing_on(process) as signals,
            ):
                self._process = process
                _follow(process, record, log)
        except KeyboardInterrupt:
            if any(
                (self._folder / note).exists() for note in (STOPPED_NOTE, LATE_NOTE)
            ):
                log(read_stopped(self._folder).problems[0].message)
            raise
        return self._ended(process.returncode, by_signal=bool(signals))

    def unfinished(self, why: str) -> MeasuredRun | None:
        """The report of a launch that ended before its last step: the ranks' own, if they left one; else what they
        told of their steps. None: they did not train any."""
        if self._output.exists():
            left = read(MeasuredRun, self._output)
            # A rank that failed knows its own error only, which may be that it lost the neighbour that failed first.
            return left if left.ranks else left.model_copy(update={"unfinished": why})
        trained = self._log.segment()
        if trained is None:
            return None
        devices = devices_in_words(trained.devices, self._settings.device)
        return unfinished_run(self._plan, self._settings.model, devices, trained, why)

    def stop(self) -> None:
        """Let the ranks end the step at hand, keep a checkpoint, and leave."""
        self._told = True
        if self._process is not None:
            self._process.terminate()

    def _ended(self, code: int, *, by_signal: bool) -> Ended:
        if code == 0 and self._output.exists():
            return Ended(read(MeasuredRun, self._output), None)
        text = (self._folder / "stderr.txt").read_text(
            encoding="utf-8", errors="replace"
        )
        if self._told or by_signal or (self._folder / STOPPED_NOTE).exists():
            return Ended(
                None, read_stopped(self._folder), was_stopped=True, by_signal=by_signal
            )
        if code < 0 and not any(self._folder.glob("rank-*.json")):
            return Ended(None, _killed(-code))
        return Ended(None, read_failure(self._folder, text), killed_ranks(text))


def devices_in_words(number: int, kind: str | None) -> str:
    """What so many ranks ran on, as far as the launcher knows it."""
    return f"{number} x {kind}" if kind is not None else counted(number, "device")


def _killed(number: int) -> RunError:
    """The end of torchrun itself, which had no time to write a summary."""
    memory = ", as systems do when memory runs out" if number == signal.SIGKILL else ""
    return RunError(
        f"torchrun was killed (signal {number}){memory}; its ranks end with it.",
        hint=RESUME,
    )


def _follow(
    process: subprocess.Popen[str], on_step: Callable[[Metrics], None], log: Log
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        said, step = Metrics.split(line)
        if said or step is None:
            log(said)
        if step is not None:
            on_step(step)


@contextmanager
def started(
    command: list[str],
    variables: dict[str, str],
    stderr: Path,
    log: Log = lambda line: None,
) -> Iterator[subprocess.Popen[str]]:
    """A running child whose end is awaited, whatever happens within: then it is told to stop, and torchrun stops its
    ranks.

    It has a session of its own: Ctrl-C in a terminal would reach it too, and torchrun, told twice, leaves its ranks
    behind.

    Args:
        log: takes word of a wait after Ctrl-C.
    """
    with (
        stderr.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="replace",  # the user's code prints what it likes
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                log(
                    "interrupted: waiting for the ranks to leave; Ctrl-C again kills them"
                )
            _end(process)
            raise


def _end(process: subprocess.Popen[str]) -> None:
    """Stop a child, and wait until it has left, for Popen does not after Ctrl-C; a second one kills it."""
    process.terminate()
    try:
        assert process.stdout is not None
        process.stdout.read()
        process.wait()
    except KeyboardInterrupt:
        process.kill()  # its ranks end with it: see planner.executor.failures.orphans
        raise


@contextmanager
def passing_on(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Within, SIGTERM goes to the child, whose ranks may want to keep what they have; so does the end of the terminal
    (SIGHUP). Yields the signals passed on."""
    passed: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        process.terminate()

    with handling(pass_on):
        yield passed
        process.wait()


@contextmanager
def stoppable() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise, so that nothing is left lying about; while a child runs, it gets them instead.

    Raises:
        StoppedError: the signal came.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError(
            f"{signal.Signals(number).name} stopped the run between two launches.",
            hint=RESUME,
        )

    with handling(stop):
        yield


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within, the signals that end a run are handled so; only the main thread can do it. SIGHUP stays ignored where it
    is, as nohup has it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    for number, old in before.items():
        if old != signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def interpreter(folder: Path | None = None) -> list[str]:
    """Python, as it starts the processes of a run: a ``profiler.py`` in the user's working directory must not stand for
    this package's.

    Args:
        folder: the working directory; None: this process'. Where it holds this package's own sources, they may be
            found nowhere else.
    """
    is_own = Path(planner.__file__).resolve().parents[1] == (folder or Path.cwd())
    return [sys.executable] if is_own else [sys.executable, "-P"]


def environment(plan: Plan, ranks: int | None = None) -> dict[str, str]:
    """Of the ranks: as many threads each as the profile was measured with.

    Args:
        ranks: on this machine; None: all of the plan's.
    """
    profile = plan.request.profile
    threads = (
        profile.environment.get("threads_per_rank") if profile is not None else None
    )
    if threads is None:
        threads = str(
            max(1, len(os.sched_getaffinity(0)) // (ranks or len(plan.placement)))
        )
    # Threads that spin while they wait take the core from one that works, where cores are shared.
    # What a cluster's operator tells its own torchrun (PET_NNODES, PET_MAX_RESTARTS) is not for this one.
    outer = {
        name: value for name, value in os.environ.items() if not name.startswith("PET_")
    }
    return {"OMP_WAIT_POLICY": "PASSIVE", **outer, "OMP_NUM_THREADS": threads}


def grace(settings: RunSettings) -> dict[str, str]:
    """The variable that tells torchrun how long ranks may take to leave."""
    return {SHUTDOWN_TIMEOUT: str(math.ceil(settings.grace_seconds))}


def visible(devices: Sequence[int] | None, outer: str | None) -> dict[str, str]:
    """The variable that shows the ranks these devices only, of those that this process sees itself."""
    if devices is None or outer == "":  # shows none: the ranks run on the CPU
        return {}
    seen = range(max(devices) + 1) if outer is None else outer.split(",")
    if max(devices) >= len(seen):
        raise DocumentError(
            f"is {outer!r}, and device {max(devices)} is asked for.",
            field=VISIBLE_DEVICES,
            hint="show as many devices as the plan's cluster has, or leave it unset.",
        )
    return {VISIBLE_DEVICES: ",".join(str(seen[index]) for index in devices)}
