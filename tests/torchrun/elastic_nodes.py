"""Nodes of an elastic run on this machine, each a thread that follows its agent, and a store that outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from planner.executor.elastic.nodes import NodesPolicy, run_node
from planner.executor.settings import RunSettings
from planner.spec import MeasuredRun, Plan

EVERY = 4
"""Steps between two checkpoints."""
FIRST, SECOND = "127.0.0.1", "127.0.0.2"
"""Addresses of two nodes."""
WAIT_SECONDS = 300.0
"""Only a test that fails waits so long."""
RANKS = ("-m", "tests.torchrun.node_rank")


@contextmanager
def store() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A rendezvous' store in a process of its own: its address, and the process."""
    command = [
        sys.executable,
        "-m",
        "planner.executor.elastic.rendezvous",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process
        process.terminate()


class Nodes:
    """Starts nodes, and keeps what rank 0 says."""

    def __init__(
        self,
        folder: Path,
        rendezvous: str,
        plan: Plan,
        model: str,
        ranks: tuple[str, ...] = RANKS,
        **settings: Any,
    ) -> None:
        self.lines: list[str] = []
        self.left: list[MeasuredRun] = []
        """Reports of a run that failed."""
        self._ranks = ranks
        self._run = folder.name
        self._rendezvous = rendezvous
        self._plan = plan
        kept: dict[str, Any] = {
            "checkpoint_dir": str(folder / "checkpoints"),
            "checkpoint_every": EVERY,
        }
        self._settings = RunSettings(
            model=model, device="cpu", timeout_seconds=60, **kept, **settings
        )
        self._pool = ThreadPoolExecutor()

    def start(
        self,
        address: str,
        devices: int,
        most: int = 1,
        *,
        least: int = 1,
        group: str = "",
        last_call_seconds: float = 6,
    ) -> Future[tuple[MeasuredRun, bool]]:
        """A node, in a thread that follows it."""
        policy = NodesPolicy(
            least=least,
            most=most,
            run_id=self._run,
            devices=devices,
            group=group,
            ranks=self._ranks,
            rendezvous=self._rendezvous,
            address=address,
            last_call_seconds=last_call_seconds,
            heartbeat_seconds=1,
        )
        told: dict[str, Any] = {
            "log": self.lines.append,
            "unfinished": self.left.append,
        }
        return self._pool.submit(run_node, self._plan, self._settings, policy, **told)

    def wait_for(self, reached: Callable[[str], bool]) -> None:
        """Until rank 0 says it."""
        until = time.monotonic() + WAIT_SECONDS
        while not any(map(reached, list(self.lines))):
            assert time.monotonic() < until, self.lines
            time.sleep(0.05)


def agent_of(address: str) -> int:
    """The process of this node's agent."""
    agents = [
        pid for pid in processes() if f"--address={address}".encode() in words_of(pid)
    ]
    (agent,) = (pid for pid in agents if parent_of(pid) == os.getpid())
    return agent


def kill_node(address: str) -> None:
    """SIGKILL the agent of this address, and its ranks."""
    agent = agent_of(address)
    ranks = [pid for pid in processes() if parent_of(pid) == agent]
    assert ranks
    for pid in (agent, *ranks):
        with suppress(ProcessLookupError):  # ranks end with their agent
            os.kill(pid, signal.SIGKILL)


def processes() -> list[int]:
    """Of this machine."""
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdecimal()
    ]


def words_of(pid: int) -> list[bytes]:
    """Of its command."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def parent_of(pid: int) -> int:
    """0: it has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
