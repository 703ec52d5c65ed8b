"""What other frameworks do at a step's end, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.cost import (
    StageMap,
    choose,
    evaluate,
    layout_costs,
    predict_step,
    schedule_of,
    workload,
)
from planner.cost.communication import Group, chain_seconds
from planner.cost.layers import LayoutCosts
from planner.cost.step import by_rank, tail_ticks
from planner.runtimes import Runtime, get
from planner.spec import Layout
from tests.builders import cluster, job, layer, link, profile

MICROSECOND = 1000
MODEL = profile(
    layer(forward=10e-6, backward_input=20e-6, backward_weight=30e-6, parameters=10**6)
    * 4
)
PLAIN = get("planner")


def costs_of(
    framework: Runtime, machines: Any = None, samples: int = 8, **degrees: Any
) -> LayoutCosts:
    """Four layers of 10^6 parameters; a pass over the gradients of one takes two ranks 10 us."""
    layout = Layout(**degrees)
    return layout_costs(
        workload(
            MODEL,
            machines or cluster(layout.devices),
            job(samples),
            framework=framework,
        ),
        layout,
    )


def reduction(framework: Runtime) -> int:
    """Ticks of ZeRO 1's exchanges that compute does not hide."""
    costs = costs_of(framework, data_parallel_degree=2, zero_stage=1)
    stages = choose(costs, [[(index, "none") for index in range(4)]])
    return tail_ticks(costs, by_rank(schedule_of(costs), stages))[0][0]


def test_updates_are_not_hidden_by_a_backward_that_is_over() -> None:
    """(S5): of 4 x 20 us the first layer's are never hidden; of the others' 30 us of reduce-scatter 0.8 x 200 us of
    backward hide all, of their 30 us of all-gather 0.8 x 40 us of forward hide all, if the framework overlaps them."""
    assert reduction(PLAIN) == 80 * MICROSECOND
    assert reduction(replace(PLAIN, overlaps_reduction=True)) == 50 * MICROSECOND
    assert reduction(replace(PLAIN, overlaps_gathers=True)) == 50 * MICROSECOND
    assert (
        reduction(replace(PLAIN, overlaps_reduction=True, overlaps_gathers=True))
        == 20 * MICROSECOND
    )


@pytest.mark.parametrize(("tensors", "broadcasts"), [(0, 0), (1, 4), (2, 4)])
def test_owners_of_whole_parameters_broadcast_them(
    tensors: int, broadcasts: int
) -> None:
    """(L6): twice three hops of 2 us to reduce, and three hops for each of the four ranks that own any."""
    machines = cluster(4, intra=link(1e11, 2e-6))
    found = costs_of(
        replace(PLAIN, whole_tensors=tensors),
        machines,
        data_parallel_degree=4,
        zero_stage=1,
    )
    assert found.reduction_latency_ticks == (12 + 6 * broadcasts) * MICROSECOND


def test_no_more_broadcasts_than_parameters() -> None:
    """Two stages of two layers with one parameter each: two of four ranks own one."""
    machines = cluster(8, intra=link(1e11, 2e-6))
    degrees = {
        "data_parallel_degree": 4,
        "pipeline_parallel_degree": 2,
        "zero_stage": 1,
    }
    found = costs_of(replace(PLAIN, whole_tensors=1), machines, **degrees)
    assert found.reduction_latency_ticks == (12 + 6 * 2) * MICROSECOND


def test_a_chain_enters_every_node_once() -> None:
    """(L6): four ranks on two nodes: two hops inside, one between."""
    assert chain_seconds(
        Group(4, 2, 2), link(1e11, 2e-6), link(1e10, 5e-6)
    ) == pytest.approx(9e-6)
    assert chain_seconds(Group(4, 1, 4), link(1e11, 2e-6), None) == pytest.approx(6e-6)


def test_steps_without_a_barrier_tile() -> None:
    """(S4): the last stage's step begins with its own first action, and the parts still add up to the step."""
    stage_map: StageMap = [[(0, "none"), (1, "none")], [(2, "none"), (3, "none")]]
    together, staggered = (
        costs_of(replace(PLAIN, staggers_steps=each), pipeline_parallel_degree=2)
        for each in (False, True)
    )
    order, stages = schedule_of(together), choose(together, stage_map)
    step = evaluate(staggered, order, stages)
    spans = zip(
        step.simulation.begin_seconds,
        step.simulation.end_seconds,
        step.tails,
        strict=True,
    )
    assert step.total_ticks == max(end - begin + tail for begin, end, tail in spans)
    for costs in (together, staggered):
        found = predict_step(costs, order, stages)
        assert sum(found.breakdown.model_dump().values()) == pytest.approx(
            found.step_seconds
        )


def test_a_stage_that_starts_late_loses_nothing_by_it() -> None:
    """ZB-H2 keeps the slower last stage busy from its first micro-batch to its end, 8 x 180 us; with a barrier it also
    counts the 10 us until its first."""
    stage_map: StageMap = [[(0, "none")], [(1, "none"), (2, "none"), (3, "none")]]
    degrees: dict[str, Any] = {"pipeline_parallel_degree": 2, "schedule": "zb-h2"}
    together, staggered = (
        costs_of(replace(PLAIN, staggers_steps=each), **degrees)
        for each in (False, True)
    )
    stages = choose(together, stage_map)
    steps = [
        evaluate(costs, schedule_of(costs), stages).total_ticks
        for costs in (together, staggered)
    ]
    assert steps == [1450 * MICROSECOND, 1440 * MICROSECOND]
