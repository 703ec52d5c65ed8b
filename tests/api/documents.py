"""Small documents that requests are made of."""

from __future__ import annotations

from typing import Any

from planner.spec import LayerProfile, Measurement, ModelProfile

GIB = 1 << 30


def measurement(micro_batch_size: int) -> Measurement:
    """A measured row whose costs grow with the micro-batch."""
    return Measurement(
        micro_batch_size=micro_batch_size,
        sequence_length=128,
        forward_flops=10**9 * micro_batch_size,
        backward_input_flops=10**9 * micro_batch_size,
        backward_weight_flops=10**9 * micro_batch_size,
        forward_seconds=0.010 * micro_batch_size,
        backward_input_seconds=0.011 * micro_batch_size,
        backward_weight_seconds=0.009 * micro_batch_size,
        activation_bytes=(1 << 20) * micro_batch_size,
        output_bytes=(1 << 16) * micro_batch_size,
        temporary_bytes=1 << 16,
        source="measured",
    )


def four_equal_layers(name: str = "four-equal-layers") -> ModelProfile:
    """A measured model of four layers, one million parameters each."""
    rows = tuple(measurement(size) for size in (1, 2, 4))
    layers = tuple(
        LayerProfile(
            name=f"block{index}",
            kind="block",
            modules=(str(index),),
            parameters=10**6,
            measurements=rows,
        )
        for index in range(4)
    )
    return ModelProfile(
        model=name,
        device="cpu-rank",
        dtype="fp32",
        tokens_per_sample=128,
        layers=layers,
    )


def recomputable_layers() -> ModelProfile:
    """The same, with the choice to keep only a layer's input."""
    profile = four_equal_layers("recomputable-layers")
    plain = profile.layers[0].measurements
    full = [
        row.model_copy(
            update={
                "recompute": "full",
                "recompute_seconds": row.forward_seconds,
                "activation_bytes": 4096,
            }
        )
        for row in plain
    ]
    layers = [
        layer.model_copy(update={"measurements": (*plain, *full)})
        for layer in profile.layers
    ]
    return profile.model_copy(update={"layers": tuple(layers)})


def cluster(*, devices: int = 2, memory_bytes: int = GIB) -> dict[str, Any]:
    """One node of inline devices."""
    device = {"id": "cpu-rank", "memory_bytes": memory_bytes, "reserved_bytes": 0}
    link = {"latency_seconds": 1e-5, "bandwidth_bytes_per_second": 1e9}
    return {
        "node_groups": [
            {
                "device": device,
                "nodes": 1,
                "devices_per_node": devices,
                "intra_node": link,
            }
        ]
    }


def job(**changes: Any) -> dict[str, Any]:
    """A step of eight samples."""
    return {
        "global_batch_size": 8,
        "sequence_length": 128,
        "precision": "fp32",
        "optimizer": "adamw",
    } | changes


def plan_body(profile: ModelProfile | None = None, /, **changes: Any) -> dict[str, Any]:
    """What POST /v1/plans takes; a change to None leaves the field out."""
    document = (profile or four_equal_layers()).model_dump(mode="json", by_alias=True)
    body = {"profile": document, "cluster": cluster(), "job": job()} | changes
    return {name: value for name, value in body.items() if value is not None}
