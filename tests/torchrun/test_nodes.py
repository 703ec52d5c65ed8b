"""Nodes of different sizes: the printed commands, started side by side on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.executor.launch import MASTER_PORT, node_commands
from planner.executor.reference import train_reference
from planner.spec import Cluster, MeasuredRun, NodeGroup, Plan, read
from planner.spec.cluster import DeviceSpec
from tests.executor.plans import make_plan, source_of
from tests.ports import free_port

pytestmark = pytest.mark.torchrun
STEPS = 2


def _on_unequal_nodes(layers: list[str]) -> Plan:
    """Three replicas, the first one alone on node 2 with half of the micro-batches, the others together on node 0."""
    plan = make_plan(layers, data=3, shares=(2, 1, 1), zero=1, sequence_length=0)
    places = (
        {"node": 2, "device": 0},
        {"node": 0, "device": 0},
        {"node": 0, "device": 1},
    )
    rows = tuple(
        row.model_copy(update=place)
        for row, place in zip(plan.placement, places, strict=True)
    )
    device = DeviceSpec(id="cpu", memory_bytes=1 << 30)
    slow = NodeGroup(name="slow", device=device, nodes=2, devices_per_node=2)
    cluster = Cluster(
        node_groups=(
            slow,
            NodeGroup(name="fast", device=device, nodes=1, devices_per_node=1),
        )
    )
    request = plan.request.model_copy(update={"cluster": cluster})
    return plan.model_copy(update={"placement": rows, "request": request})


def test_nodes_of_different_sizes_train_as_one_process(tmp_path: Path) -> None:
    """torchrun numbers the ranks as the plan does: one on the first node, two on the second."""
    source = source_of("mlp", tmp_path)
    plan = _on_unequal_nodes([layer.name for layer in source.cut().layers])
    path = tmp_path / "plan.json"
    path.write_text(plan.model_dump_json(by_alias=True))
    settings = {
        "steps": STEPS,
        "learning_rate": 1e-3,
        "data": "synthetic",
        "device": "cpu",
        "timeout_seconds": 60.0,
    }
    started = node_commands(plan, path, model=source.name, **settings)  # type: ignore[arg-type]
    assert [(each.group, each.processes) for each in started] == [
        ("fast", 1),
        ("slow", 2),
    ]
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": search,
        "PYTHONPATH": str(Path(__file__).parents[2]),  # the models of these tests
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    port = str(free_port())
    agents = []
    for each in started:
        text = f"exec {each.text.replace(str(MASTER_PORT), port)}"
        agents.append(
            subprocess.Popen(
                text, shell=True, env=environment, cwd=tmp_path, stderr=subprocess.PIPE
            )
        )
    try:
        told = [agent.communicate(timeout=300)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
    assert [agent.returncode for agent in agents] == [0, 0], told
    measured = read(MeasuredRun, tmp_path / "measured.json")
    expected = train_reference(
        plan, source, steps=STEPS, data="synthetic", learning_rate=1e-3
    )
    assert measured.losses == pytest.approx(expected.losses, abs=1e-5)
    forwards = [
        [
            one.action
            for one in measured.actions
            if (one.rank, one.action[:2]) == (rank, "0F")
        ]
        for rank in (0, 2)
    ]
    assert forwards == [["0F0", "0F1"], ["0F0"]]
