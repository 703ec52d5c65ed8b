"""Groups of ranks that share ZeRO's states: when they win, and which of them the search drops."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.cost import (
    LayoutCosts,
    StageMap,
    choose,
    evaluate,
    rank_memory,
    schedule_of,
    workload,
)
from planner.executor.support import check_plan
from planner.search import plan
from planner.search.engine.capacity import may_beat
from planner.search.engine.prices import dominates
from planner.search.engine.row_bounds import RowBounds
from planner.search.engine.space import whole_space
from planner.spec import Plan
from tests.builders import cluster, job, layer, link, profile, request
from tests.search.engine.exact import Layouts, random_map, step_of
from tests.search.test_runtimes import (
    RUNTIMES,
    SLOWDOWNS,
    fitted,
    for_runtime,
    with_links,
)
from tests.strategies import Instance, instances

ELEMENTS = 500_000
MODEL = profile(layer(parameters=ELEMENTS, activation=500, optimizer=5e-5) * 8)
SLOW = {"nodes": 2, "inter": link(1e7, 1e-5)}


def planned(memory_bytes: int, **constraints: Any) -> Plan:
    """The plan on eight devices of two nodes with a slow network between them."""
    step = job(32, pipeline_parallel_degree=1, schedule="1f1b", **constraints)
    machines = cluster(8, memory_bytes=memory_bytes, **SLOW)
    found = plan(request(MODEL, machines, step), MODEL)
    assert isinstance(found, Plan)
    check_plan(found)
    assert check(found, MODEL).problems == ()
    return found


def test_a_node_shares_states_where_the_network_is_slow() -> None:
    """64 MB of states: a rank has memory for a quarter of them, but not for ZeRO 1; so a node's four ranks share."""
    found = planned(21_500_000)
    assert (found.layout.zero_stage, found.layout.zero_shard_degree) == (3, 4)
    text = "ranks that share out its states all instead of 4"
    assert any(text in one.reason for one in found.alternatives)
    whole = planned(21_500_000, zero_stage=3, zero_shard_degree=8)
    assert whole.layout.zero_shard_degree is None
    assert whole.prediction.step_seconds > 3 * found.prediction.step_seconds
    assert planned(13_000_000).layout.zero_shard_degree is None


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_groups_can_be_constrained(zero_stage: int) -> None:
    """A constraint is on the number of ranks that share the states: one, without ZeRO."""
    found = planned(10**9, zero_stage=zero_stage, zero_shard_degree=2)
    assert (found.layout.zero_stage, found.layout.zero_shard_degree) == (zero_stage, 2)
    assert planned(10**9, zero_shard_degree=1).layout.zero_stage == 0


def test_dominated_groups_are_dropped() -> None:
    """Without latency, smaller groups under ZeRO 1 only take more memory and longer updates, as no ZeRO at all does."""
    work = workload(MODEL, cluster(8), job(8, pipeline_parallel_degree=1))
    layouts = Layouts(work, whole_space(work, least_tokens=1))
    assert len(layouts.table)
    for index in range(len(layouts.table)):
        row = layouts.row(index)
        options = [option for _, option in layouts.pricing.undominated(row)]
        found = [(one.zero_stage, one.shard_degree) for one in options]
        assert [one for one in found if one[0] < 2] == [(1, None)]
        assert len(layouts.options.of(row)) > len(found)


@settings(max_examples=150)
@given(
    instances(),
    st.sampled_from((*RUNTIMES, "planner")),
    SLOWDOWNS,
    st.integers(0, 2**30),
)
def test_no_dominated_option_is_faster_or_smaller(
    instance: Instance, runtime: str, slowdown: int, seed: int
) -> None:
    """Under any cut and modes, whether compute hides reductions or not."""
    chooser = random.Random(seed)
    step = for_runtime(instance.job, runtime)
    machines = with_links(instance.cluster, slowdown)
    with fitted():
        work = workload(instance.profile, machines, step)
    layouts = Layouts(work, whole_space(work, least_tokens=1))
    count = len(layouts.table)
    for index in chooser.sample(range(count), min(count, 8)):
        row = layouts.row(index)
        options = layouts.options.of(row)
        prices = layouts.prices(row, options[0])
        every = [layouts.pricing.costs(row, option) for option in options]
        stage_map = random_map(prices, row.pipeline * row.virtual_stages, chooser)
        found = [steps_and_bytes(costs, stage_map) for costs in every]
        for better, worse in permutations(range(len(options)), 2):
            if dominates(every[better], every[worse]):
                pairs = zip(found[better], found[worse], strict=True)
                assert all(one <= other for one, other in pairs)


def steps_and_bytes(costs: LayoutCosts, stage_map: StageMap) -> tuple[int, ...]:
    """Nanoseconds of the step, then bytes of every rank and its host."""
    stages, schedule = choose(costs, stage_map), schedule_of(costs)
    rows = rank_memory(costs, schedule, stages)
    step = evaluate(costs, schedule, stages).total_ticks
    peaks = [row.peak_bytes for row in rows]
    return step, *peaks, *(row.host_bytes for row in rows)


@settings(max_examples=100)
@given(
    instances(),
    st.sampled_from((*RUNTIMES, "planner")),
    SLOWDOWNS,
    st.integers(0, 2**30),
)
def test_no_option_is_excluded_below_its_step(
    instance: Instance, runtime: str, slowdown: int, seed: int
) -> None:
    """Nor any of more shards. Capacity counts reductions and optimizer, hidden or not."""
    chooser = random.Random(seed)
    machines = with_links(instance.cluster, slowdown)
    with fitted():
        work = workload(instance.profile, machines, for_runtime(instance.job, runtime))
    space = whole_space(work, least_tokens=1)
    layouts = Layouts(work, space)
    bounds = RowBounds(space, layouts.options, layouts.pricing)
    count = len(layouts.table)
    for index in chooser.sample(range(count), min(count, 8)):
        row = layouts.row(index)
        order = layouts.order(row)
        options = layouts.options.of(row)
        prices = [layouts.prices(row, option) for option in options]
        alike = list(layouts.options.by_zero_stage(row, options))
        table = layouts.table.take(np.array([index]))
        stages = order.ranks * order.virtual_stages
        stage_map = random_map(prices[0], stages, chooser)
        for place, option in enumerate(options):
            step = step_of(layouts.pricing.costs(row, option), stage_map)
            if step is not None:
                may = may_beat(prices, [order], float(step + 1))
                assert may[place, 0], (row, option, step)
                assert option in bounds.options_below(row, table, step + 1)
                of_stage = next(each for each in alike if option in each.options)
                for more in range(
                    of_stage.options.index(option), len(of_stage.options)
                ):
                    extremes = of_stage.extremes(more)
                    least = layouts.pricing.least_of(row, extremes)
                    assert may_beat([least], [order], float(step + 1)).all(), extremes
