"""Profiles, clusters and jobs in one line, for every test that plans, prices or checks.

    profile(layer(forward=2e-3) * 4)                      four equal layers
    profile(layer(), layer(kind="head", parameters=10))   two different ones
    cluster(devices=8, memory_bytes=10**9)                one node of inline devices
    job(batch=8, pipeline_parallel_degree=4)              keywords are constraints

Defaults are chosen to be seen through: costs scale exactly with the micro-batch size and shrink exactly with the
tensor-parallel degree, links have no latency, devices no overhead, the optimizer takes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.spec.cluster import Cluster, DeviceSpec, Link, NodeGroup
from planner.spec.job import Job
from planner.spec.plan import Options, PlanRequest
from planner.spec.profile import (
    Collective,
    LayerProfile,
    Measurement,
    ModelProfile,
    RecomputeMode,
    SharedParameters,
    SkipEdge,
)

DEVICE = "toy"
SEQUENCE_LENGTH = 128
GIGABYTE = 10**9


_AGAIN = {"none": 0.0, "selective": 0.5, "attention": 0.6, "linear": 0.9, "full": 1.0}
"""Share of the forward that runs again."""
_SAVED = {"none": 1.0, "selective": 0.5, "attention": 0.4, "linear": 0.2, "full": 0.0}
"""Share of what a layer saves besides what every mode saves."""


@dataclass(frozen=True)
class Draft:
    """One layer, with costs of one sample on one rank."""

    kind: str = "block"
    name: str | None = None
    """None: its kind and its place in the model."""
    forward: float = 1e-3
    """Seconds."""
    backward_input: float | None = None
    """Seconds; None: as long as the forward."""
    backward_weight: float | None = None
    parameters: int = 0
    frozen: int = 0
    """Those of the parameters that are not trained."""
    matrices: int | None = None
    """Elements of hidden matrices among the others, 100 FLOPs each in a Muon step; None: not known."""
    factored: int | None = None
    """Numbers that Adafactor keeps; None: not known."""
    activation: int = 0
    """Bytes, as the following."""
    output: int = 0
    temporary: int = 0
    flops: int = 0
    """Of the forward; twice that of the backward."""
    optimizer: float | None = 0.0
    """Seconds; None: priced by the bytes that it moves."""
    modes: tuple[RecomputeMode, ...] = ("none",)
    recompute: float | None = None
    """Seconds of full recomputation; None: as long as the forward. Selective takes half of it, rounded down."""
    kept: int = 0
    """Activation bytes under full recomputation."""
    drift: float = 0.0
    """Seconds that every pass of a recomputing row was measured longer than the plain row's: the noise of measuring."""
    exchange: int = 0
    """Bytes all-reduced in forward, and again in backward, when tensor-parallel."""

    def profile(
        self,
        name: str,
        sizes: Iterable[int],
        degrees: Iterable[int],
        sequence_length: int,
    ) -> LayerProfile:
        """The layer, measured at every micro-batch size and tensor-parallel degree."""
        rows = [
            self._row(size, degree, mode, sequence_length)
            for size in sizes
            for degree in degrees
            for mode in self.modes
        ]
        return LayerProfile(
            name=name,
            kind=self.kind,
            modules=(f"model.{name}",),
            parameters=self.parameters,
            frozen_parameters=self.frozen,
            measurements=tuple(rows),
        )

    def _row(
        self, size: int, degree: int, mode: RecomputeMode, sequence_length: int
    ) -> Measurement:
        share = size / degree
        of_input = self.forward if self.backward_input is None else self.backward_input
        of_weight = (
            self.forward if self.backward_weight is None else self.backward_weight
        )
        drift = 0.0 if mode == "none" else self.drift
        again = _AGAIN[mode]
        more = self.activation - self.kept
        saved = self.kept + int(_SAVED[mode] * more)
        phases = ("forward", "backward") if self.exchange and degree > 1 else ()
        return Measurement(
            micro_batch_size=size,
            sequence_length=sequence_length,
            tensor_parallel_degree=degree,
            recompute=mode,
            forward_flops=self.flops * size // degree,
            backward_input_flops=self.flops * size // degree,
            backward_weight_flops=self.flops * size // degree,
            recompute_flops=int(again * self.flops * size // degree),
            forward_seconds=max(0.0, self.forward + drift) * share,
            backward_input_seconds=max(0.0, of_input + drift) * share,
            backward_weight_seconds=max(0.0, of_weight + drift) * share,
            recompute_seconds=again
            * share
            * (self.forward if self.recompute is None else self.recompute),
            optimizer_seconds=None
            if self.optimizer is None
            else self.optimizer / degree,
            local_matrix_elements=None
            if self.matrices is None
            else self.matrices // degree,
            local_muon_flops=None
            if self.matrices is None
            else 100 * self.matrices // degree,
            local_factored_elements=None
            if self.factored is None
            else self.factored // degree,
            activation_bytes=saved * size // degree,
            output_bytes=self.output * size,
            temporary_bytes=self.temporary * size // degree,
            collectives=tuple(
                Collective(
                    phase=phase,
                    operation="all_reduce",
                    bytes=self.exchange * size,
                    count=1,
                )
                for phase in phases
            ),
            source="measured",
        )


def layer(kind: str = "block", **costs: Any) -> tuple[Draft, ...]:
    """One layer; ``layer(...) * 4`` is four of them. See `Draft` for the costs."""
    return (Draft(kind=kind, **costs),)


def profile(
    *parts: Sequence[Draft],
    sizes: Iterable[int] = (1,),
    degrees: Iterable[int] = (1,),
    sequence_length: int = SEQUENCE_LENGTH,
    edges: Iterable[tuple[int, int, int]] = (),
    shared: Iterable[tuple[tuple[int, ...], int]] = (),
    shares_frozen: bool = False,
    **fields: Any,
) -> ModelProfile:
    """A model of these layers, measured on the toy device.

    Args:
        parts: layers, as `layer` makes them.
        sizes: micro-batch sizes that were measured.
        degrees: tensor-parallel degrees that were measured.
        sequence_length: tokens per sample.
        edges: skips, as (from, to, bytes per sample) with layers by position.
        shared: shared parameters, as (layers by position, elements).
        shares_frozen: these are not trained.
        fields: further fields of the profile.
    """
    drafts = [draft for part in parts for draft in part]
    names = [draft.name or f"{draft.kind}{place}" for place, draft in enumerate(drafts)]
    known: dict[Draft, LayerProfile] = {}
    layers = []
    for name, draft in zip(names, drafts, strict=True):
        plain = replace(draft, name=None)
        if plain not in known:
            known[plain] = draft.profile(name, sizes, degrees, sequence_length)
        layers.append(
            known[plain].model_copy(
                update={"name": name, "modules": (f"model.{name}",)}
            )
        )
    return ModelProfile(
        **{
            "model": "toy-model",
            "device": DEVICE,
            "dtype": "bf16",
            "tokens_per_sample": sequence_length,
            "layers": tuple(layers),
            "edges": tuple(
                SkipEdge(from_=names[a], to=names[b], bytes=size)
                for a, b, size in edges
            ),
            "shared_parameters": tuple(
                SharedParameters(
                    names=tuple(f"model.{names[user]}.weight" for user in users),
                    layers=tuple(names[user] for user in users),
                    parameters=elements,
                    factored_elements=elements // 3,
                    frozen=shares_frozen,
                )
                for users, elements in shared
            ),
            **fields,
        }
    )


def device(memory_bytes: int = 10 * GIGABYTE, **fields: Any) -> DeviceSpec:
    """An accelerator without overheads: 100 TFLOP/s, 1 TB/s."""
    return DeviceSpec(
        **{
            "id": DEVICE,
            "memory_bytes": memory_bytes,
            "peak_flops_per_second": {"bf16": 1e14, "fp16": 1e14},
            "achievable_fraction": 1.0,
            "memory_bandwidth_bytes_per_second": 1e12,
            "launch_seconds": 0.0,
            "reserved_bytes": 0,
            **fields,
        }
    )


def link(bandwidth: float = 1e11, latency: float = 0.0) -> Link:
    """Bytes per second of one device and direction, and seconds per hop."""
    return Link(latency_seconds=latency, bandwidth_bytes_per_second=bandwidth)


def cluster(
    devices: int = 4,
    *,
    nodes: int = 1,
    intra: Link | None = None,
    inter: Link | None = None,
    **device_fields: Any,
) -> Cluster:
    """Equal nodes of toy devices, `devices` of them in all; keywords are fields of the device."""
    return Cluster(
        node_groups=(
            NodeGroup(
                device=device(**device_fields),
                nodes=nodes,
                devices_per_node=devices // nodes,
                intra_node=intra or link(),
                inter_node=inter or link(1e10),
            ),
        )
    )


def job(
    batch: int = 8,
    *,
    headroom: float = 0,
    optimizer: Any = "adam",
    precision: Any = "bf16-mixed",
    **wishes: Any,
) -> Job:
    """A step of this many samples; further keywords are constraints, e.g. ``schedule="gpipe"``."""
    return Job(
        global_batch_size=batch,
        sequence_length=SEQUENCE_LENGTH,
        precision=precision,
        optimizer=optimizer,
        memory_headroom=headroom,
        constraints=wishes,
    )


def request(
    model: ModelProfile, machines: Cluster, step: Job, **options: Any
) -> PlanRequest:
    """The request for a plan, with a time limit that no small instance reaches."""
    from planner.search import make_request

    return make_request(
        model, machines, step, Options(**{"time_limit_seconds": 600, **options})
    )


def four_equal_layers(**costs: Any) -> ModelProfile:
    """Four layers of 1 ms forward and 2 ms backward: every split into 1, 2 or 4 stages is balanced."""
    return profile(layer(parameters=1000, activation=4000, output=1000, **costs) * 4)


def fat_embedding() -> ModelProfile:
    """A tied embedding that holds most parameters and little work, as small language models have, and its head."""
    return profile(
        layer(
            "embedding",
            forward=1e-4,
            parameters=50_000_000,
            activation=1000,
            output=100_000,
        ),
        layer(forward=1e-3, parameters=1_000_000, activation=2_000_000, output=100_000)
        * 4,
        layer(
            "head",
            forward=1.5e-3,
            parameters=50_000_000,
            activation=100_000,
            output=400_000,
            temporary=800_000,
        ),
        shared=[((0, 5), 50_000_000)],
    )


def with_skip() -> ModelProfile:
    """A small U: the first layer's output is needed by the last one too."""
    return profile(
        layer(output=1_000_000, activation=1_000_000, parameters=1000) * 4,
        edges=[(0, 3, 5_000_000)],
    )


def with_recompute(**costs: Any) -> ModelProfile:
    """Four layers that keep much, and can recompute instead."""
    costs = {
        "activation": 1_000_000,
        "kept": 100_000,
        "output": 100_000,
        "parameters": 1000,
        **costs,
    }
    return profile(layer(modes=("none", "full"), **costs) * 4)
