"""Nodes of two kinds on this machine, planned for by a live service: one is told to leave. And nodes whose store is
lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from planner.api.settings import Settings
from planner.errors import RunError, StoppedError
from planner.executor.elastic.journal import Journal
from planner.executor.elastic.roster import KnownPlans, Roster
from planner.executor.reference import train_reference
from planner.profiler.count import profile
from planner.search import make_request
from planner.search import plan as search_plan
from planner.spec import Cluster, Job, ModelProfile, NodeGroup, Options, Plan
from planner.spec.cluster import DeviceSpec, Link
from tests.api.live import running
from tests.executor.plans import make_plan, source_of
from tests.torchrun.elastic_nodes import (
    FIRST,
    SECOND,
    WAIT_SECONDS,
    Nodes,
    agent_of,
    processes,
    store,
    words_of,
)

pytestmark = pytest.mark.torchrun
LEAVES_AFTER = 5
SLOW_LINK = Link(latency_seconds=1e-4, bandwidth_bytes_per_second=1e9)


def group(name: str, flops_per_second: float) -> NodeGroup:
    """A node of one CPU rank, so slow that any split pays."""
    device = DeviceSpec(
        id=f"cpu-{name}",
        memory_bytes=1 << 32,
        peak_flops_per_second={"fp32": flops_per_second},
        memory_bandwidth_bytes_per_second=flops_per_second,
        reserved_bytes=0,
    )
    return NodeGroup(
        name=name, device=device, nodes=1, devices_per_node=1, inter_node=SLOW_LINK
    )


CLUSTER = Cluster(node_groups=(group("fast", 4e6), group("slow", 2e6)))
JOB = Job(global_batch_size=15, sequence_length=0, precision="fp32", optimizer="adamw")
SLEEP = ("-c", "import time; print('started', flush=True); time.sleep(1000)")
"""What ranks do in place of training."""


def plan_of(model: ModelProfile) -> Plan:
    """On both nodes."""
    found = search_plan(make_request(model, CLUSTER, JOB, Options(top=0)), model)
    assert isinstance(found, Plan)
    assert {row.node for row in found.placement} == {0, 1}
    return found


def test_what_is_left_of_two_kinds_is_planned_for_by_the_service(
    tmp_path: Path,
) -> None:
    """The slow node leaves at a checkpoint and the fast one goes on by the service's plan; no step is lost, and the
    losses are those of one process."""
    source = source_of("mlp", tmp_path)
    plan = plan_of(profile(source, sequence_length=0, micro_batch_sizes=(1, 2)))
    settings = Settings(
        port=0, database=tmp_path / "planner.db", concurrency=1, spare_solvers=1
    )
    with store() as (rendezvous, _), running(settings) as live:
        ranks = (
            "-m",
            "planner.replan.node_rank",
            "--planner",
            str(live.client.base_url),
        )
        nodes = Nodes(
            tmp_path,
            rendezvous,
            plan,
            source.name,
            ranks,
            steps=10**6,
            data="synthetic",
        )
        slow, fast = (
            nodes.start(address, 1, most=2, group=group, last_call_seconds=2)
            for address, group in ((FIRST, "slow"), (SECOND, "fast"))
        )
        nodes.wait_for(lambda line: line.startswith(f"step {LEAVES_AFTER:4d}"))
        leave(FIRST)
        with pytest.raises(StoppedError, match="SIGTERM stopped this node"):
            slow.result(WAIT_SECONDS)
        nodes.wait_for(lambda line: "go on from step" in line)
        told = len(nodes.lines)
        nodes.wait_for(
            lambda line: any(each.startswith("step ") for each in nodes.lines[told:])
        )
        leave(SECOND)
        with pytest.raises(StoppedError):
            fast.result(WAIT_SECONDS)
        solved = {each["id"] for each in live.get("/v1/plans").json()["plans"]}
    folder = tmp_path / "checkpoints" / "elastic" / tmp_path.name
    journal = Journal(folder / "journal.jsonl")
    lost, moved = journal.decisions()
    both, alone = (
        "1 fast node of 1 device and 1 slow node of 1 device",
        "1 fast node of 1 device",
    )
    assert lost.text == f"SIGTERM stopped {both} after {lost.step} steps; {alone} left"
    assert lost.step == moved.step > LEAVES_AFTER
    first, second = (row for row in journal.rows() if row["kind"] == "launch")
    assert (first["plan_id"], second["first_step"]) == (plan.id, moved.step)
    assert second["plan_id"] in solved
    assert KnownPlans(folder, plan).find(Roster((1,), ("fast",))) is not None
    trained = {
        row["step"]: row["loss"] for row in journal.rows() if row["kind"] == "step"
    }
    expected = train_reference(
        plan, source, steps=moved.step + 1, data="synthetic"
    ).losses
    assert [trained[step] for step in range(len(expected))] == pytest.approx(
        expected, abs=1e-5
    )


def leave(address: str) -> None:
    """SIGTERM to the agent of this address."""
    os.kill(agent_of(address), signal.SIGTERM)


def test_the_loss_of_the_store_is_told_on_every_node(tmp_path: Path) -> None:
    """With what to do; their ranks end."""
    plan = make_plan(("a", "b"), (1, 1))
    with store() as (rendezvous, its_process):
        nodes = Nodes(tmp_path, rendezvous, plan, "m", SLEEP)
        both = [nodes.start(address, 1, most=2, least=2) for address in (FIRST, SECOND)]
        nodes.wait_for(lambda line: nodes.lines.count("started") == 2)
        ranks = [pid for pid in processes() if SLEEP[1].encode() in words_of(pid)]
        its_process.kill()
        for each in both:
            with pytest.raises(
                RunError,
                match=r"(?s)rendezvous: the store at .* does not answer.*again with --resume",
            ):
                each.result(WAIT_SECONDS)
    assert len(ranks) == 4, "each agent has the text in its own command too"
    assert not any(map(words_of, ranks))
