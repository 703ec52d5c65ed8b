"""Bounds of parts of a cluster against the best plan of each part."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from planner.cost import TICK_SECONDS, workload
from planner.search import plan
from planner.search.part_bounds import PartBounds
from planner.search.parts import parts_of
from planner.spec import Cluster, Job, ModelProfile, Plan
from tests.builders import cluster, job, layer, link, profile, request
from tests.search.test_mixed import Case, cases
from tests.strategies import Instance, instances


def no_part_beats_its_bound(model: ModelProfile, machines: Cluster, step: Job, most: int = 100) -> None:
    """Each part searched as a cluster of its own; of many the largest."""
    parts = parts_of(machines)[-most:]
    for part, least in zip(parts, PartBounds(workload(model, machines, step), parts).least, strict=True):
        found = plan(request(model, part.cluster, step, top=0), model)
        if isinstance(found, Plan) and found.layout.devices == part.devices:  # else slow nodes are left out
            assert least <= round(found.prediction.step_seconds / TICK_SECONDS)


@settings(max_examples=25)
@given(instances())
def test_no_part_beats_its_bound(instance: Instance) -> None:
    """Where nothing is bounded away no plan is faster; what has no layout at all has none."""
    no_part_beats_its_bound(instance.profile, instance.cluster, instance.job)


@settings(max_examples=5)
@given(cases())
def test_no_part_of_several_node_groups_beats_its_bound(case: Case) -> None:
    """Nor where devices and links differ, and some of them are left out."""
    no_part_beats_its_bound(case.profile, case.cluster, case.job, most=3)


def test_bounds_are_the_step_where_nothing_waits() -> None:
    """Layers without tails: on one device all work, on four nodes as many parts of it; with an odd batch, the rank that
    has one micro-batch more."""
    model, machines = profile(layer(forward=1e-3) * 4), cluster(4, nodes=4, inter=link(1e15))

    def seconds(samples: int) -> list[float]:
        ticks = PartBounds(workload(model, machines, job(samples)), parts_of(machines)).least
        return [each * TICK_SECONDS for each in ticks]

    assert seconds(24) == pytest.approx([24 * 12e-3 / count for count in (1, 2, 3, 4)])
    assert seconds(25)[3] >= 25 * 12e-3 / 4 + 1e-3 / 2


def test_parts_without_a_layout_are_bounded_by_infinity() -> None:
    """Three samples and two layers make work for no more than six devices."""
    model, machines = profile(layer() * 2), cluster(8, nodes=8, inter=link(1e9, 1e-5))
    ticks = PartBounds(workload(model, machines, job(3)), parts_of(machines)).least
    assert [devices for devices, each in enumerate(ticks, start=1) if math.isinf(each)] == [5, 7, 8]
