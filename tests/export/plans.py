"""Plans of every kind that exports must carry or refuse, of catalogue models, made without a search."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from planner.profiler.counted import counted_profile
from planner.search import make_request, plan_layout
from planner.spec import Cluster, Job, ModelProfile, Options, Plan, PredictionLayout
from planner.spec.job import COMPUTE_TYPE
from planner.spec.profile import RecomputeMode


def one_node(devices: int) -> Cluster:
    """H100s behind one switch."""
    return groups((1, devices, "h100-sxm5-80gb"))


def groups(*parts: tuple[int, int, str]) -> Cluster:
    """Node groups of (nodes, devices of each, catalogue id)."""
    found = [
        {
            "name": f"group{number}",
            "nodes": nodes,
            "devices_per_node": devices,
            "device": device,
        }
        for number, (nodes, devices, device) in enumerate(parts)
    ]
    return Cluster.model_validate({"node_groups": found})


def planned(
    model: str = "gpt2",
    cluster: Cluster | None = None,
    *,
    batch: int = 16,
    sequence_length: int = 256,
    headroom: float = 0.05,
    precision: Any = "bf16-mixed",
    optimizer: Any = "adamw",
    runtime: str = "planner",
    recomputed: Mapping[str, RecomputeMode] | None = None,
    **layout: Any,
) -> Plan:
    """The plan of a layout.

    Args:
        model: of the catalogue.
        cluster: None: one node of as many devices as the degrees multiply to.
        headroom: fraction or bytes, as in a job.
        runtime: of the job.
        recomputed: modes by layer, written into the finished plan.
        layout: fields of `PredictionLayout`.
    """
    wanted = PredictionLayout(**layout)
    dtype: Any = COMPUTE_TYPE[precision]
    profile = counted_profile(model, sequence_length=sequence_length, dtype=dtype)
    is_known = wanted.context_parallel_degree == 1 or runtime != "planner"
    profile = (
        profile if is_known else with_context(profile, wanted.context_parallel_degree)
    )
    job = Job(
        global_batch_size=batch,
        sequence_length=sequence_length,
        precision=precision,
        optimizer=optimizer,
        memory_headroom=headroom,
        runtime=runtime,
    )
    request = make_request(
        profile,
        cluster or one_node(wanted.devices),
        job,
        Options(),
        model=model if is_known else None,
    )
    found = plan_layout(request, profile, wanted)
    assert isinstance(found, Plan), found
    return with_modes(found, recomputed) if recomputed else found


def with_modes(plan: Plan, recomputed: Mapping[str, RecomputeMode]) -> Plan:
    """The plan, as if these layers recomputed so."""
    stages = []
    for stage in plan.stages:
        layers = [
            each.model_copy(update={"recompute": recomputed.get(each.name, "none")})
            for each in stage.layers
        ]
        stages.append(stage.model_copy(update={"layers": tuple(layers)}))
    layout = plan.layout.model_copy(update={"recompute": "per-layer"})
    return plan.model_copy(update={"layout": layout, "stages": tuple(stages)})


def with_context(profile: ModelProfile, degree: int) -> ModelProfile:
    """The profile with rows of context-parallel ranks, which the catalogue does not count: each works off its part."""
    layers = []
    for layer in profile.layers:
        split = (
            row.model_copy(update={"context_parallel_degree": degree})
            for row in layer.measurements
        )
        layers.append(
            layer.model_copy(update={"measurements": (*layer.measurements, *split)})
        )
    return profile.model_copy(update={"layers": tuple(layers)})


MIXED_NODES = groups((1, 4, "h100-sxm5-80gb"), (2, 2, "a100-sxm4-80gb"))
"""Groups of different devices, whose nodes have different numbers of them."""

LARGE_HOSTS = Cluster.model_validate(
    {
        "node_groups": [
            {
                "nodes": 1,
                "devices_per_node": 2,
                "device": "h100-sxm5-80gb",
                "host_memory_bytes": 10**12,
            },
        ]
    }
)
"""To which activations and states may be offloaded."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "one-device": {},
    "uneven-stages": {
        "pipeline_parallel_degree": 2,
        "data_parallel_degree": 2,
        "layers_per_stage": (5, 9),
    },
    "per-layer-recompute": {
        "pipeline_parallel_degree": 2,
        "batch": 64,
        "micro_batch_size": 4,
        "layers_per_stage": (11, 3),
        "recomputed": {
            **{f"transformer.h.{block}": "full" for block in range(4)},
            "transformer.h.4": "selective",
        },
    },
    "full-recompute": {"data_parallel_degree": 2, "recompute": "full"},
    "selective-recompute": {"data_parallel_degree": 2, "recompute": "selective"},
    "virtual-stages": {
        "pipeline_parallel_degree": 2,
        "virtual_stages_per_rank": 2,
        "schedule": "interleaved-1f1b",
        "layers_per_stage": (4, 3, 3, 4),
    },
    "zero-bubble": {"pipeline_parallel_degree": 2, "schedule": "zb-h1"},
    "zero-bubble-v": {
        "pipeline_parallel_degree": 2,
        "virtual_stages_per_rank": 2,
        "schedule": "zb-v",
        "layers_per_stage": (4, 3, 4, 3),
    },
    "gpipe": {"pipeline_parallel_degree": 4, "schedule": "gpipe"},
    "zero-1": {"data_parallel_degree": 4, "zero_stage": 1},
    "zero-2": {"data_parallel_degree": 4, "zero_stage": 2},
    "tensor-data-zero-3": {
        "model": "llama-3.2-1b",
        "data_parallel_degree": 4,
        "tensor_parallel_degree": 2,
        "sequence_parallel": True,
        "zero_stage": 3,
    },
    "hybrid-shards": {
        "data_parallel_degree": 4,
        "zero_stage": 3,
        "zero_shard_degree": 2,
    },
    "context": {"context_parallel_degree": 2, "data_parallel_degree": 2},
    "experts": {
        "model": "mixtral-8x7b",
        "cluster": groups((2, 8, "h200-sxm-141gb")),
        "expert_parallel_degree": 4,
        "data_parallel_degree": 8,
        "pipeline_parallel_degree": 2,
        "zero_stage": 1,
    },
    "nodes": {
        "cluster": groups((2, 2, "h100-sxm5-80gb")),
        "data_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
    },
    "pipelines-side-by-side": {
        "cluster": groups((2, 2, "h100-sxm5-80gb")),
        "data_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "rank_order": "tp-cp-pp-dp",
    },
    "mixed-nodes": {
        "cluster": MIXED_NODES,
        "data_parallel_degree": 2,
        "pipeline_parallel_degree": 4,
    },
    "uneven-shares": {
        "cluster": groups((1, 1, "h100-sxm5-80gb"), (1, 1, "a100-sxm4-80gb")),
        "data_parallel_degree": 2,
        "micro_batch_shares": (10, 6),
    },
    "sequence-chunks": {
        "pipeline_parallel_degree": 2,
        "schedule": "seq1f1b",
        "sequence_chunks": 2,
    },
    "activations-on-host": {
        "cluster": LARGE_HOSTS,
        "data_parallel_degree": 2,
        "activation_offload": True,
    },
    "states-on-host": {
        "cluster": LARGE_HOSTS,
        "data_parallel_degree": 2,
        "optimizer_offload": True,
    },
    "fp8": {"model": "llama-3.2-1b", "data_parallel_degree": 2, "precision": "fp8"},
    "half-precision-alone": {"data_parallel_degree": 2, "precision": "bf16"},
    "adafactor": {"data_parallel_degree": 2, "optimizer": "adafactor"},
    "convolutions": {
        "model": "resnet-50",
        "sequence_length": 0,
        "pipeline_parallel_degree": 2,
        "zero_stage": 0,
    },
    "unlike-halves": {
        "model": "t5-small",
        "pipeline_parallel_degree": 2,
        "sequence_length": 128,
    },
}
"""Arguments of `planned`, by what is special about the plan."""


@cache
def plan_of(name: str) -> Plan:
    """The plan of a name in `LAYOUTS`."""
    return planned(**LAYOUTS[name])
