"""A model that reads values of its tensors, from its profile to a run on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = "tests.profiler.graphs:halting"
DEVICE = {
    "id": "cpu",
    "memory_bytes": 4 * 10**9,
    "peak_flops_per_second": {"fp32": 5e10},
    "memory_bandwidth_bytes_per_second": 1e10,
}


def _planner(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "planner", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


@pytest.mark.torchrun
def test_a_model_that_reads_values_is_planned_and_trained_on_two_ranks(tmp_path: Path):
    """It is planned for a data split, and two ranks, which may take different ways, lose what one process loses."""
    cluster, job, plan = (str(tmp_path / name) for name in ("cluster.json", "job.json", "plan.json"))
    link = {"latency_seconds": 1e-4, "bandwidth_bytes_per_second": 1e9}
    group = {"device": DEVICE, "nodes": 1, "devices_per_node": 2, "intra_node": link}
    Path(cluster).write_text(json.dumps({"node_groups": [group]}))
    wanted = {"global_batch_size": 16, "sequence_length": 0, "precision": "fp32", "optimizer": "sgd"}
    Path(job).write_text(json.dumps(wanted | {"constraints": {"data_parallel_degree": 2}}))
    planned = _planner("plan", "--model", MODEL, "--cluster", cluster, "--job", job, "-o", plan)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(Path(plan).read_text())["layout"]["data_parallel_degree"] == 2
    steps = ("--steps", "2", "--data", "synthetic", "--reference-steps", "2")
    run = _planner("run", plan, "--model", MODEL, *steps)
    assert run.returncode == 0, run.stderr
