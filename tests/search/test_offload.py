"""Offloading to the host's memory: search and cost model against brute force, which the validator's equations price."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import TICK_SECONDS, choose, evaluate, layout_costs, schedule_of, stage_memory, workload
from planner.search import plan
from planner.search.solve import bounded
from planner.spec import Infeasible, Plan
from planner.validate import check
from tests.brute_force import PARTITIONED, Priced, facts, layouts, price, price_all
from tests.builders import request
from tests.strategies import Instance, instances

_BANDWIDTHS = (499979687.0, 4999999937.0, 99999999977.0)
"""To the host: a layer's activations take about as long as its forward, a tenth of that, or next to nothing."""
_PLENTY = 10**9


def with_host(instance: Instance, bandwidth: float, memory_bytes: int, host_bytes: int) -> Instance:
    """The same request on devices of this size, each with so much of its host's memory."""
    group = instance.cluster.node_groups[0]
    device = group.device.model_copy(  # type: ignore[union-attr]
        update={"memory_bytes": memory_bytes, "host_bandwidth_bytes_per_second": bandwidth}
    )
    known = {"device": device, "host_memory_bytes": host_bytes * group.devices_per_node}
    cluster = instance.cluster.model_copy(update={"node_groups": (group.model_copy(update=known),)})
    return Instance(instance.profile, cluster, instance.job)


def fits(one: Priced, instance: Instance) -> bool:
    """In the memory of device and host."""
    work = workload(instance.profile, instance.cluster, instance.job)
    assert work.host_capacity_bytes is not None
    return one.peak <= work.capacity_bytes and max(one.hosts) <= work.host_capacity_bytes


@st.composite
def hosted_instances(draw: st.DrawFn) -> tuple[Instance, list[Priced]]:
    """A request whose devices and hosts hold exactly what some stage maps need, or a byte less; and all stage maps."""
    plain, bandwidth = draw(instances(most_layers=4)), draw(st.sampled_from(_BANDWIDTHS))
    roomy = with_host(plain, bandwidth, _PLENTY, _PLENTY)
    priced = price_all(roomy.profile, roomy.cluster, roomy.job)
    peaks = sorted({one.peak for one in priced}) or [1000]
    memory = peaks[draw(st.integers(0, len(peaks) // 2))] - draw(st.sampled_from((0, 0, 0, 1)))
    hosts = sorted({max(one.hosts) for one in priced if one.peak <= memory}) or [1000]
    host = hosts[draw(st.integers(0, len(hosts) - 1))] - draw(st.sampled_from((0, 0, 1)))
    return with_host(plain, bandwidth, max(1, memory), max(1, host)), priced


@settings(max_examples=40)
@given(hosted_instances())
def test_plan_is_the_optimum_with_a_host(case: tuple[Instance, list[Priced]]) -> None:
    """The plan takes exactly the least time of all that fit device and host, and holds; infeasible when none does."""
    instance, priced = case
    fitting = [one for one in priced if fits(one, instance)]
    found = plan(request(instance.profile, instance.cluster, instance.job, top=2), instance.profile)
    if not fitting:
        assert isinstance(found, Infeasible)
        assert found.search is None or found.search.optimal
        return
    assert isinstance(found, Plan)
    least = min(one.nanoseconds for one in fitting)
    assert found.prediction.step_seconds == pytest.approx(least * TICK_SECONDS, rel=1e-12)
    assert found.search.optimal
    assert check(found, instance.profile).problems == ()
    offloads = found.layout.activation_offload or found.layout.optimizer_offload
    plain = [one for one in fitting if not (one.layout.activation_offload or one.layout.optimizer_offload)]
    assert not offloads or all(one.nanoseconds > least for one in plain), "at a tie nothing is offloaded"


@settings(max_examples=25)
@given(hosted_instances(), st.data())
def test_cost_model_and_validator_agree_on_offloading(case: tuple[Instance, list[Priced]], data: st.DataObject) -> None:
    """Two programs written from the same equations give the same nanoseconds and bytes for any stage map."""
    instance, _ = case
    possible = [
        layout
        for layout in layouts(instance.profile, instance.cluster, instance.job)
        if layout.activation_offload or layout.optimizer_offload
    ]
    if not possible:
        return
    layout = data.draw(st.sampled_from(possible))
    costs = layout_costs(workload(instance.profile, instance.cluster, instance.job), layout)
    schedule = schedule_of(costs)
    for one in price(facts(instance.profile, instance.cluster, instance.job, layout)):
        stages = choose(costs, one.stage_map)
        memory = stage_memory(costs, stages, schedule)
        assert evaluate(costs, schedule, stages).total_ticks == one.nanoseconds
        assert tuple(row.peak_bytes for row in memory) == one.peaks
        assert tuple(row.host_bytes for row in memory) == one.hosts


@settings(max_examples=15)
@given(hosted_instances())
def test_bounds_of_offloaded_layouts_are_admissible(case: tuple[Instance, list[Priced]]) -> None:
    """No stage map of a layout that fits device and host is faster than the layout's lower bound."""
    instance, priced = case
    work = workload(instance.profile, instance.cluster, instance.job)
    for layout, same in groupby(priced, key=lambda one: one.layout):
        fitting = [one.nanoseconds for one in same if fits(one, instance)]
        if layout.schedule in PARTITIONED and fitting:
            assert bounded(work, layout, ("per-layer",)).bound_ticks <= min(fitting)
