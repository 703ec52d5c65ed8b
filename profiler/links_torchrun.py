"""Starting a module of ours on several local ranks with torchrun, and telling its failure in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from planner.errors import RunError
from planner.profiler.progress import Progress

PROGRESS_MARK = "progress\t"
TAIL_LINES = 12
GRACE_SECONDS = 10.0


def under_torchrun() -> bool:
    """This process is a rank that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def print_progress(done: int, total: int, text: str) -> None:
    """The `Progress` of a rank whose parent listens in `run_torchrun`."""
    sys.stdout.write(f"{PROGRESS_MARK}{done}\t{total}\t{text}\n")
    sys.stdout.flush()


def run_torchrun(
    module: str,
    arguments: Sequence[str],
    ranks: int,
    *,
    threads_per_rank: int = 1,
    timeout_seconds: float,
    progress: Progress | None = None,
) -> None:
    """Run ``python -m module arguments`` on `ranks` local ranks, until all have ended.

    Raises:
        RunError: a rank failed, or the time ran out; with the last lines of every rank's stderr.
    """
    with tempfile.TemporaryDirectory(prefix="planner-torchrun-") as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        # Each rank's stderr into its own file: torchrun's own report would bury it.
        command += ["--redirects=2", f"--log-dir={folder}", "-m", module, *arguments]
        with (
            Path(folder, "agent.log").open("w", encoding="utf-8") as log,
            _started(command, threads_per_rank, log) as process,
        ):
            timed_out = _listen(process, timeout_seconds, progress)
        if timed_out:
            raise RunError(
                f"{ranks} ranks of {module} had not ended after {timeout_seconds:g} seconds.",
                field="timeout_seconds",
                hint="measure fewer or smaller sizes, or give more time.",
            )
        if process.returncode != 0:
            raise RunError(
                f"{ranks} ranks of {module} failed:\n{_last_words(Path(folder))}"
            )


@contextmanager
def _started(
    command: Sequence[str], threads_per_rank: int, log: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads_per_rank)}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)
        if process.stdout is not None:
            process.stdout.close()


def _listen(
    process: subprocess.Popen[str], timeout_seconds: float, progress: Progress | None
) -> bool:
    """Hand on the progress that the ranks print until they end; True when they were ended for taking too long."""
    timed_out = threading.Event()

    def stop() -> None:
        timed_out.set()
        _end(process)

    timer = threading.Timer(timeout_seconds, stop)
    timer.start()
    try:
        for line in process.stdout or ():
            if line.startswith(PROGRESS_MARK) and progress is not None:
                done, total, text = (
                    line.removeprefix(PROGRESS_MARK).rstrip("\n").split("\t", 2)
                )
                progress(int(done), int(total), text)
        process.wait()
    finally:
        timer.cancel()
    return timed_out.is_set()


def _end(process: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its ranks; or the whole session when it does not in time."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_words(folder: Path) -> str:
    """Last lines of every rank's stderr; of torchrun's own when no rank said anything."""
    logs = sorted(folder.glob("**/stderr.log"), key=lambda path: int(path.parent.name))
    texts = [(f"rank {path.parent.name}", _tail(path)) for path in logs]
    told = [f"{who}: {text}" for who, text in texts if text]
    return (
        "\n".join(told)
        or _tail(folder / "agent.log")
        or "no rank wrote anything to stderr."
    )


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "\n".join(lines[-TAIL_LINES:])
