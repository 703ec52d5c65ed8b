"""Partitions for ranks of unequal speed, against all partitions."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from planner.check import check
from planner.errors import UnsupportedError
from planner.replan.rebalance import rebalance_layers
from planner.replan.replanner import DeviceReplanner
from planner.replan.searches import local_search
from planner.replan.variants import slow_down_stages
from planner.search import make_request, plan_layout, predict
from planner.search import plan as search_plan
from planner.spec import (
    Cluster,
    DeviceSpec,
    Link,
    NodeGroup,
    Plan,
    PredictionLayout,
)
from tests.builders import job, layer, profile
from tests.check.mixed import as_counted
from tests.cli.support import (
    tiny_cluster,
    tiny_job,
    tiny_profile,
)
from tests.replan.plans import plan_of
from tests.strategies import with_operations


def group(name: str, flops_per_second: float, devices: int) -> NodeGroup:
    """A node of devices of its own kind."""
    device = DeviceSpec(
        id=name,
        memory_bytes=1 << 40,
        peak_flops_per_second={
            "fp32": flops_per_second,
            "bf16": flops_per_second,
            "fp16": flops_per_second,
        },
        memory_bandwidth_bytes_per_second=flops_per_second,
        launch_seconds=0.0,
        reserved_bytes=0,
    )
    link = Link(latency_seconds=1e-6, bandwidth_bytes_per_second=1e9)
    return NodeGroup(
        name=name,
        device=device,
        nodes=1,
        devices_per_node=devices,
        intra_node=link,
        inter_node=link,
    )


@pytest.fixture
def plan() -> Plan:
    """Twelve equal layers on four pipeline ranks."""
    return plan_of(
        tiny_profile(layers=12),
        pipeline_parallel_degree=4,
        schedule="1f1b",
        micro_batch_size=1,
    )


@pytest.mark.parametrize(
    "slowdown", [(1, 1, 1, 2), (2, 1, 1, 1), (1, 3, 1, 1), (1.5, 1, 1.5, 1)]
)
def test_as_fast_as_the_best_of_all(plan: Plan, slowdown: tuple[float, ...]) -> None:
    """Equal layers: moving one after the other ends at the best partition, and its plan holds for these ranks."""
    profile = plan.request.profile
    assert profile is not None
    found = rebalance_layers(plan, profile, slowdown)
    assert found is not None

    def seconds(counts: tuple[int, ...]) -> float:
        layout = PredictionLayout(**plan.layout.model_dump(), layers_per_stage=counts)
        of_ranks = slow_down_stages(profile, counts, slowdown)
        return predict(
            of_ranks, tiny_cluster(), tiny_job(), layout
        ).prediction.step_seconds

    every = [counts for counts in product(range(1, 10), repeat=4) if sum(counts) == 12]
    assert found.seconds_then == pytest.approx(min(map(seconds, every)))
    assert (
        found.seconds_now
        == seconds(tuple(len(stage.layers) for stage in plan.stages))
        > found.seconds_then
    )
    assert found.plan.prediction.step_seconds == found.seconds_then
    assert found.plan.layout == plan.layout
    carried = found.plan.request.profile
    assert carried is not None
    assert check(found.plan, carried).ok


@pytest.mark.parametrize("slowdown", [(1, 2), (3, 1)])
def test_several_stages_of_a_slow_rank_lose_layers(slowdown: tuple[float, ...]) -> None:
    """Ten layers in two stages on each of two ranks: as fast as the best of all partitions, and proven anew."""
    profile, cluster, job = tiny_profile(layers=10), tiny_cluster(devices=2), tiny_job()
    plan = plan_of(
        profile,
        cluster,
        pipeline_parallel_degree=2,
        virtual_stages_per_rank=2,
        schedule="interleaved-1f1b",
        micro_batch_size=1,
    )
    of_stages = [slowdown[stage.pipeline_rank] for stage in plan.stages]
    assert len(of_stages) == 4
    found = rebalance_layers(plan, profile, slowdown)
    assert found is not None

    def seconds(counts: tuple[int, ...]) -> float:
        layout = PredictionLayout(**plan.layout.model_dump(), layers_per_stage=counts)
        return predict(
            slow_down_stages(profile, counts, of_stages), cluster, job, layout
        ).prediction.step_seconds

    every = [counts for counts in product(range(1, 8), repeat=4) if sum(counts) == 10]
    assert found.seconds_then == pytest.approx(min(map(seconds, every)))
    assert found.seconds_then < found.seconds_now
    assert found.plan.layout == plan.layout
    carried = found.plan.request.profile
    assert carried is not None
    assert check(found.plan, carried).ok


@pytest.mark.parametrize("slowdown", [(1, 2), (2, 1), (3, 1)])
@pytest.mark.parametrize("shares", [None, (5, 3)])
def test_ranks_on_different_devices_lose_layers(
    slowdown: tuple[float, ...], shares: tuple[int, int] | None
) -> None:
    """Of a model that is counted: as fast as the best of all partitions, where two nodes of a third are not used; of
    equal shares of the batch and of unequal ones."""
    model = profile(layer(parameters=10, activation=5000, flops=30000) * 8)
    model = as_counted(
        model.model_copy(update={"layers": tuple(map(with_operations, model.layers))})
    )
    slow, fast, unused = (
        group(name, flops, 2)
        for name, flops in (("slow", 1e5), ("fast", 3e5), ("unused", 1e2))
    )
    fixed: dict[str, Any] = {
        "pipeline_parallel_degree": 2,
        "data_parallel_degree": 2,
        "schedule": "1f1b",
    }
    step = job(8, micro_batch_size=1, **fixed)
    cluster = Cluster(node_groups=(slow, fast, unused))
    plan = search_plan(make_request(model, cluster, step), model)
    assert isinstance(plan, Plan)
    assert len(plan.cluster.node_groups) == 2
    if shares is not None:
        layout = PredictionLayout(
            **{**plan.layout.model_dump(), "micro_batch_shares": shares}
        )
        given = plan_layout(make_request(model, plan.cluster, step), model, layout)
        assert isinstance(given, Plan)
        plan = given

    def seconds(counts: tuple[int, ...]) -> float:
        layout = PredictionLayout(**plan.layout.model_dump(), layers_per_stage=counts)
        return predict(
            slow_down_stages(model, counts, slowdown), plan.cluster, step, layout
        ).prediction.step_seconds

    now = seconds(tuple(len(stage.layers) for stage in plan.stages))
    best = min(seconds((first, 8 - first)) for first in range(1, 8))
    found = rebalance_layers(plan, model, slowdown)
    if slowdown == (1, 2):
        assert (found, best) == (None, now), "the slow device has one layer already"
        return
    assert found is not None
    assert (found.seconds_now, found.seconds_then) == (now, best)
    assert best < now
    assert found.plan.cluster == plan.cluster
    carried = found.plan.request.profile
    assert carried is not None
    assert check(found.plan, carried).ok


def test_orders_of_their_own_are_made_anew() -> None:
    """A plan whose order was synthesized gets the order of its new stages."""
    model, machines = tiny_profile(layers=6), tiny_cluster(devices=2)
    wish = {
        "schedule": "synthesized",
        "pipeline_parallel_degree": 2,
        "virtual_stages_per_rank": 1,
        "recompute": "none",
    }
    step = tiny_job().model_copy(update={"constraints": wish})
    plan = search_plan(make_request(model, machines, step), model)
    assert isinstance(plan, Plan)
    found = rebalance_layers(plan, model, (1.0, 3.0))
    assert found is not None
    assert found.seconds_then < found.seconds_now
    assert [len(stage.layers) for stage in found.plan.stages] > [3, 3]
    assert found.plan.actions != plan.actions
    carried = found.plan.request.profile
    assert carried is not None
    assert check(found.plan, carried).ok
    assert DeviceReplanner(plan, local_search(plan)).busy_seconds(plan)[0] > 0


def test_equal_ranks_keep_their_layers(plan: Plan) -> None:
    """Nothing is faster than the plan."""
    assert plan.request.profile is not None
    assert rebalance_layers(plan, plan.request.profile, (1, 1, 1, 1)) is None


def test_a_plan_says_how_long_its_ranks_work(plan: Plan) -> None:
    """Eight micro-batches of three layers of 3 ms; the plan of slow ranks says it of them."""
    replanner = DeviceReplanner(plan, local_search(plan))
    assert replanner.busy_seconds(plan) == pytest.approx([8 * 3 * 3e-3] * 4, rel=0.05)
    found = replanner.rebalance(plan, (1, 1, 1, 2))
    assert found is not None
    busy = replanner.busy_seconds(found.plan)
    layers = [len(stage.layers) for stage in found.plan.stages]
    wanted = [
        8 * count * 3e-3 * factor
        for count, factor in zip(layers, (1, 1, 1, 2), strict=True)
    ]
    assert busy == pytest.approx(wanted, rel=0.05)


def test_a_partition_that_the_job_fixes_stays() -> None:
    """No layer moves from a slow rank, not even once the plan is another; a rule holds for three devices too, a list
    of four stages leaves nothing to plan there."""
    model, machines = tiny_profile(layers=12), tiny_cluster()
    wish = {
        "data_parallel_degree": 1,
        "virtual_stages_per_rank": 1,
        "micro_batch_size": 1,
    }
    plans = []
    for division in ("even", (3, 3, 3, 3)):
        step = tiny_job().model_copy(
            update={"constraints": {**wish, "layers_per_stage": division}}
        )
        plan = search_plan(make_request(model, machines, step), model)
        assert isinstance(plan, Plan)
        assert [len(stage.layers) for stage in plan.stages] == [3, 3, 3, 3]
        replanner = DeviceReplanner(plan, local_search(plan))
        with pytest.raises(UnsupportedError, match="the job fixes layers_per_stage"):
            replanner.rebalance(plan, (1, 1, 1, 2))
        plans.append(replanner.for_devices(3))
    even, listed = plans
    assert isinstance(even, Plan)
    assert [len(stage.layers) for stage in even.stages] == [4, 4, 4]
    assert not isinstance(listed, Plan)
    assert listed.reasons[0].startswith(
        "the constraint layers_per_stage = 3,3,3,3 leaves none of the "
    )
