"""A model that reads values of its tensors, from its profile to a run on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli.main import main

MODEL = "tests.profiler.graphs:halting"
DEVICE = {
    "id": "cpu",
    "memory_bytes": 4 * 10**9,
    "peak_flops_per_second": {"fp32": 5e10},
    "memory_bandwidth_bytes_per_second": 1e10,
}


@pytest.mark.torchrun
def test_a_model_that_reads_values_is_planned_and_trained_on_two_ranks(tmp_path: Path):
    """It is planned for a data split, and two ranks, which may take different ways, lose what one process loses."""
    cluster, job, plan = (str(tmp_path / name) for name in ("cluster.json", "job.json", "plan.json"))
    link = {"latency_seconds": 1e-4, "bandwidth_bytes_per_second": 1e9}
    group = {"device": DEVICE, "nodes": 1, "devices_per_node": 2, "intra_node": link}
    Path(cluster).write_text(json.dumps({"node_groups": [group]}))
    wanted = {"global_batch_size": 16, "sequence_length": 0, "precision": "fp32", "optimizer": "sgd"}
    Path(job).write_text(json.dumps(wanted | {"constraints": {"data_parallel_degree": 2}}))
    assert main(["plan", "--model", MODEL, "--cluster", cluster, "--job", job, "-o", plan]) == 0
    assert json.loads(Path(plan).read_text())["layout"]["data_parallel_degree"] == 2
    steps = ("--steps", "2", "--data", "synthetic", "--reference-steps", "2")
    assert main(["run", plan, "--model", MODEL, *steps]) == 0  # 1 when the losses differ
