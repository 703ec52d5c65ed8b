"""The other ranks of a shared machine: helper processes that keep its cores as busy as a real run would.

When N ranks train on one machine they share its cores, caches and memory bandwidth, so a layer timed alone is too fast.
`Load` starts N - 1 processes that run the same work in a loop while this process measures.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from planner.errors import RunError
from planner.profiler.allocator import keep_freed
from planner.profiler.cores import available_cores
from planner.profiler.measure_timing import Mark

READY = "ready"
TAIL_LINES = 12


class Workload(Protocol):
    """Work that can be sent to another process: must survive pickling."""

    def run(self, mark: Mark) -> None:
        """Do the work once."""


def threads_per_rank(concurrency: int) -> int:
    """Threads of each of `concurrency` ranks that share this machine's cores; the executor starts its ranks so."""
    return max(1, available_cores() // concurrency)


def python_path() -> str:
    """For a new interpreter, the same places to import from as in this one."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


class Load:
    """N - 1 helper processes that work beside this one; a context, within which torch here uses as many threads. All
    keep the memory that they free, this process too, and for good.

    Args:
        concurrency: N, ranks that share the machine, this process included.

    Raises:
        RunError: a helper died, or the work cannot be sent to it.
    """

    def __init__(self, concurrency: int) -> None:
        self._threads = threads_per_rank(concurrency)
        self._helpers = concurrency - 1
        self._processes: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="planner-load-")
        self._sent = 0

    def __enter__(self) -> Self:
        keep_freed()
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self._processes = [self._start(index) for index in range(self._helpers)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        self._folder.cleanup()
        torch.set_num_threads(self._threads_before)

    def prepare(self, workloads: Sequence[Workload]) -> None:
        """Send work to the helpers, which may then be told to run it; what was sent before is forgotten.

        Work of one layer is best sent together, so that its weights are sent once.
        """
        if not self._processes:
            return
        self._path().unlink(missing_ok=True)  # every helper has read it
        self._sent += 1
        path = self._path()
        try:
            torch.save(list(workloads), path)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RunError(
                f"the model's layers cannot be sent to the other ranks: {error}.",
                field="concurrency",
                hint="define the model's classes at the top of a module, or measure with concurrency 1.",
            ) from None

    def beside(self, index: int) -> None:
        """Let every helper run this one of the prepared workloads in a loop; returns when all of them do."""
        for process in self._processes:
            self._send(process, f"{index} {self._path()}")
        for number, process in enumerate(self._processes):
            self._wait(number, process)

    def _start(self, index: int) -> subprocess.Popen[str]:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self._threads),
            "PYTHONPATH": python_path(),
        }
        with self._log(index).open("w", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "planner.profiler.measure_load"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _send(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # The helper has died; `_wait` tells why.

    def _wait(self, index: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        if process.stdout.readline().strip() == READY:
            return
        process.wait()
        lines = (
            self._log(index)
            .read_text(encoding="utf-8", errors="replace")
            .strip()
            .splitlines()
        )
        words = "\n".join(lines[-TAIL_LINES:])
        raise RunError(
            f"a helper process that should load the machine died:\n{words}",
            field="concurrency",
            hint="fix its error, or measure with concurrency 1.",
        )

    def _path(self) -> Path:
        """A new name each time, by which helpers know that they have not read it."""
        return Path(self._folder.name) / f"workloads-{self._sent}"

    def _log(self, index: int) -> Path:
        return Path(self._folder.name) / f"helper-{index}.log"


def main() -> int:
    """One helper: read `INDEX PATH` from stdin, and run this workload of that file in a loop, until stdin ends."""
    keep_freed()
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read_into, args=(lines,), daemon=True).start()
    loaded, workloads = "", list[Workload]()
    while (line := lines.get()) is not None:
        index, _, path = line.partition(" ")
        if path != loaded:
            workloads.clear()  # before the next ones take memory
            workloads, loaded = torch.load(path, weights_only=False), path
        _loop(workloads[int(index)], lines)
    return 0


def _loop(workload: Workload, lines: queue.SimpleQueue[str | None]) -> None:
    """Run the work until there is another line; tell when it is under way."""
    workload.run(_ignore)
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    while lines.empty():
        workload.run(_ignore)


def _read_into(lines: queue.SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        lines.put(line.strip())
    lines.put(None)


def _ignore() -> None:
    """The helpers' times do not matter."""


if __name__ == "__main__":
    sys.exit(main())
