"""Agents of two nodes on this machine: one is killed, with its ranks, and comes back with another device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.errors import RunError
from planner.executor.reference import train_reference
from planner.profiler.models import load_model
from tests.executor.plans import source_of
from tests.torchrun.elastic_nodes import (
    EVERY,
    FIRST,
    SECOND,
    WAIT_SECONDS,
    Nodes,
    kill_node,
    store,
)
from tests.torchrun.node_rank import SLOW_LAYER, Planner, Rebalancer

pytestmark = pytest.mark.torchrun
STEPS, KILLED_AFTER = 80, 6
SLOW_STEPS = 100


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[str]:
    """Address of a store for all runs: no node is lost with it."""
    with store() as (address, process):
        yield address
    assert process.returncode == 0


def test_a_killed_node_costs_no_step_beyond_the_last_checkpoint(
    tmp_path: Path, rendezvous: str
) -> None:
    """Two nodes, then one, then two with three devices: the losses are those of the undisturbed run, and every move is
    told on both."""
    source = source_of("mlp", tmp_path)
    plan = Planner(source).plans[1, 1]
    settings = {
        "steps": STEPS,
        "data": "synthetic",
        "loss": "tests.torchrun.node_rank:slow_alone",
    }
    nodes = Nodes(tmp_path, rendezvous, plan, source.name, **settings)
    first, second = nodes.start(FIRST, 1, most=2), nodes.start(SECOND, 1, most=2)
    nodes.wait_for(lambda line: line.startswith(f"step {KILLED_AFTER:4d}"))
    kill_node(SECOND)
    with pytest.raises(RunError, match=r"agent of this node was killed \(signal 9\)"):
        second.result(WAIT_SECONDS)
    nodes.wait_for(lambda line: "go on from step" in line)
    second = nodes.start(SECOND, 2, most=2)
    (measured, is_first), (theirs, is_second) = (
        first.result(WAIT_SECONDS),
        second.result(WAIT_SECONDS),
    )
    assert theirs == measured
    assert is_first != is_second
    expected = train_reference(plan, source, steps=STEPS, data="synthetic").losses
    assert [measured.losses_by_step[step] for step in range(STEPS)] == pytest.approx(
        expected, abs=1e-5
    )
    lost, moved, grown, gone_on = (
        each
        for each in measured.decisions
        if "drift_of_pipeline_rank_0" not in each.figures
    )
    assert [each.kind for each in (lost, moved, grown, gone_on)] == [
        "lost",
        "moved",
        "moved",
        "moved",
    ]
    assert lost.text.startswith("nodes or ranks of 2 nodes of 1 device were lost")
    assert lost.figures["devices_lost"] == 1
    assert moved.step == lost.figures["steps_kept"] == measured.segments[1].first_step
    assert lost.step - moved.step < 2 * EVERY, (
        "from the last checkpoint; one more may have been on its way to the disk"
    )
    assert [segment.devices for segment in measured.segments] == [2, 1]
    assert grown.figures["gain_seconds"] > grown.figures["move_seconds"] > 0
    assert grown.step % EVERY == 0
    assert measured.first_step == grown.step == gone_on.step, (
        "a move loses no step at all"
    )
    assert len(measured.ranks) == 3


def test_a_slow_rank_loses_layers_without_new_processes(
    tmp_path: Path, rendezvous: str
) -> None:
    """Its two stages are found slow, and the same ranks go on by another plan, from the checkpoint of that step."""
    source = load_model(SLOW_LAYER)
    planner = Rebalancer(source)
    nodes = Nodes(
        tmp_path,
        rendezvous,
        planner.begin,
        source.name,
        steps=SLOW_STEPS,
        data="synthetic",
    )
    measured, _ = nodes.start(FIRST, 2).result(WAIT_SECONDS)
    expected = train_reference(
        planner.begin, source, steps=SLOW_STEPS, data="synthetic"
    ).losses
    assert [
        measured.losses_by_step[step] for step in range(SLOW_STEPS)
    ] == pytest.approx(expected, abs=1e-5)
    moved = measured.decisions[0]
    assert moved.kind == "moved", moved.text
    assert "pipeline rank 1 takes" in moved.text
    assert (measured.plan_id, measured.first_step) == (planner.after.id, moved.step)
    assert not any("go on from step" in line for line in nodes.lines), (
        "there was no other rendezvous"
    )


def test_a_mistake_of_the_users_ends_the_run(tmp_path: Path, rendezvous: str) -> None:
    """At once, for it would come again; what was trained until then is told on every node."""
    source = source_of("mlp", tmp_path)
    plan = Planner(source).plans[(1,)]
    settings = {
        "steps": 2,
        "data": "synthetic",
        "loss": "tests.torchrun.node_rank:failing",
    }
    nodes = Nodes(tmp_path, rendezvous, plan, source.name, **settings)
    with pytest.raises(
        RunError, match=r"(?s)rank 0 failed first in step 1:.*this loss has a mistake"
    ):
        nodes.start(FIRST, 1).result(WAIT_SECONDS)
    assert [line.split()[1] for line in nodes.lines if line.startswith("step")] == ["0"]
    (left,) = nodes.left
    assert (left.steps, left.devices, left.unfinished[:14]) == (
        1,
        "1 x cpu",
        "rank 0 failed ",
    )
