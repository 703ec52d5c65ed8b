"""A model that reads values of its tensors is planned for."""

from __future__ import annotations

import json
from pathlib import Path

from planner.cli.main import main

MODEL = "tests.profiler.graphs:halting"
DEVICE = {
    "id": "cpu",
    "memory_bytes": 4 * 10**9,
    "peak_flops_per_second": {"fp32": 5e10},
    "memory_bandwidth_bytes_per_second": 1e10,
}


def test_a_model_that_reads_values_is_planned_for_a_data_split(tmp_path: Path):
    """Two ranks may take different ways; that they train as one process does is a case of `tests.torchrun.cases`."""
    cluster, job, plan = (
        str(tmp_path / name) for name in ("cluster.json", "job.json", "plan.json")
    )
    link = {"latency_seconds": 1e-4, "bandwidth_bytes_per_second": 1e9}
    group = {"device": DEVICE, "nodes": 1, "devices_per_node": 2, "intra_node": link}
    Path(cluster).write_text(json.dumps({"node_groups": [group]}))
    wanted = {
        "global_batch_size": 16,
        "sequence_length": 0,
        "precision": "fp32",
        "optimizer": "sgd",
    }
    Path(job).write_text(
        json.dumps(wanted | {"constraints": {"data_parallel_degree": 2}})
    )
    assert (
        main(["plan", "--model", MODEL, "--cluster", cluster, "--job", job, "-o", plan])
        == 0
    )
    assert json.loads(Path(plan).read_text())["layout"]["data_parallel_degree"] == 2
