"""Bounds of parts of a cluster against the best plan of each part."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from planner.cost import TICK_SECONDS, workload
from planner.cost.nearest import Split
from planner.search import plan
from planner.search.bounds.parts import PartBounds
from planner.search.layouts.order_classes import SEARCHED, class_of
from planner.search.layouts.orders import Order
from planner.search.parts import parts_of
from planner.spec import Cluster, Job, ModelProfile, NodeGroup, Plan
from planner.spec.cluster import ScaleUp
from planner.spec.layout import Layout
from tests.brute_force import Priced
from tests.builders import cluster, device, job, layer, link, profile, request
from tests.search.test_brute_force import memory_of, tight_instances
from tests.search.test_mixed import Case, cases
from tests.strategies import Instance, instances


def no_part_beats_its_bound(
    model: ModelProfile, machines: Cluster, step: Job, most: int = 100
) -> None:
    """Each part searched as a cluster of its own; of many the largest."""
    parts = parts_of(machines)[-most:]
    for part, least in zip(
        parts, PartBounds(workload(model, machines, step), parts).least, strict=True
    ):
        found = plan(request(model, part.cluster, step, top=0), model)
        if (
            isinstance(found, Plan) and found.layout.devices == part.devices
        ):  # else slow nodes are left out
            assert least <= round(found.prediction.step_seconds / TICK_SECONDS)


@settings(max_examples=25)
@given(instances())
def test_no_part_beats_its_bound(instance: Instance) -> None:
    """Where nothing is bounded away no plan is faster; what has no layout at all has none."""
    no_part_beats_its_bound(instance.profile, instance.cluster, instance.job)


@settings(max_examples=25)
@given(tight_instances())
def test_no_stage_map_that_fits_beats_the_bound_of_its_family(
    case: tuple[Instance, list[Priced]],
) -> None:
    """On devices that hold exactly what some stage map needs: all that fit are no faster, whatever they recompute; nor
    where the bound is asked whether each step of these is too little."""
    instance, priced = case
    (whole,) = parts_of(instance.cluster)[-1:]
    bounds = PartBounds(
        workload(instance.profile, instance.cluster, instance.job), [whole]
    )
    fitting = sorted(
        (one for one in priced if one.peak <= memory_of(instance)),
        key=lambda one: one.nanoseconds,
    )
    places = {_place(one.layout): one.nanoseconds for one in reversed(fitting)}
    for limit in (0, *sorted(set(places.values()))):
        bounds.raised_to([limit])
        families = bounds.of_part(whole)
        for (family, stage, kind), fastest in places.items():
            assert bounds.least[0] <= families[family][stage, kind] <= fastest


def _place(layout: Layout) -> tuple[tuple[Split, int, int], int, int]:
    """Family, ZeRO stages and class of the order: what bounds tell apart."""
    return _family(layout), max(0, layout.zero_stage - 1), _class(layout)


def _family(layout: Layout) -> tuple[Split, int, int]:
    degrees = (
        layout.tensor_parallel_degree,
        layout.context_parallel_degree,
        layout.expert_parallel_degree,
    )
    split = (layout.micro_batch_size, *degrees, layout.sequence_parallel)
    return split, layout.sequence_chunks, layout.pipeline_parallel_degree


def _class(layout: Layout) -> int:
    return class_of(
        Order(layout.schedule, layout.virtual_stages_per_rank, layout.recompute)
    )


def test_memory_and_time_bound_what_the_work_does_not() -> None:
    """Where a rank holds what one micro-batch saves and no more, the step takes as long as all of it must lie there; on
    large devices, as long as the work."""
    model = profile(layer(activation=1_000_000) * 4)

    def seconds(memory_bytes: int) -> float:
        machines = cluster(4, memory_bytes=memory_bytes, intra=link(1e15))
        (whole,) = parts_of(machines)[-1:]
        families = PartBounds(workload(model, machines, job(64)), [whole]).of_part(
            whole
        )
        return families[(1, 1, 1, 1, False), 1, 4].min() * TICK_SECONDS

    assert seconds(1_100_000) > 1.2 * seconds(30_000_000)


def test_layers_of_no_bytes_need_no_room() -> None:
    """Devices whose process fills them hold any number of them: the bound of (K16) counted none, and was above the
    step."""
    model = profile(layer(parameters=0, optimizer=0.0, activation=0, output=0) * 2)
    machines, step = (
        cluster(2, memory_bytes=1000, reserved_bytes=1000),
        job(2, pipeline_parallel_degree=2),
    )
    found = plan(request(model, machines, step), model)
    assert isinstance(found, Plan)
    (whole,) = parts_of(machines)[-1:]
    bounds, ticks = (
        PartBounds(workload(model, machines, step), [whole]),
        found.prediction.step_seconds / TICK_SECONDS,
    )
    bounds.raised_to([2 * ticks])
    families = bounds.of_part(whole)
    assert families[_family(found.layout)][0, _class(found.layout)] <= round(ticks)


def test_layers_that_stand_deep_hold_more() -> None:
    """Where the first ranks have to recompute, but all ranks together would not, (K13) tells more than (K9)."""
    model = profile(
        layer(activation=1_000_000, kept=100_000, modes=("none", "full")) * 16
    )
    machines = cluster(4, memory_bytes=11_500_000, intra=link(1e15))
    (whole,) = parts_of(machines)[-1:]
    bounds = PartBounds(workload(model, machines, job(64)), [whole])
    family, searched = ((1, 1, 1, 1, False), 1, 4), (0, SEARCHED)
    before = bounds.of_part(whole)[family][searched]
    bounds.raised_to([1.05 * before])
    assert bounds.of_part(whole)[family][searched] > before


@settings(max_examples=5)
@given(cases())
def test_no_part_of_several_node_groups_beats_its_bound(case: Case) -> None:
    """Nor where devices and links differ, and some of them are left out."""
    no_part_beats_its_bound(case.profile, case.cluster, case.job, most=3)


def test_bounds_are_the_step_where_nothing_waits() -> None:
    """Layers without tails: on one device all work, on four nodes as many parts of it; with an odd batch, the rank that
    has one micro-batch more."""
    model, machines = (
        profile(layer(forward=1e-3) * 4),
        cluster(4, nodes=4, inter=link(1e15)),
    )

    def seconds(samples: int) -> list[float]:
        ticks = PartBounds(
            workload(model, machines, job(samples)), parts_of(machines)
        ).least
        return [each * TICK_SECONDS for each in ticks]

    assert seconds(24) == pytest.approx([24 * 12e-3 / count for count in (1, 2, 3, 4)])
    assert seconds(25)[3] >= 25 * 12e-3 / 4 + 1e-3 / 2


def test_parts_without_a_layout_are_bounded_by_infinity() -> None:
    """Three samples and two layers make work for no more than six devices."""
    model, machines = profile(layer() * 2), cluster(8, nodes=8, inter=link(1e9, 1e-5))
    ticks = PartBounds(workload(model, machines, job(3)), parts_of(machines)).least
    assert [
        devices for devices, each in enumerate(ticks, start=1) if math.isinf(each)
    ] == [5, 7, 8]


def test_some_devices_of_a_node_are_bounded_by_what_they_hold() -> None:
    """Where what fits on no part of a node is known, none of these is entered."""
    model, machines = (
        profile(layer(parameters=1_000_000) * 4),
        cluster(8, nodes=2, memory_bytes=20_000_000),
    )
    parts = parts_of(machines)
    bounds = PartBounds(workload(model, machines, job(64)), parts)
    assert [part.devices for part in parts] == [1, 2, 3, 4, 8]
    assert all(map(bounds.is_known, parts))
    assert [math.isinf(ticks) for ticks in bounds.least] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_devices_that_other_links_join_are_not_bounded_by_their_node() -> None:
    """Pairs under a bridge, in a node of four over its host: two devices may be faster than the node tells."""
    bridge = ScaleUp(
        topology="mesh",
        domain_devices=2,
        bandwidth_bytes_per_second=1e11,
        latency_seconds=1e-6,
    )
    pairs = device(scale_up=bridge, host_bandwidth_bytes_per_second=1e10)
    machines = Cluster(
        node_groups=(NodeGroup(device=pairs, nodes=1, devices_per_node=4),)
    )
    parts = parts_of(machines)
    bounds = PartBounds(workload(profile(layer() * 4), machines, job(64)), parts)
    assert {part.devices: bounds.is_known(part) for part in parts} == {
        1: True,
        2: False,
        3: True,
        4: True,
    }
