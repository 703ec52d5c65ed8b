"""What the tests of the command line share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import main
from planner.spec import (
    Cluster,
    DeviceSpec,
    Job,
    LayerProfile,
    Link,
    Measurement,
    ModelProfile,
    NodeGroup,
)


@dataclass(frozen=True)
class Ended:
    """A command that ended: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout, read as JSON."""
        return json.loads(self.out)


class Command:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str | Path) -> Ended:
        self._capsys.readouterr()
        code = main([str(word) for word in words])
        printed = self._capsys.readouterr()
        return Ended(code, printed.out, printed.err)


def tiny_profile(
    *, layers: int = 4, micro_batch_sizes: tuple[int, ...] = (1, 2), device: str = "cpu"
) -> ModelProfile:
    """Equal layers of 1000 parameters, 1 ms forward and 2 ms backward per sample, measured on a device."""
    rows = tuple(
        Measurement(
            micro_batch_size=size,
            sequence_length=8,
            recompute=mode,
            forward_flops=16_000 * size,
            backward_input_flops=16_000 * size,
            backward_weight_flops=16_000 * size,
            recompute_flops=16_000 * size if mode == "full" else 0,
            forward_seconds=1e-3 * size,
            backward_input_seconds=1e-3 * size,
            backward_weight_seconds=1e-3 * size,
            recompute_seconds=1e-3 * size if mode == "full" else None,
            optimizer_seconds=1e-5,
            activation_bytes=(1_000_000 if mode == "none" else 10_000) * size,
            output_bytes=10_000 * size,
            temporary_bytes=20_000 * size,
            source="measured",
        )
        for size in micro_batch_sizes
        for mode in ("none", "full")
    )
    return ModelProfile(
        model="tiny",
        device=device,
        device_spec=DeviceSpec(
            id=device, memory_bytes=10**9, peak_flops_per_second={"fp32": 1e10}
        ),
        tokens_per_sample=8,
        layers=tuple(
            LayerProfile(
                name=f"layer{index}",
                kind="block",
                modules=(str(index),),
                parameters=1000,
                measurements=rows,
            )
            for index in range(layers)
        ),
    )


def tiny_cluster(*, devices: int = 4, memory_bytes: int = 10**8) -> Cluster:
    """One node of CPU ranks that reserve nothing, linked at 1 GB/s."""
    spec = DeviceSpec(
        id="cpu",
        memory_bytes=memory_bytes,
        peak_flops_per_second={"fp32": 1e10},
        reserved_bytes=0,
    )
    link = Link(latency_seconds=1e-5, bandwidth_bytes_per_second=1e9)
    group = NodeGroup(device=spec, nodes=1, devices_per_node=devices, intra_node=link)
    return Cluster(name="tiny-cluster", node_groups=(group,))


def tiny_job(*, global_batch_size: int = 8) -> Job:
    """Samples of 8 tokens in fp32 with AdamW."""
    return Job(
        global_batch_size=global_batch_size,
        sequence_length=8,
        precision="fp32",
        optimizer="adamw",
    )


def write_question(
    folder: Path, profile: ModelProfile, cluster: Cluster, job: Job
) -> list[str]:
    """Write the three documents, and return the options that name them."""
    options = []
    for name, document in (("profile", profile), ("cluster", cluster), ("job", job)):
        path = folder / f"{name}.json"
        path.write_text(document.model_dump_json(by_alias=True), encoding="utf-8")
        options += [f"--{name}", str(path)]
    return options
