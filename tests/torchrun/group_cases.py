"""Trains plans that were made for two node groups on four ranks, and one process; run on its ranks as ``-m``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from planner.executor import Executor
from planner.executor.reference import train_reference
from planner.profiler.models import ModelSource
from planner.search import plan
from planner.spec import Cluster, Job, ModelProfile, Plan
from tests.builders import layer, profile, request
from tests.check.mixed import FORWARD_FLOPS, as_counted, group
from tests.torchrun.cases import on_ranks, source_of_case

MODEL = "llama"
CASES: dict[str, dict[str, Any]] = {
    "interleaved-1f1b": {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2},
    "zb-h1": {"pipeline_parallel_degree": 4},
    "zb-v": {"pipeline_parallel_degree": 2, "zero_stage": 1},
}
"""By schedule: what the plan is held to besides."""
_SETTINGS: dict[str, Any] = {"data": "stdlib", "seed": 5, "learning_rate": 1e-2}
_STEPS = 3


def planned(schedule: str, source: ModelSource) -> Plan:
    """The plan that the search makes for the model on a fast and a slow node of two devices."""
    groups = [
        group(slower, peak_flops_per_second={"fp32": 1e14 / slower})
        for slower in (1.0, 2.0)
    ]
    machines = Cluster(node_groups=tuple(groups))
    wishes = {"schedule": schedule, **CASES[schedule]}
    job = Job(
        global_batch_size=8,
        sequence_length=16,
        precision="fp32",
        optimizer="adamw",
        constraints=wishes,
    )
    model = _profile(source)
    found = plan(request(model, machines, job, top=0), model)
    assert isinstance(found, Plan)
    return found


def _profile(source: ModelSource) -> ModelProfile:
    """Every layer as long as the others."""
    cut = source.cut().layers
    draft = layer(flops=FORWARD_FLOPS, optimizer=None, parameters=1000)
    equal = as_counted(profile(draft * len(cut), sequence_length=16))
    pairs = zip(equal.layers, cut, strict=True)
    layers = tuple(
        one.model_copy(update={"name": each.name, "modules": each.modules})
        for one, each in pairs
    )
    return equal.model_copy(
        update={"model": source.name, "dtype": "fp32", "layers": layers}
    )


def run(schedule: str) -> dict[str, Any]:
    """Losses on four ranks and of one process, and what the plan is like; on rank 0."""
    source = source_of_case(MODEL)
    found = planned(schedule, source)
    measured = Executor(
        found, source, device="cpu", timeout_seconds=60, **_SETTINGS
    ).train(_STEPS)
    if dist.get_rank() > 0:
        return {}
    return {
        "losses": measured.losses,
        "alone": train_reference(found, source, steps=_STEPS, **_SETTINGS).losses,
        "sizes": [len(stage.layers) for stage in found.stages],
        "nodes": sorted({row.node for row in found.placement}),
    }


def _results(chosen: list[str], folder: Path) -> dict[str, Any]:
    return {name: run(name) for name in chosen or CASES}


def main() -> None:
    """Run all cases, and tell their losses."""
    on_ranks(_results)


if __name__ == "__main__":
    main()
