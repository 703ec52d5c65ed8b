"""Starts ranks without torchrun, many runs one after the other: forked from servers that have imported torch and
torchao, and traced the models, once for all runs.

A rank finds the environment that torchrun would set, and meets the others at a store that no rank holds, as there.
Neighbours are not forked from one server: each orders its sets of names by its own hash seed, as processes do that
started alone. What torchrun itself adds is tested by `test_launch`, `test_nodes` and `test_elastic`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from select import select
from typing import Any

import torch
from torch.distributed import TCPStore

from planner.profiler.low_bit import torchao

ROOT = Path(__file__).parents[2]
TRACED = ("gpt2", "llama", "tied-llama", "qwen3", "mixtral", "qwen3-moe", "t5")
"""Models that several modules of cases train."""
ERROR_CHARACTERS = 5000
SERVERS = 2


class Servers:
    """Of even and of odd ranks, started when first needed."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def run(self, module: str, ranks: int, folder: Path) -> dict[str, Any]:
        """What `main` of this module, on so many ranks, writes to the file that its first argument names."""
        if not self._started:
            self._started += [_start() for _ in range(SERVERS)]
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        output, waiting = (
            folder / "results.json",
            [server.stdout for server in self._started],
        )
        for number, server in enumerate(self._started):
            assert server.stdin is not None
            order = {
                "module": module,
                "here": [*range(ranks)][number::SERVERS],
                "ranks": ranks,
                "port": store.port,
            }
            server.stdin.write(json.dumps(order | {"output": str(output)}) + "\n")
            server.stdin.flush()
        while waiting:
            for told in select(waiting, [], [])[0]:
                waiting.remove(told)
                failed = json.loads(told.readline())
                if failed is not None:
                    self.stop()  # with the ranks that wait for this one
                    last = _log(output, failed).read_text()[-ERROR_CHARACTERS:]
                    raise AssertionError(f"rank {failed} failed first:\n{last}")
        return dict(json.loads(output.read_text()))

    def stop(self) -> None:
        """End all, and their ranks."""
        for server in self._started:
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()
        self._started.clear()


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.torchrun.ranks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
    }
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, **pipes
    )


def _log(output: Path, rank: int) -> Path:
    return output.with_name(f"rank-{rank}.log")


def main() -> None:
    """Fork the ranks of every order, a line of JSON; say which failed."""
    torch.set_num_threads(1)
    from tests.torchrun.cases import source_of_case

    for model in TRACED:
        source_of_case(model).cut()
    torchao("optim")
    gc.collect()
    gc.freeze()  # ranks need not look through all this again and again
    for line in sys.stdin:
        order = json.loads(line)
        forked = {}
        for rank in order.pop("here"):
            pid = os.fork()
            if pid == 0:
                _become_rank(rank, **order)
            forked[pid] = rank
        sys.stdout.write(json.dumps(_first_to_fail(forked)) + "\n")
        sys.stdout.flush()


def _first_to_fail(forked: dict[int, int]) -> int | None:
    """Of ranks by their process, or None when all have come to their end."""
    while forked:
        pid, status = os.wait()
        rank = forked.pop(pid)
        if status:
            return rank
    return None


def _become_rank(rank: int, *, module: str, ranks: int, port: int, output: str) -> None:
    """Never returns."""
    status = 1
    try:
        log = os.open(_log(Path(output), rank), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        here, all_there_are = (
            {"RANK": rank, "LOCAL_RANK": rank},
            {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks},
        )
        numbers = {**here, **all_there_are, "MASTER_PORT": port}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update(
            {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        )
        sys.argv = [module, output]
        import_module(module).main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
