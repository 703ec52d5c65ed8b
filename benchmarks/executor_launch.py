"""The ranks of the executor's benchmark, which stay alive between blocks of steps, and the files they are told by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from planner.profiler.measure_load import threads_per_rank
from planner.spec import Plan

POLL_SECONDS = 0.05
STOP = "stop"


def request_path(folder: Path, block: int) -> Path:
    """Written by the launcher: the steps of this block, or `STOP`."""
    return folder / f"request-{block}.txt"


def rows_path(folder: Path, block: int) -> Path:
    """Written by rank 0: seconds and losses of this block, one row per plan."""
    return folder / f"rows-{block}.json"


def write_whole(path: Path, text: str) -> None:
    """Whoever sees the file sees all of it."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


class Ranks:
    """torchrun's ranks with one executor per plan; a context. Between blocks they sleep.

    Args:
        model: reference of the model.
        plans: one per split.
        ranks: of every plan.
    """

    def __init__(self, model: str, plans: Sequence[Plan], ranks: int) -> None:
        self._model, self._plans, self._count = model, plans, ranks
        self._folder = tempfile.TemporaryDirectory(prefix="planner-benchmark-")
        self._blocks = 0

    def __enter__(self) -> Self:
        folder = Path(self._folder.name)
        paths = [folder / f"plan-{index}.json" for index in range(len(self._plans))]
        for path, plan in zip(paths, self._plans, strict=True):
            path.write_text(plan.model_dump_json(by_alias=True), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={self._count}",
        ]
        command += [
            "-m",
            "benchmarks.executor_ranks",
            self._model,
            str(folder),
            *map(str, paths),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads_per_rank(self._count))
        }
        self._process = subprocess.Popen(command, env=environment)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            write_whole(request_path(Path(self._folder.name), self._blocks), STOP)
        else:
            self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

    def block(self, steps: int) -> list[dict[str, Any]]:
        """Seconds and first losses of so many steps of every kind, by plan; one step less of one process."""
        folder, block = Path(self._folder.name), self._blocks
        write_whole(request_path(folder, block), str(steps))
        while not rows_path(folder, block).exists():
            if self._process.poll() is not None:
                raise SystemExit(
                    f"error: the ranks ended with code {self._process.returncode}"
                )
            time.sleep(POLL_SECONDS)
        self._blocks += 1
        rows: list[dict[str, Any]] = json.loads(
            rows_path(folder, block).read_text(encoding="utf-8")
        )
        return rows
