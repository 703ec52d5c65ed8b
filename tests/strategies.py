"""What hypothesis draws for planning: small models, clusters and jobs of every kind that the planner prices.

All costs are whole microseconds and whole bytes; link speeds are primes, so that no rounding stands on its edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from hypothesis import strategies as st

from planner.spec.cluster import Cluster
from planner.spec.job import Job
from planner.spec.profile import (
    Collective,
    LayerProfile,
    Measurement,
    ModelProfile,
    Operation,
)
from tests.builders import Draft, cluster, job, link, profile

_MODES = (
    ("none",),
    ("none",),
    ("none", "full"),
    ("none", "selective", "full"),
    ("none", "attention", "linear"),
)
_MOST_MODE_CHOICES = 12
_SHAPES = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (6, 2), (8, 1), (8, 2))
"""(devices, nodes)."""


@dataclass(frozen=True)
class Instance:
    """What a plan is asked for."""

    profile: ModelProfile
    cluster: Cluster
    job: Job


def seconds() -> st.SearchStrategy[float]:
    """Up to 30 microseconds, whole ones."""
    return st.integers(1, 30).map(lambda value: value * 1e-6)


def sizes(most: int = 1000) -> st.SearchStrategy[int]:
    """Bytes or elements; often nothing."""
    return st.one_of(st.just(0), st.integers(1, most))


@st.composite
def drafts(draw: st.DrawFn, kind: str, optimizer: float | None) -> Draft:
    """One kind of layer."""
    parameters = draw(sizes())
    frozen = draw(st.sampled_from((0, 0, parameters // 2, parameters)))
    return Draft(
        kind=kind,
        forward=draw(seconds()),
        backward_input=draw(seconds()),
        backward_weight=draw(seconds()),
        parameters=parameters,
        frozen=frozen,
        matrices=draw(st.integers(0, parameters - frozen)),
        factored=draw(st.integers(0, parameters - frozen)),
        activation=draw(sizes(5000)),
        kept=draw(sizes(100)),
        output=draw(sizes()),
        temporary=draw(sizes()),
        optimizer=optimizer,
        modes=draw(st.sampled_from(_MODES)),
        recompute=draw(st.one_of(st.just(0.0), seconds())),
        drift=draw(st.sampled_from((0.0, 0.0, 2e-6, -2e-6, -10e-6))),
        exchange=draw(sizes()),
        flops=draw(st.integers(0, 1000)),
    )


@st.composite
def models(draw: st.DrawFn, most_layers: int = 8) -> ModelProfile:
    """A model of a few kinds of layers, some with shared parameters and skips."""
    optimizer = draw(st.sampled_from((0.0, 3e-6, None)))
    kinds = [draw(drafts(kind, optimizer)) for kind in "abc"[: draw(st.integers(1, 3))]]
    layers = [
        draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(2, most_layers)))
    ]
    while prod(len(one.modes) for one in layers) > _MOST_MODE_CHOICES:
        layers.pop()
    places = st.integers(0, len(layers) - 1)
    pairs = st.sets(places, min_size=2, max_size=2).map(
        lambda pair: tuple(sorted(pair))
    )
    has_two = len(layers) > 1
    edges = draw(st.lists(st.tuples(pairs, sizes()), max_size=2)) if has_two else []
    users = st.sets(places, min_size=2, max_size=3).map(
        lambda found: tuple(sorted(found))
    )
    shared, shares_frozen = (
        draw(st.lists(users, max_size=1)) if has_two else [],
        draw(st.booleans()),
    )
    found = profile(
        layers,
        sizes=draw(st.sampled_from(((1,), (1, 2), (2, 4)))),
        degrees=draw(st.sampled_from(((1,), (1, 2)))),
        edges=[(*pair, size) for pair, size in edges],
        shared=[
            (one, most)
            for one in shared
            if (most := least(layers, one, frozen=shares_frozen))
        ],
        shares_frozen=shares_frozen,
    )
    told_for = draw(st.sampled_from((0, 0, 7, 4096)))
    longer = tuple(
        edge.model_copy(update={"sequence_length": told_for}) for edge in found.edges
    )
    split = draw(st.sampled_from((None, None, *SPLITS)))
    told = (
        tuple(map(with_operations, found.layers))
        if split == "context"
        else found.layers
    )
    more = tuple(also_split(layer, split) for layer in told) if split else told
    return found.model_copy(update={"edges": longer, "layers": more})


def least(layers: Sequence[Draft], users: Iterable[int], *, frozen: bool) -> int:
    """What all of these layers have, of what is frozen or of what is trained."""
    return min(
        one.frozen if frozen else one.parameters - one.frozen
        for one in (layers[user] for user in users)
    )


def with_operations(layer: LayerProfile) -> LayerProfile:
    """The layer with rows that list kernels: attention, and a product that reads its weights again for every chunk."""

    def kernels(row: Measurement) -> tuple[Operation, ...]:
        gradients: Any = "input" if layer.frozen_parameters else None
        attention, product = (
            row.forward_flops // 3,
            row.forward_flops - row.forward_flops // 3,
        )
        return (
            Operation(kind="attention", count=1, flops=attention, bytes=61),
            Operation(
                kind="matmul",
                count=1,
                flops=product,
                bytes=401,
                m=8,
                n=3,
                k=5,
                gradients=gradients,
            ),
        )

    rows = tuple(
        row.model_copy(update={"operations": kernels(row)})
        for row in layer.measurements
    )
    return layer.model_copy(update={"measurements": rows})


SPLITS = (
    "sequence",
    "context",
    "expert",
    "sequence and context",
    "sequence and expert",
)
"""What `also_split` knows."""


def also_split(layer: LayerProfile, how: str) -> LayerProfile:
    """The layer with rows of ranks that split it otherwise besides: faster, leaner, and with an exchange."""
    return layer.model_copy(
        update={"measurements": (*layer.measurements, *_split_rows(layer, how))}
    )


def _split_rows(layer: LayerProfile, how: str) -> Iterator[Measurement]:
    group = "tensor" if how == "sequence" else how.rpartition(" ")[2]
    exchanges = tuple(
        Collective.model_validate(
            {
                "group": group,
                "phase": phase,
                "operation": operation,
                "bytes": 101,
                "count": 1,
            }
        )
        for phase, operation in (
            ("forward", "all_gather"),
            ("backward", "reduce_scatter"),
        )
    )
    for row in layer.measurements:
        if (row.tensor_parallel_degree > 1) != how.startswith("sequence"):
            continue
        shared = {"sequence_parallel": True}
        experts = {
            "expert_parallel_degree": 2,
            "local_parameters": layer.parameters - layer.parameters // 4,
            "local_expert_parameters": layer.parameters // 4,
            "local_frozen_expert_parameters": layer.frozen_parameters // 8,
        }
        pieces = {
            "context_parallel_degree": 2,
            "forward_seconds": 0.5 * (row.forward_seconds or 0.0),
        }
        every: dict[str, dict[str, Any]] = {
            "sequence": shared,
            "context": pieces,
            "sequence and context": shared | pieces,
            "expert": experts,
            "sequence and expert": shared | experts,
        }
        leaner = {
            "activation_bytes": row.activation_bytes // 2,
            "collectives": (*row.collectives, *exchanges),
        }
        yield row.model_copy(update=every[how] | leaner)


@st.composite
def clusters(draw: st.DrawFn, memory_bytes: int = 10**9) -> Cluster:
    """Up to eight devices on up to two nodes."""
    devices, nodes = draw(st.sampled_from(_SHAPES))
    return cluster(
        devices,
        nodes=nodes,
        intra=link(
            draw(st.sampled_from((1.0e12 + 39, 1.0e8 + 7))),
            draw(st.sampled_from((0.0, 1e-6))),
        ),
        inter=link(
            draw(st.sampled_from((1.0e10 + 19, 1.0e7 + 19))),
            draw(st.sampled_from((0.0, 5e-6))),
        ),
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_second=1.0e9 + 7,
        reserved_bytes=1000,
    )


@st.composite
def instances(draw: st.DrawFn, most_layers: int = 8) -> Instance:
    """A small request; every device has room for everything."""
    step = job(
        draw(st.sampled_from((2, 4, 6, 8, 16))),
        optimizer=draw(
            st.sampled_from(("sgd", "adam", "adafactor", "muon", "adam-8bit"))
        ),
        precision=draw(st.sampled_from(("bf16", "bf16-mixed"))),
    )
    return Instance(draw(models(most_layers)), draw(clusters()), step)
