"""Agents of two nodes on this machine: one is killed, with its ranks, and comes back with another device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import RunError
from planner.executor.nodes import NodesPolicy, run_node
from planner.executor.reference import train_reference
from planner.executor.settings import RunSettings
from planner.spec import MeasuredRun, Plan
from profiler.models import load_model
from tests.executor.plans import source_of
from tests.torchrun.node_rank import Planner, Rebalancer

pytestmark = pytest.mark.torchrun
STEPS, EVERY, KILLED_AFTER = 80, 4, 6
SLOW_STEPS = 80
FIRST, SECOND = "127.0.0.1", "127.0.0.2"
"""Addresses of the two nodes."""
WAIT_SECONDS = 120.0


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[str]:
    """Address of a store for all runs, in a process of its own: no node is lost with it."""
    command = [sys.executable, "-m", "planner.executor.rendezvous", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()
    assert process.returncode == 0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Nodes:
    """Starts nodes, and keeps what rank 0 says."""

    def __init__(self, folder: Path, rendezvous: str, plan: Plan, model: str, **settings: Any) -> None:
        self.lines: list[str] = []
        self._run = folder.name
        self._rendezvous = rendezvous
        self._plan = plan
        kept: dict[str, Any] = {"checkpoint_dir": str(folder / "checkpoints"), "checkpoint_every": EVERY}
        self._settings = RunSettings(model=model, device="cpu", timeout_seconds=60, **kept, **settings)
        self._pool = ThreadPoolExecutor()

    def start(self, address: str, devices: int, most: int = 1) -> Future[tuple[MeasuredRun, bool]]:
        """A node, in a thread that follows it."""
        policy = NodesPolicy(
            least=1,
            most=most,
            run_id=self._run,
            devices=devices,
            ranks=("-m", "tests.torchrun.node_rank"),
            rendezvous=self._rendezvous,
            address=address,
            last_call_seconds=6,
            heartbeat_seconds=1,
        )
        return self._pool.submit(run_node, self._plan, self._settings, policy, log=self.lines.append)

    def wait_for(self, reached: Callable[[str], bool]) -> None:
        """Until rank 0 says it."""
        until = time.monotonic() + WAIT_SECONDS
        while not any(map(reached, list(self.lines))):
            assert time.monotonic() < until, self.lines
            time.sleep(0.05)


def kill_node(address: str) -> None:
    """SIGKILL the agent of this address, and its ranks."""
    agents = [pid for pid in processes() if f"--address={address}".encode() in words_of(pid)]
    (agent,) = (pid for pid in agents if parent_of(pid) == os.getpid())
    ranks = [pid for pid in processes() if parent_of(pid) == agent]
    assert ranks
    for pid in (agent, *ranks):
        os.kill(pid, signal.SIGKILL)


def processes() -> list[int]:
    """Of this machine."""
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]


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


def test_a_killed_node_costs_no_step_beyond_the_last_checkpoint(tmp_path: Path, rendezvous: str) -> None:
    """Two nodes, then one, then two with three devices: the losses are those of the undisturbed run, and every move is
    told on both."""
    source = source_of("gpt2", tmp_path)
    plan = Planner(source).plans[1, 1]
    nodes = Nodes(
        tmp_path, rendezvous, plan, str(tmp_path / "gpt2.json"), steps=STEPS, loss="tests.torchrun.node_rank:slow_alone"
    )
    first, second = nodes.start(FIRST, 1, most=2), nodes.start(SECOND, 1, most=2)
    nodes.wait_for(lambda line: line.startswith(f"step {KILLED_AFTER:4d}"))
    kill_node(SECOND)
    with pytest.raises(RunError):
        second.result(WAIT_SECONDS)
    nodes.wait_for(lambda line: "go on from step" in line)
    second = nodes.start(SECOND, 2, most=2)
    (measured, is_first), (theirs, is_second) = first.result(WAIT_SECONDS), second.result(WAIT_SECONDS)
    assert theirs == measured
    assert is_first != is_second
    expected = train_reference(plan, source, steps=STEPS).losses
    assert [measured.losses_by_step[step] for step in range(STEPS)] == pytest.approx(expected, abs=1e-5)
    lost, moved, grown, gone_on = (
        each for each in measured.decisions if "drift_of_pipeline_rank_0" not in each.figures
    )
    assert [each.kind for each in (lost, moved, grown, gone_on)] == ["lost", "moved", "moved", "moved"]
    assert lost.text.startswith("nodes or ranks of 2 nodes of 1 device were lost")
    assert lost.figures["devices_lost"] == 1
    assert moved.step == lost.figures["steps_kept"] == measured.segments[1].first_step
    assert lost.step - moved.step < 2 * EVERY, "from the last checkpoint; one more may have been on its way to the disk"
    assert [segment.devices for segment in measured.segments] == [2, 1]
    assert grown.figures["gain_seconds"] > grown.figures["move_seconds"] > 0
    assert grown.step % EVERY == 0
    assert measured.first_step == grown.step == gone_on.step, "a move loses no step at all"
    assert len(measured.ranks) == 3


def test_a_slow_rank_loses_layers_without_new_processes(tmp_path: Path, rendezvous: str) -> None:
    """Its two stages are found slow, and the same ranks go on by another plan, from the checkpoint of that step."""
    source = load_model("tests.torchrun.test_elastic:slow_there")
    planner = Rebalancer(source)
    nodes = Nodes(tmp_path, rendezvous, planner.begin, source.name, steps=SLOW_STEPS, data="synthetic")
    measured, _ = nodes.start(FIRST, 2).result(WAIT_SECONDS)
    expected = train_reference(planner.begin, source, steps=SLOW_STEPS, data="synthetic").losses
    assert [measured.losses_by_step[step] for step in range(SLOW_STEPS)] == pytest.approx(expected, abs=1e-5)
    moved = measured.decisions[0]
    assert moved.kind == "moved", moved.text
    assert "pipeline rank 1 takes" in moved.text
    assert (measured.plan_id, measured.first_step) == (planner.after.id, moved.step)
    assert not any("go on from step" in line for line in nodes.lines), "there was no other rendezvous"


def test_a_mistake_of_the_users_ends_the_run(tmp_path: Path, rendezvous: str) -> None:
    """At once, for it would come again."""
    source = source_of("gpt2", tmp_path)
    plan = Planner(source).plans[(1,)]
    nodes = Nodes(
        tmp_path, rendezvous, plan, str(tmp_path / "gpt2.json"), steps=2, loss="tests.torchrun.node_rank:failing"
    )
    with pytest.raises(RunError, match=r"(?s)failed first:.*this loss has a mistake"):
        nodes.start(FIRST, 1).result(WAIT_SECONDS)
    assert not any("step" in line.split()[:1] for line in nodes.lines)
