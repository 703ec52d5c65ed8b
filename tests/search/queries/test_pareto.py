"""The Pareto front against a search of every number of devices and every share of the memory by itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from planner.check import check
from planner.search import Callbacks, plan
from planner.spec import Cluster, Job, ModelProfile, Plan
from tests.builders import cluster, job, link, request, with_recompute
from tests.strategies import Instance, instances

SHARES = (1.0, 0.75, 0.5, 0.25)
Figures = tuple[int, float, int]
"""Devices, step, bytes of the fullest device."""


def part(machines: Cluster, nodes: int, devices_per_node: int) -> Cluster:
    """Some of a cluster of one group, written out."""
    update = {"nodes": nodes, "devices_per_node": devices_per_node}
    return machines.model_copy(
        update={"node_groups": (machines.node_groups[0].model_copy(update=update),)}
    )


def parts(machines: Cluster) -> list[Cluster]:
    """Divisors of the nodes, and of one node's devices."""
    group = machines.node_groups[0]
    found = [
        part(machines, 1, n)
        for n in range(1, group.devices_per_node)
        if group.devices_per_node % n == 0
    ]
    return found + [
        part(machines, n, group.devices_per_node)
        for n in range(1, group.nodes + 1)
        if group.nodes % n == 0
    ]


def each_alone(model: ModelProfile, machines: Cluster, step: Job) -> list[Figures]:
    """The fastest plan of every part and share, and the memory that it might have used: of plans that are as fast as
    each other, either may stand on the front."""
    memory = machines.node_groups[0].device.memory_bytes  # type: ignore[union-attr]
    found = []
    for one in parts(machines):
        for share in SHARES:
            headroom = float(memory - int(share * memory))
            lean = step.model_copy(update={"memory_headroom": headroom})
            best = plan(request(model, one, lean, top=0), model)
            if isinstance(best, Plan):
                found.append(
                    (one.devices, best.prediction.step_seconds, int(share * memory))
                )
    return found


def front_of(
    model: ModelProfile, machines: Cluster, step: Job
) -> tuple[Plan, list[Figures]]:
    """The plan, and the figures of its front."""
    found = plan(request(model, machines, step, pareto=True), model)
    assert isinstance(found, Plan)
    return found, [
        (point.devices, point.step_seconds, point.peak_bytes) for point in found.pareto
    ]


def is_reached(one: Figures, front: list[Figures]) -> bool:
    """Is there a point with no more devices and memory that is as fast?"""
    return any(
        point[0] <= one[0] and point[1] <= one[1] * (1 + 1e-9) and point[2] <= one[2]
        for point in front
    )


@settings(max_examples=30)
@given(instances())
def test_nothing_beats_the_front(instance: Instance) -> None:
    """Every part's fastest plans are reached by a point, and no point is faster than its part's fastest."""
    model, machines, step = instance.profile, instance.cluster, instance.job
    alone = each_alone(model, machines, step)
    if not any(devices == machines.devices for devices, _, _ in alone):
        return
    found, front = front_of(model, machines, step)
    assert all(is_reached(one, front) for one in alone)
    for devices, seconds, _ in front:
        assert seconds >= min(step for count, step, _ in alone if count == devices) * (
            1 - 1e-9
        )
    assert check(found, model).problems == ()


def tight() -> tuple[ModelProfile, Cluster, Job]:
    """Layers that recompute where memory is short."""
    model = with_recompute(activation=20_000_000, kept=1_000_000, parameters=100_000)
    machines = cluster(
        8,
        nodes=2,
        memory_bytes=100_000_000,
        intra=link(1e11, 1e-6),
        inter=link(1e10, 1e-5),
    )
    return model, machines, job(16)


def test_less_memory_is_slower() -> None:
    """On as many devices, what needs less memory takes longer, by as much as a search with that much memory says."""
    model, machines, step = tight()
    _, front = front_of(model, machines, step)
    most = [one for one in front if one[0] == 8]
    assert len(most) > 1
    assert sorted(most, key=lambda one: one[1]) == sorted(most, key=lambda one: -one[2])
    for _, seconds, peak in most:
        lean = plan(
            request(
                model,
                machines,
                step.model_copy(update={"memory_headroom": float(10**8 - peak)}),
            ),
            model,
        )
        assert isinstance(lean, Plan)
        assert lean.prediction.step_seconds == pytest.approx(seconds)


def test_the_plan_is_a_point() -> None:
    """The fastest plan on all devices is on the front, most devices first."""
    model, machines, step = tight()
    found, front = front_of(model, machines, step)
    assert front[0][:2] == (found.layout.devices, found.prediction.step_seconds)
    assert [one[0] for one in front] == sorted((one[0] for one in front), reverse=True)
    assert len({one[0] for one in front}) > 1


def test_prices_stand_beside_where_they_are_known() -> None:
    """Half the devices at the same step cost half."""
    model, machines, step = tight()
    group = machines.node_groups[0].model_copy(update={"price_per_hour": 3.6})
    found, _ = front_of(
        model, machines.model_copy(update={"node_groups": (group,)}), step
    )
    assert found.pareto[0].cost_per_token == pytest.approx(found.cost_per_token)
    for point in found.pareto:
        assert point.cost_per_token == pytest.approx(
            point.step_seconds * point.devices * 1e-3 / (16 * 128)
        )


def test_a_front_that_was_stopped_says_so() -> None:
    """What is not proven is no point, and the explanation tells that there may be more."""
    model, machines, step = tight()
    calls = [0]

    def count() -> bool:
        calls[0] += 1
        return False

    plan(request(model, machines, step), model, callbacks=Callbacks(should_stop=count))
    left = iter([False] * calls[0])
    asked = request(model, machines, step, pareto=True)
    found = plan(
        asked, model, callbacks=Callbacks(should_stop=lambda: next(left, True))
    )
    assert isinstance(found, Plan)
    assert found.pareto == ()
    assert "incomplete" in found.explanation[-1]


def test_no_front_unless_asked() -> None:
    """It takes many searches."""
    model, machines, step = tight()
    found = plan(request(model, machines, step), model)
    assert isinstance(found, Plan)
    assert found.pareto == ()


def test_node_groups_in_any_order() -> None:
    """The plan of two node groups stands on the front, whichever group its first stages stand on."""
    model, group = with_recompute(), cluster(2).node_groups[0]
    assert not isinstance(group.device, str)
    small = group.device.model_copy(
        update={"memory_bytes": group.device.memory_bytes // 2}
    )
    machines = Cluster(node_groups=(group.model_copy(update={"device": small}), group))
    for each in (machines, Cluster(node_groups=tuple(reversed(machines.node_groups)))):
        found, front = front_of(model, each, job(8, pipeline_parallel_degree=4))
        assert (
            found.prediction.step_seconds,
            max(row.peak_bytes for row in found.prediction.memory),
        ) in {figures[1:] for figures in front}
        assert check(found, model).problems == ()
