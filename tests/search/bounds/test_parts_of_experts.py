"""Bounds of parts of a cluster at the size of a real mixture of experts, against what its layouts take."""

from __future__ import annotations

from functools import cache

import pytest

from planner.cost import TICK_SECONDS, workload
from planner.profiler.counted import counted_profile
from planner.search import predict
from planner.search.bounds.parts import PartBounds
from planner.search.layouts.order_classes import class_of
from planner.search.layouts.orders import Order
from planner.search.parts import parts_of
from planner.spec import Cluster, Job, ModelProfile, NodeGroup
from planner.spec.layout import PredictionLayout, RecomputeWord, ZeroStage

DEVICE = "h200-sxm-141gb"
DEVICES_PER_NODE, DEVICES, SAMPLES = 8, 248, 2048
TENSOR, PIPELINE, EXPERT, MICRO_BATCH = 1, 31, 8, 1
ORDERS: tuple[tuple[str, int, RecomputeWord], ...] = (
    ("1f1b", 1, "per-layer"),
    ("interleaved-1f1b", 2, "per-layer"),
    ("eager-1f1b", 1, "full"),
)
"""One for each class whose layers may recompute."""
SHARED_OUT: tuple[tuple[ZeroStage, int | None], ...] = ((1, None), (3, EXPERT))


@cache
def model() -> ModelProfile:
    """Of the catalogue; counted once."""
    return counted_profile("deepseek-v3", sequence_length=4096)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order[0])
def test_no_layout_with_experts_beats_its_bound(
    order: tuple[str, int, RecomputeWord],
) -> None:
    """Whatever shares out states, and however near the limit: (K11) to (K13) raise no bound above the step."""
    nodes = DEVICES // DEVICES_PER_NODE
    machines = Cluster(
        node_groups=(
            NodeGroup(device=DEVICE, nodes=nodes, devices_per_node=DEVICES_PER_NODE),
        )
    )
    split = {
        "tensor_parallel_degree": TENSOR,
        "expert_parallel_degree": EXPERT,
        "micro_batch_size": MICRO_BATCH,
    }
    step = Job(global_batch_size=SAMPLES, sequence_length=4096, constraints=split)
    work, (whole,) = workload(model(), machines, step), parts_of(machines)[-1:]
    family = (MICRO_BATCH, TENSOR, 1, EXPERT, False), 1, PIPELINE
    for zero, shards in SHARED_OUT:
        found = predict(model(), machines, step, _layout(order, zero, shards))
        ticks = round(found.prediction.step_seconds / TICK_SECONDS)
        assert found.fits
        for limit in (1.00001, 1.01, 1.5):
            bounds = PartBounds(work, [whole])
            plain = bounds.of_part(whole)[family][
                max(0, zero - 1), class_of(Order(*order))
            ]
            bounds.raised_to([limit * ticks])
            raised = bounds.of_part(whole)[family][
                max(0, zero - 1), class_of(Order(*order))
            ]
            assert 0 < plain <= raised <= ticks


def _layout(
    order: tuple[str, int, RecomputeWord], zero: ZeroStage, shards: int | None
) -> PredictionLayout:
    schedule, virtual, recompute = order
    return PredictionLayout(
        data_parallel_degree=DEVICES // PIPELINE,
        tensor_parallel_degree=TENSOR,
        pipeline_parallel_degree=PIPELINE,
        expert_parallel_degree=EXPERT,
        micro_batch_size=MICRO_BATCH,
        zero_stage=zero,
        zero_shard_degree=shards,
        schedule=schedule,
        virtual_stages_per_rank=virtual,
        recompute=recompute,
    )
