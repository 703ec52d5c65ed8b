"""Objectives against a search of every part of the cluster by itself."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.errors import DocumentError, UnsupportedError
from planner.search import Callbacks, Progress, plan
from planner.search.parts import parts_of, token_price
from planner.search.queries.objectives import Portfolio
from planner.spec import Cluster, Infeasible, Job, ModelProfile, NodeGroup, Plan
from planner.spec.job import Objective
from tests.builders import (
    cluster,
    device,
    job,
    layer,
    link,
    profile,
    request,
    with_recompute,
)
from tests.strategies import Instance, instances


def priced(machines: Cluster, price: float = 2.0) -> Cluster:
    """The cluster with a price for every device and hour."""
    groups = tuple(
        group.model_copy(update={"price_per_hour": price})
        for group in machines.node_groups
    )
    return machines.model_copy(update={"node_groups": groups})


def wishing(step: Job, objective: Objective, deadline: float | None = None) -> Job:
    """The job with another objective."""
    return Job.model_validate(
        {**step.model_dump(), "objective": objective, "deadline_seconds": deadline}
    )


def part(machines: Cluster, nodes: int, devices_per_node: int) -> Cluster:
    """Some of a cluster of one group, written out."""
    update = {"nodes": nodes, "devices_per_node": devices_per_node}
    return machines.model_copy(
        update={"node_groups": (machines.node_groups[0].model_copy(update=update),)}
    )


def each_alone(model: ModelProfile, machines: Cluster, step: Job) -> dict[int, float]:
    """Least step by devices, each part searched as a cluster of its own."""
    group = machines.node_groups[0]
    parts = [part(machines, 1, count) for count in range(1, group.devices_per_node)]
    parts += [
        part(machines, count, group.devices_per_node)
        for count in range(1, group.nodes + 1)
    ]
    found = {
        one.devices: plan(request(model, one, step, top=0), model) for one in parts
    }
    return {
        devices: one.prediction.step_seconds
        for devices, one in found.items()
        if isinstance(one, Plan)
    }


@settings(max_examples=40)
@given(instances())
def test_cost_is_the_least_of_all_parts(instance: Instance) -> None:
    """No part of the cluster trains a token for less, whichever is searched alone; and the checker agrees."""
    machines = priced(instance.cluster)
    steps = each_alone(instance.profile, machines, instance.job)
    found = plan(
        request(instance.profile, machines, wishing(instance.job, "cost"), top=1),
        instance.profile,
    )
    if isinstance(found, Infeasible):
        assert steps == {}
        return
    assert found.search.optimal
    used = found.layout.devices
    assert used * found.prediction.step_seconds == pytest.approx(
        min(n * step for n, step in steps.items()), rel=1e-6
    )
    assert found.prediction.step_seconds == pytest.approx(steps[used], rel=1e-6)
    assert found.cost_per_token is not None
    tokens = instance.job.global_batch_size * instance.job.sequence_length
    assert found.cost_per_token * tokens == pytest.approx(
        2.0 / 3600 * used * found.prediction.step_seconds
    )
    assert check(found, instance.profile).problems == ()


@settings(max_examples=40)
@given(st.data())
def test_devices_are_the_fewest_that_meet_the_deadline(data: st.DataObject) -> None:
    """Fewer devices are always too slow; on those chosen no plan is faster; without any the fastest step is told."""
    instance = data.draw(instances())
    steps = each_alone(instance.profile, instance.cluster, instance.job)
    if not steps:
        return
    deadline = data.draw(st.sampled_from(sorted(steps.values()))) * data.draw(
        st.sampled_from((0.999, 1.0, 1.5))
    )
    wanted = [
        devices for devices, step in steps.items() if step <= deadline * (1 + 1e-12)
    ]
    step = wishing(instance.job, "devices", deadline)
    asked = request(instance.profile, instance.cluster, step, top=1)
    found = plan(asked, instance.profile)
    if isinstance(found, Infeasible):
        assert wanted == []
        assert "deadline" in found.reasons[0] or instance.cluster.devices not in steps
        if told := re.search(
            r"the fastest on \d+ devices? takes ([\d.]+) s", found.reasons[0]
        ):
            step = wishing(
                instance.job, "devices", float(told[1])
            )  # what is told is a deadline that is met
            assert isinstance(
                plan(
                    request(instance.profile, instance.cluster, step, top=0),
                    instance.profile,
                ),
                Plan,
            )
        return
    assert found.layout.devices == min(wanted)
    assert found.prediction.step_seconds == pytest.approx(steps[min(wanted)])
    assert found.search.optimal
    assert check(found, instance.profile).problems == ()


def test_a_plan_names_the_nodes_that_it_uses() -> None:
    """A lone device is enough: the first one of the first node, and the plan's own cluster is that device."""
    model = profile(layer() * 4)
    found = plan(
        request(model, cluster(8, nodes=2), wishing(job(8), "devices", 1e3)), model
    )
    assert isinstance(found, Plan)
    assert [(row.node, row.device) for row in found.placement] == [(0, 0)]
    assert (found.cluster.devices, found.request.cluster.devices) == (1, 8)


def test_step_time_uses_all_devices() -> None:
    """The default leaves no device out, whatever it costs."""
    model = profile(layer() * 4)
    found = plan(request(model, priced(cluster(4)), job(8)), model)
    assert isinstance(found, Plan)
    assert found.layout.devices == 4
    assert found.search.clusters_considered == 1


def test_parts_are_whole_nodes_or_of_one_node() -> None:
    """Two groups: every choice of their nodes, and some devices of one node; numbers go through all groups."""
    groups = tuple(
        NodeGroup(
            name=name,
            device=device(),
            nodes=nodes,
            devices_per_node=each,
            intra_node=link(),
            inter_node=link(),
        )
        for name, nodes, each in (("a", 2, 2), ("b", 1, 3))
    )
    found = [(one.nodes, one.devices) for one in parts_of(Cluster(node_groups=groups))]
    whole = [((0,), 2), ((0, 1), 4), ((2,), 3), ((0, 2), 5), ((0, 1, 2), 7)]
    assert sorted(found) == sorted([*whole, ((0,), 1), ((2,), 1), ((2,), 2)])
    assert [devices for _, devices in found] == sorted(devices for _, devices in found)


def test_too_many_parts_are_refused() -> None:
    """More choices of nodes than can be looked at name the field, and nothing is left out in silence."""
    with pytest.raises(UnsupportedError, match="choices of nodes"):
        parts_of(cluster(5000, nodes=5000))


def test_prices_add_up_over_groups() -> None:
    """A cluster costs what its devices cost; the group's price goes before the device's; one unknown, all unknown."""
    own = NodeGroup(device=device(price_per_hour=3.0), nodes=1, devices_per_node=2)
    theirs = own.model_copy(update={"price_per_hour": 1.0})
    unknown = NodeGroup(device="h100-sxm5-80gb", nodes=1, devices_per_node=2)
    assert Cluster(node_groups=(own, theirs)).price_per_hour == 8.0
    assert Cluster(node_groups=(own, unknown)).price_per_hour is None
    assert token_price(Cluster(node_groups=(own,)), job(2), 36.0) == pytest.approx(
        6.0 / 100 / 256
    )


@pytest.mark.parametrize("price", [None, 0.0])
def test_cost_needs_prices(price: float | None) -> None:
    """Without a price above nothing the objective cost is refused, naming where the price belongs."""
    model = profile(layer() * 4)
    machines = cluster(2)
    group = machines.node_groups[0].model_copy(update={"price_per_hour": price})
    with pytest.raises(DocumentError, match="price of one device") as caught:
        plan(
            request(model, Cluster(node_groups=(group,)), wishing(job(8), "cost")),
            model,
        )
    assert caught.value.problems[0].field == "cluster.node_groups[0].price_per_hour"


@pytest.mark.parametrize(
    ("objective", "deadline"), [("devices", None), ("cost", 1.0), ("step_time", 1.0)]
)
def test_deadlines_belong_to_devices(
    objective: Objective, deadline: float | None
) -> None:
    """The objective devices needs a deadline, and no other takes one."""
    with pytest.raises(ValueError, match="deadline_seconds"):
        wishing(job(8), objective, deadline)


@pytest.mark.parametrize("calls", range(0, 60, 6))
def test_a_stopped_search_for_few_devices_is_honest(calls: int) -> None:
    """Stopped at any moment: a plan that meets the deadline, proven only if it is the best, or no claim at all."""
    model, machines = with_recompute(), cluster(8, nodes=2, inter=link(1e9, 1e-5))
    step = wishing(job(32), "devices", 0.15)
    best = plan(request(model, machines, step), model)
    assert isinstance(best, Plan)
    assert 1 < best.layout.devices < 8
    left = iter([False] * calls)
    found = plan(
        request(model, machines, step),
        model,
        callbacks=Callbacks(should_stop=lambda: next(left, True)),
    )
    if isinstance(found, Infeasible):
        assert found.search is not None
        assert not found.search.optimal
        return
    assert check(found, model).problems == ()
    assert found.layout.devices >= best.layout.devices
    assert not found.search.optimal or found.placement == best.placement


@pytest.mark.parametrize("calls", range(0, 40, 8))
def test_stopping_leaves_an_honest_answer(calls: int) -> None:
    """Stopped at any moment: a valid plan that claims no proof it has not, or no claim at all."""
    model, machines = (
        with_recompute(),
        priced(cluster(8, nodes=2, inter=link(1e9, 1e-5))),
    )
    step = wishing(job(32), "cost")
    best = plan(request(model, machines, step), model)
    assert isinstance(best, Plan)
    left = iter([False] * calls)
    found = plan(
        request(model, machines, step),
        model,
        callbacks=Callbacks(should_stop=lambda: next(left, True)),
    )
    if isinstance(found, Infeasible):
        assert found.search is not None
        assert not found.search.optimal
        return
    assert check(found, model).problems == ()
    assert found.cost_per_token is not None
    assert best.cost_per_token is not None
    assert found.cost_per_token >= best.cost_per_token * (1 - 1e-9)
    bound = found.cost_per_token * (1 - found.search.gap)
    assert bound <= best.cost_per_token * (1 + 1e-9)


def test_progress_counts_all_parts() -> None:
    """Work gets done over all parts together, and the last report has no gap."""
    seen: list[Progress] = []
    model, machines = with_recompute(), priced(cluster(8, nodes=2))
    plan(
        request(model, machines, wishing(job(32), "cost")),
        model,
        callbacks=Callbacks(on_progress=seen.append),
    )
    assert all(
        before.layouts_considered <= after.layouts_considered
        for before, after in pairwise(seen)
    )
    assert all((one.gap is None) == (one.incumbent_seconds is None) for one in seen)
    assert seen[-1].gap == 0
    assert seen[-1].layouts_done == seen[-1].layouts_considered


def test_a_good_plan_is_known_before_parts_compete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any bound is looked at, there is a plan of the cheapest part whose devices divide all."""
    model, machines = (
        with_recompute(parameters=1_000_000),
        priced(cluster(8, memory_bytes=40_000_000)),
    )
    step = wishing(job(16), "cost")
    monkeypatch.setattr(Portfolio, "is_done", True)
    found = plan(request(model, machines, step, top=0), model)
    assert isinstance(found, Plan)
    steps = each_alone(model, machines, job(16))
    assert found.layout.devices * found.prediction.step_seconds == pytest.approx(
        min(devices * steps[devices] for devices in (1, 2, 4, 8) if devices in steps),
        rel=1e-6,
    )
