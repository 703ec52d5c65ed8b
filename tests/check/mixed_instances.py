"""Requests and layouts on node groups that differ: what hypothesis draws to be planned, and checked."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import assume
from hypothesis import strategies as st

from planner.check.schedules import SCHEDULES
from planner.search.engine.split_backward import splits_backward
from planner.spec import Cluster, Layout, ModelProfile, NodeGroup
from planner.spec.cluster import ScaleUp
from planner.spec.layout import PredictionLayout
from tests.builders import job, link
from tests.check.instances import Given, models
from tests.check.mixed import as_counted, devices_of, group, placed
from tests.check.schedules import PLANNABLE, numbers

_FAST, _SLOW = 1.0e12 + 39, 1.0e7 + 19
"""Bytes per second; primes, so that no rounding stands on its edge."""


@st.composite
def node_groups(draw: st.DrawFn, cell: int, *, is_equal: bool) -> tuple[NodeGroup, ...]:
    """Up to three groups, whose devices are whole cells."""
    shapes = [one for one in _SHAPES if one[0] * one[1] % cell == 0]
    count = draw(st.integers(1, 3))
    return tuple(
        draw(_node_group(*draw(st.sampled_from(shapes)), is_equal=is_equal))
        for _ in range(count)
    )


@st.composite
def _node_group(
    draw: st.DrawFn, nodes: int, devices: int, *, is_equal: bool
) -> NodeGroup:
    domain, slower = (
        draw(st.sampled_from((None, 2, 8))),
        draw(st.sampled_from((1.0, 1.7, 3.1))),
    )
    speed = 1.0 if is_equal else slower
    return group(
        speed,
        nodes=nodes,
        devices=devices,
        intra=draw(
            st.none()
            | st.builds(
                link, st.sampled_from((_FAST, 1.0e8 + 7)), st.sampled_from((0.0, 1e-6))
            )
        ),
        inter=draw(
            st.none()
            | st.builds(link, st.sampled_from((1.0e10 + 19, _SLOW)), st.just(5e-6))
        ),
        peak_flops_per_second={"bf16": (1.0e9 + 7) / speed},
        memory_bandwidth_bytes_per_second=(1.0e9 + 7) / speed,
        host_bandwidth_bytes_per_second=1.0e9 + 21,
        network_bandwidth_bytes_per_second=1.0e9 + 9,
        memory_bytes=draw(st.sampled_from((10**10, 10**10 + 5000))),
        allocation_overhead=draw(st.sampled_from((0.0, 0.07))),
        reserved_bytes=draw(st.sampled_from((None, 1000))),
        scale_up=domain
        and ScaleUp(
            topology="switch",
            domain_devices=domain,
            bandwidth_bytes_per_second=1.0e11 + 3,
        ),
    )


_SHAPES = ((1, 1), (1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (3, 2), (2, 4))
"""(nodes, devices of each)."""


@st.composite
def mixed_layouts(draw: st.DrawFn) -> Given:
    """Documents and layout; every device has room for everything."""
    tensor, context = draw(st.sampled_from(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2))))
    is_equal = draw(st.booleans())
    groups = draw(node_groups(tensor * context, is_equal=is_equal))
    cells = sum(one.nodes * one.devices_per_node for one in groups) // (
        tensor * context
    )
    pipeline = draw(
        st.sampled_from(
            [each for each in range(1, min(cells, 6) + 1) if cells % each == 0]
        )
    )
    data = cells // pipeline
    shares = draw(
        st.none() | st.lists(st.integers(1, 4), min_size=data, max_size=data).map(tuple)
    )
    micro_batches = sum(shares) if shares else data * draw(st.integers(1, 4))
    simple = Layout(
        data_parallel_degree=data,
        tensor_parallel_degree=tensor,
        pipeline_parallel_degree=pipeline,
        context_parallel_degree=context,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        micro_batch_size=draw(st.integers(1, 2)),
        schedule=draw(st.sampled_from(("gpipe", "1f1b"))),
        rank_order=draw(st.sampled_from(("tp-cp-dp-pp", "tp-cp-pp-dp"))),
        micro_batch_shares=shares,
        recompute=draw(st.sampled_from(("none", "selective", "full", "per-layer"))),
    )
    return draw(_given(simple, groups, micro_batches, is_equal=is_equal))


@st.composite
def layouts_of_equal_replicas(draw: st.DrawFn) -> Given:
    """A whole number of stages on each of two or three node groups, under any schedule."""
    tensor, context = draw(st.sampled_from(((1, 1), (1, 1), (2, 1), (1, 2))))
    name, is_equal, data = (
        draw(st.sampled_from(PLANNABLE)),
        draw(st.booleans()),
        draw(st.integers(1, 2)),
    )
    shape = draw(
        st.sampled_from(
            [
                one
                for one in numbers(name)
                if one.ranks > 1 and one.sequence_chunks == 1 and one.units < 99
            ]
        )
    )
    first = draw(st.integers(1, shape.ranks - 1))
    second = draw(st.sampled_from(sorted({1, shape.ranks - first})))
    ranks = [each for each in (first, second, shape.ranks - first - second) if each]
    groups = tuple(
        draw(_node_group(each, data * tensor * context, is_equal=is_equal))
        for each in ranks
    )
    words = (
        "none",
        "selective",
        "full",
        *(("per-layer",) if name in ("gpipe", "1f1b") else ()),
    )
    simple = Layout(
        data_parallel_degree=data,
        tensor_parallel_degree=tensor,
        pipeline_parallel_degree=shape.ranks,
        context_parallel_degree=context,
        virtual_stages_per_rank=shape.virtual_stages,
        micro_batch_size=draw(st.integers(1, 2)),
        schedule=name,
        recompute="none"
        if SCHEDULES[name].recomputes_ahead or splits_backward(name)
        else draw(st.sampled_from(words)),
    )
    return draw(_given(simple, groups, data * shape.micro_batches, is_equal=is_equal))


@st.composite
def _given(
    draw: st.DrawFn,
    simple: Layout,
    groups: tuple[NodeGroup, ...],
    micro_batches: int,
    *,
    is_equal: bool,
) -> Given:
    """With ZeRO and experts, a model and its cuts."""
    layout = draw(_sharded(simple, groups))
    model = draw(models(layout))
    step = job(
        micro_batches * layout.micro_batch_size,
        optimizer=draw(st.sampled_from(("sgd", "adam", "adafactor", "adam-8bit"))),
        precision=draw(st.sampled_from(("bf16", "bf16-mixed"))),
    )
    stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
    cuts = st.sets(
        st.integers(1, len(model.layers) - 1), min_size=stages - 1, max_size=stages - 1
    )
    counts = tuple(
        stop - start
        for start, stop in pairwise((0, *sorted(draw(cuts)), len(model.layers)))
    )
    profile = _of(model, groups, is_equal=is_equal)
    assume(
        is_equal
        or any(row.forward_flops for one in profile.layers for row in one.measurements)
    )
    return Given(
        profile,
        Cluster(node_groups=groups),
        step,
        PredictionLayout(**layout.model_dump(), layers_per_stage=counts),
    )


@st.composite
def _sharded(draw: st.DrawFn, layout: Layout, groups: tuple[NodeGroup, ...]) -> Layout:
    """With ZeRO and experts, as far as replicas that differ run them."""
    replicas, differ = (
        layout.data_parallel_degree * layout.context_parallel_degree,
        replicas_differ(layout, groups),
    )
    divisors = [each for each in range(1, replicas + 1) if replicas % each == 0]
    expert = 1 if differ else draw(st.sampled_from(divisors))
    zero = draw(st.sampled_from((0, 1) if differ else (0, 1, 2, 3)))
    shards = [
        each
        for each in divisors[1:-1]
        if each % expert == 0 and zero and _is_near(layout, groups, each)
    ]
    fields = {
        "expert_parallel_degree": expert,
        "zero_stage": zero,
        "zero_shard_degree": draw(st.sampled_from((None, *shards))),
    }
    return Layout.model_validate(layout.model_dump() | fields)


def _is_near(layout: Layout, groups: tuple[NodeGroup, ...], shards: int) -> bool:
    """Do so many neighbours among the replicas always stand in one node group?"""
    homes = [
        place
        for place, one in enumerate(groups)
        for _ in range(one.nodes * one.devices_per_node)
    ]
    members: dict[tuple[int, int], set[int]] = {}
    for row in placed(layout, devices_of(groups)):
        neighbours = (row.data * layout.context_parallel_degree + row.context) // shards
        members.setdefault((row.pipeline, neighbours), set()).add(homes[row.rank])
    return all(len(each) == 1 for each in members.values())


def replicas_differ(layout: Layout, groups: tuple[NodeGroup, ...]) -> bool:
    """Have data-parallel ranks other shares or node groups than each other?"""
    homes = [
        place
        for place, one in enumerate(groups)
        for _ in range(one.nodes * one.devices_per_node)
    ]
    rows = placed(layout, devices_of(groups))
    kinds = {
        (
            layout.micro_batch_shares[replica] if layout.micro_batch_shares else 0,
            tuple(homes[row.rank] for row in rows if row.data == replica),
        )
        for replica in range(layout.data_parallel_degree)
    }
    return len(kinds) > 1


def _of(
    model: ModelProfile, groups: tuple[NodeGroup, ...], *, is_equal: bool
) -> ModelProfile:
    """Measured on the one device of all groups; counted, where they differ."""
    device = groups[0].device
    assert not isinstance(device, str)
    return (
        model.model_copy(update={"device": device.id})
        if is_equal
        else as_counted(model)
    )
