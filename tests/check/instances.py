"""Requests and layouts of every dimension: what hypothesis draws to be planned, and checked.

The profile is measured just as the layout splits it: collectives in every group, experts among the parameters. Costs
are such that no rounding stands on its edge (see `tests.strategies`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from planner.check.schedules import SCHEDULES
from planner.search.engine.split_backward import splits_backward
from planner.spec.cluster import Cluster
from planner.spec.job import Job
from planner.spec.layout import Layout, PredictionLayout
from planner.spec.profile import Collective, LayerProfile, Measurement, ModelProfile
from tests.builders import Draft, cluster, job, link, profile
from tests.check.schedules import PLANNABLE, numbers
from tests.strategies import drafts, least, sizes

GROUPS = ("tensor", "context", "expert")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True)
class Given:
    """A layout, and the request that it is planned for."""

    profile: ModelProfile
    cluster: Cluster
    job: Job
    layout: PredictionLayout
    """With its partition."""


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout that its schedule takes, and its number of micro-batches."""
    name = draw(st.sampled_from(PLANNABLE))
    shape = draw(
        st.sampled_from(
            [one for one in numbers(name) if one.ranks <= 4 and one.micro_batches <= 8]
        )
    )
    data, context = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    replicas, tensor, zero = (
        data * context,
        draw(st.integers(1, 2)),
        draw(st.integers(0, 3)),
    )
    expert = draw(
        st.sampled_from(
            [each for each in range(1, replicas + 1) if replicas % each == 0]
        )
    )
    groups = [
        each
        for each in range(2, replicas if zero else 0)
        if replicas % each == 0 and each % expert == 0
    ]
    recompute = (
        ("none", "selective", "full")
        if shape.virtual_stages > 1
        else ("none", "selective", "full", "per-layer")
    )
    layout = Layout(
        data_parallel_degree=data,
        tensor_parallel_degree=tensor,
        pipeline_parallel_degree=shape.ranks,
        context_parallel_degree=context,
        expert_parallel_degree=expert,
        virtual_stages_per_rank=shape.virtual_stages,
        zero_stage=zero,
        zero_shard_degree=draw(st.sampled_from((None, *groups))),
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        micro_batch_size=draw(st.integers(1, 2)),
        schedule=name,
        sequence_chunks=shape.sequence_chunks,
        recompute="none"
        if SCHEDULES[name].recomputes_ahead or splits_backward(name)
        else draw(st.sampled_from(recompute)),
    )
    return layout, shape.micro_batches


@st.composite
def collectives(draw: st.DrawFn) -> tuple[Collective, ...]:
    """Exchanges of one layer."""
    return tuple(
        Collective(
            group=draw(st.sampled_from(GROUPS)),
            phase=draw(st.sampled_from(("forward", "backward"))),
            operation=draw(st.sampled_from(OPERATIONS)),
            bytes=draw(sizes()),
            count=draw(st.integers(1, 2)),
        )
        for _ in range(draw(st.integers(0, 3)))
    )


def split(layer: LayerProfile, layout: Layout, **changes: Any) -> LayerProfile:
    """The layer as measured under the layout; keywords are further fields of every row."""
    degrees = {
        name: getattr(layout, name)
        for name in (
            "context_parallel_degree",
            "expert_parallel_degree",
            "sequence_parallel",
        )
    }

    def one(row: Measurement) -> Measurement:
        return row.model_copy(update={**degrees, **changes})

    return layer.model_copy(
        update={"measurements": tuple(map(one, layer.measurements))}
    )


@st.composite
def models(draw: st.DrawFn, layout: Layout) -> ModelProfile:
    """A small model with as many layers as the layout has stages, or a few more."""
    stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
    optimizer = draw(st.sampled_from((0.0, 3.00037e-6, None)))
    kinds = [draw(drafts(kind, optimizer)) for kind in "ab"]
    places = range(max(2, stages) + draw(st.integers(0, 3)))
    layers = [draw(st.sampled_from(kinds)) for _ in places]
    pairs = st.sets(st.sampled_from(places), min_size=2, max_size=2).map(
        lambda pair: tuple(sorted(pair))
    )
    edges = draw(st.lists(st.tuples(pairs, sizes()), max_size=2))
    users = draw(
        st.lists(st.sets(st.sampled_from(places), min_size=2, max_size=3), max_size=1)
    )
    if layout.zero_stage and layout.pipeline_parallel_degree > 1:
        users = [{0, *one} for one in users]  # a vocabulary; others are refused
    shares_frozen = draw(st.booleans())
    plain = profile(
        layers,
        sizes=(layout.micro_batch_size,),
        degrees=(layout.tensor_parallel_degree,),
        edges=[(first, last, size) for (first, last), size in edges],
        shared=[
            (tuple(sorted(one)), most)
            for one in users
            if (most := least(layers, one, frozen=shares_frozen))
        ],
        shares_frozen=shares_frozen,
    )
    changes = {kind.kind: draw(_of_kind(kind, layout)) for kind in kinds}
    return plain.model_copy(
        update={
            "layers": tuple(
                split(one, layout, **changes[one.kind]) for one in plain.layers
            )
        }
    )


@st.composite
def _of_kind(draw: st.DrawFn, kind: Draft, layout: Layout) -> dict[str, Any]:
    """Exchanges, experts and frozen parameters of one kind of layer."""
    least, frozen = (
        -(-whole // layout.tensor_parallel_degree)
        for whole in (kind.parameters, kind.frozen)
    )
    experts = draw(st.sampled_from((0, least // 2, least)))
    return {
        "collectives": draw(collectives()),
        "local_parameters": draw(st.sampled_from((None, least))),
        "local_expert_parameters": experts,
        "local_frozen_parameters": draw(st.sampled_from((None, frozen))),
        "local_frozen_expert_parameters": draw(
            st.sampled_from((0, min(experts, frozen) // 2, min(experts, frozen)))
        ),
    }


@st.composite
def given_layouts(draw: st.DrawFn) -> Given:
    """Documents and layout; every device has room for everything."""
    layout, micro_batches = draw(layouts())
    model = draw(models(layout))
    nodes = draw(
        st.sampled_from([each for each in (1, 2, 3, 4) if layout.devices % each == 0])
    )
    machines = cluster(
        layout.devices,
        nodes=nodes,
        intra=link(
            draw(st.sampled_from((1.0e12 + 39, 1.0e8 + 7))),
            draw(st.sampled_from((0.0, 1e-6))),
        ),
        inter=link(
            draw(st.sampled_from((1.0e10 + 19, 1.0e7 + 19))),
            draw(st.sampled_from((0.0, 5e-6))),
        ),
        memory_bandwidth_bytes_per_second=1.0e9 + 7,
        allocation_overhead=draw(st.sampled_from((0.0, 0.07))),
        reserved_bytes=draw(st.sampled_from((None, 1000))),
    )
    step = job(
        micro_batches * layout.data_parallel_degree * layout.micro_batch_size,
        optimizer=draw(
            st.sampled_from(("sgd", "adam", "adafactor", "muon", "adam-8bit"))
        ),
        precision=draw(st.sampled_from(("bf16", "bf16-mixed"))),
    )
    stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
    cuts = st.sets(
        st.integers(1, len(model.layers) - 1), min_size=stages - 1, max_size=stages - 1
    )
    starts = (0, *sorted(draw(cuts)), len(model.layers))
    counts = tuple(stop - start for start, stop in pairwise(starts))
    return Given(
        model,
        machines,
        step,
        PredictionLayout(**layout.model_dump(), layers_per_stage=counts),
    )
