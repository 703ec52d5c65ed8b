"""Dealt stage maps on node groups that differ, where all replicas are alike: bounds, plans, and brute force."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.cost import TICK_SECONDS, choose, evaluate, layout_costs, rank_memory
from planner.cost.mixed import columns_of
from planner.cost.workload import workload
from planner.errors import UnsupportedError
from planner.executor.support import check_plan
from planner.search import plan, predict
from planner.search.bounds.steady_state import steady_ticks
from planner.search.layouts.orders import DEALT
from planner.search.layouts.standing import Speeds
from planner.search.stage_maps.dealt import layout_schedule, layout_traits, ranks_of
from planner.search.stage_maps.dealt_on_groups import least_on_ranks, uniform
from planner.search.stage_maps.segments import uniform_modes
from planner.spec import Cluster, Infeasible, Job, ModelProfile, Plan
from planner.spec.layout import Layout, PredictionLayout
from planner.spec.plan import Forecast
from tests.brute_force_mixed import layouts, price_layout
from tests.builders import job, link, request
from tests.check.instances import Given
from tests.check.mixed import as_counted, counted, group
from tests.check.mixed_instances import layouts_of_equal_replicas
from tests.search.test_mixed import node_groups
from tests.strategies import models

_TWO = Cluster(node_groups=(group(1, inter=link(1e9, 1e-6)), group(2)))
"""Two devices each, the second group's half as fast."""


def forecast(machines: Cluster, **fields: object) -> Forecast:
    """Of twelve equal layers and sixteen micro-batches."""
    layout = PredictionLayout.model_validate({"micro_batch_size": 1, **fields})
    return predict(counted(12, output=10**6), machines, job(16), layout)


def sizes_of(told: Forecast) -> list[int]:
    """Layers of every stage."""
    return [len(stage.layers) for stage in told.stages]


@pytest.mark.parametrize(
    ("schedule", "virtual", "sizes"),
    [
        ("zb-h1", 1, [4, 4, 2, 2]),
        ("interleaved-1f1b", 2, [2, 2, 1, 1, 2, 2, 1, 1]),
        ("zb-v", 2, [2, 2, 1, 1, 1, 1, 2, 2]),
        ("hanayo", 2, [2, 2, 1, 1, 1, 1, 2, 2]),
    ],
)
def test_layers_are_dealt_by_speed(
    schedule: str, virtual: int, sizes: list[int]
) -> None:
    """Devices twice as fast get twice as many layers, whatever the schedule's way down the ranks."""
    told = forecast(
        _TWO,
        pipeline_parallel_degree=4,
        schedule=schedule,
        virtual_stages_per_rank=virtual,
    )
    assert sizes_of(told) == sizes


def test_the_way_back_to_the_first_rank_is_that_between_the_groups() -> None:
    """Of the seven boundaries of an interleaved pipeline three lie between the groups, the middle one from the last
    rank to the first."""
    fields = {
        "pipeline_parallel_degree": 4,
        "schedule": "interleaved-1f1b",
        "virtual_stages_per_rank": 2,
    }
    machines = Cluster(
        node_groups=(group(1, inter=link(1e9)), group(2, inter=link(1e9)))
    )
    costs = layout_costs(
        workload(counted(12, output=10**6), machines, job(4)), Layout(**fields)
    )
    moved = [
        costs.of_replica.transfers_behind(stage)[0] * TICK_SECONDS for stage in range(7)
    ]
    near, between = 1e6 / 1e11, 1e6 / 1e9
    assert moved == pytest.approx(
        [near, between, near, between, near, between, near], abs=1e-6
    )


@pytest.mark.parametrize(
    "fields",
    [{"schedule": "zb-h1"}, {"schedule": "looped-bfs", "virtual_stages_per_rank": 2}],
)
def test_replicas_that_differ_take_gpipe_or_1f1b(fields: dict[str, object]) -> None:
    """Each replica is a pipeline in a node group of its own: no other schedule, nor several stages per rank."""
    degrees = {
        "data_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "rank_order": "tp-cp-pp-dp",
    }
    with pytest.raises(UnsupportedError, match="where replicas differ"):
        forecast(_TWO, **degrees, **fields)


@pytest.mark.parametrize("schedule", ["chimera", "synthesized"])
def test_schedules_that_node_groups_do_not_take(schedule: str) -> None:
    """Two copies of a stage, or an order that is made for its stages, are refused by name."""
    with pytest.raises(UnsupportedError, match=schedule):
        forecast(_TWO, pipeline_parallel_degree=4, schedule=schedule)


@settings(max_examples=60)
@given(layouts_of_equal_replicas())
def test_no_step_is_faster_than_its_bounds(instance: Given) -> None:
    """(D11), (E11), (E14) and (E15) on layers as they are dealt and as hypothesis cuts them; (E5) finds what overflows
    only where something does."""
    layout = Layout.model_validate(
        instance.layout.model_dump(exclude={"layers_per_stage"})
    )
    if layout.schedule not in DEALT or len(instance.cluster.node_groups) == 1:
        return
    work = workload(instance.profile, instance.cluster, instance.job)
    costs = layout_costs(work, layout)
    own, modes, ranks = (
        costs.of_replica,
        uniform_modes(costs, layout.recompute),
        ranks_of(costs),
    )
    layers, traits, schedule = (
        uniform(costs, modes),
        layout_traits(own),
        layout_schedule(own),
    )
    least = costs.micro_batches * Speeds.of(work, next(iter(work.sizes))).ticks(
        columns_of(work, layout)[0].groups
    )
    for sizes in (layers.dealt(ranks), tuple(instance.layout.layers_per_stage or ())):
        stages = choose(own, layers.stage_map(sizes))
        ticks = evaluate(own, schedule, stages).total_ticks
        bounds = (
            layers.bound(sizes, ranks, ends_low=traits.ends_low),
            least_on_ranks(costs, modes),
            least,
        )
        assert max(*bounds, steady_ticks(own, stages)) <= ticks
        assert layers.may_hold(sizes, traits) or not all(
            each.fits for each in rank_memory(own, schedule, stages)
        )


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[ModelProfile, Cluster, Job]:
    """Two node groups of one or two devices, all of them in one pipeline under a schedule that deals layers."""
    alike = draw(st.booleans())
    groups = [
        draw(node_groups(alike=alike, shapes=((1, 1), (1, 2), (2, 1))))
        for _ in range(2)
    ]
    model, first = draw(models(most_layers=6)), groups[0].device
    assert not isinstance(first, str)
    assume(
        alike
        or any(row.forward_flops for one in model.layers for row in one.measurements)
    )
    told = model.model_copy(update={"device": first.id}) if alike else as_counted(model)
    machines = Cluster(node_groups=tuple(groups))
    wishes = {"pipeline_parallel_degree": machines.devices, "schedule": DEALT}
    return told, machines, job(draw(st.sampled_from((2, 4, 6, 8))), **wishes)


@settings(max_examples=40)
@given(pipelines())
def test_the_plan_is_the_optimum_of_dealt_pipelines(
    drawn: tuple[ModelProfile, Cluster, Job],
) -> None:
    """Over both orders of the node groups, and every schedule that deals layers, stages per rank and recomputation."""
    model, machines, step = drawn
    orders = [
        Cluster(node_groups=groups)
        for groups in (machines.node_groups, machines.node_groups[::-1])
    ]
    steps = [
        priced.nanoseconds
        for order in orders
        for layout, _ in layouts(model, order, step)
        if layout.schedule in DEALT
        and layout.pipeline_parallel_degree == machines.devices
        for priced in price_layout(model, order, step, layout)
    ]
    found = plan(request(model, machines, step, top=0), model)
    if not steps:
        assert isinstance(found, Infeasible)
        return
    assert isinstance(found, Plan)
    assert found.prediction.step_seconds == pytest.approx(
        min(steps) * TICK_SECONDS, rel=1e-12
    )
    assert found.search.optimal
    assert check(found, model).problems == ()
    check_plan(found)
