"""Memory and steps of many cuts of a layout, and exchanges, against the cost model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.cost import (
    LayoutCosts,
    StageMap,
    Workload,
    choose,
    evaluate,
    rank_memory,
    schedule_of,
    workload,
)
from planner.profiler.counted import counted_profile
from planner.schedule import Schedule
from planner.search.engine.cut_costs import CutCosts
from planner.search.engine.engine import Search, plan_space
from planner.search.engine.result import Candidate
from planner.search.engine.rule import RuleCuts
from planner.search.engine.solve import CutSolver
from planner.search.engine.space import whole_space
from planner.search.engine.stop import GapStop
from planner.spec import Cluster, Job, NodeGroup
from tests.search.engine.exact import Layouts, random_map
from tests.search.engine.requests import request
from tests.search.engine.test_engine import tight, whole
from tests.search.engine.test_groups import mixed_works
from tests.strategies import Instance, instances

MAPS = 12
"""Stage maps per layout, enough for ranks to recur."""


def compare(costs: LayoutCosts, cut_costs: CutCosts, stage_map: StageMap) -> None:
    """Assert that a stage map has the memory and step of the cost model."""
    schedule = cut_costs.schedule
    stages = choose(costs, stage_map)
    fits = all(row.fits for row in rank_memory(costs, schedule, stages))
    assert cut_costs.fits(stage_map) == fits
    expected = evaluate(costs, schedule, stages)
    limit = expected.total_ticks
    assert not cut_costs.is_slower(stage_map, limit + 1)
    solution = cut_costs.simulate(stage_map)
    found = solution.step
    assert found.total_ticks == limit
    assert found.last_rank == expected.last_rank
    assert found.tails == expected.tails
    assert found.simulation.durations == expected.simulation.durations
    assert found.bubble_fraction == expected.bubble_fraction
    if cut_costs.learn(solution):
        assert cut_costs.is_slower(stage_map, limit)


def compare_random_maps(
    work: Workload, layouts: Layouts, chooser: random.Random
) -> None:
    """Compare stage maps of a random layout."""
    row, option = layouts.any(chooser)
    prices = layouts.prices(row, option)
    costs = layouts.pricing.costs(row, option)
    schedule = schedule_of(costs)
    cut_costs = CutCosts(costs, schedule, prices.kind_of)
    maps = [random_map(prices, schedule.stages, chooser) for _ in range(MAPS)]
    for stage_map in maps:
        compare(costs, cut_costs, stage_map)


@settings(max_examples=80, deadline=None)
@given(instances(most_layers=6), st.integers(0, 2**30))
def test_ranks_that_are_priced_once_cost_what_they_cost(
    instance: Instance, seed: int
) -> None:
    """Layers that share parameters, skip connections, sharding and offload included."""
    if workload(instance.profile, instance.cluster, instance.job).groups:
        return
    work = tight(instance, seed)
    layouts = Layouts(work, whole(work))
    assume(len(layouts.table))
    compare_random_maps(work, layouts, random.Random(seed))


@settings(max_examples=30, deadline=None)
@given(mixed_works(), st.integers(0, 2**30))
def test_ranks_that_differ_cost_what_they_cost(work: Workload, seed: int) -> None:
    """Devices and replicas of several kinds."""
    layouts = Layouts(work, whole_space(work, least_tokens=1))
    assume(len(layouts.table))
    compare_random_maps(work, layouts, random.Random(seed))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**30))
def test_models_of_the_catalogue_cost_what_they_cost(seed: int) -> None:
    """All runtimes, with one stage per rank and with several."""
    work = request(seed)
    layouts = Layouts(work, whole_space(work))
    assume(len(layouts.table))
    compare_random_maps(work, layouts, random.Random(seed))


def memory_bound(batch: int, devices: int) -> Workload:
    """A decoder whose ranks have to recompute, with several stages per rank."""
    model = "llama-3.1-8b"
    group = NodeGroup(device="a100-sxm4-40gb", nodes=devices // 8, devices_per_node=8)
    step = Job(
        global_batch_size=batch,
        sequence_length=8192,
        precision="bf16-mixed",
        optimizer="adamw",
        constraints={
            "pipeline_parallel_degree": 4,
            "schedule": "interleaved-1f1b",
            "virtual_stages_per_rank": (2, 4),
            "context_parallel_degree": 1,
        },
    )
    profile = counted_profile(model, sequence_length=8192)
    return workload(profile, Cluster(node_groups=(group,)), step)


def exchanged(best: Candidate) -> Iterator[StageMap]:
    """Every stage map with the modes of two layers of one rank exchanged."""
    for rank in range(best.schedule.ranks):
        layers = [
            pair
            for stage in best.schedule.stages_of(rank)
            for pair in best.stage_map[stage]
        ]
        for (one, mode), (other, other_mode) in permutations(layers, 2):
            known = best.costs.layers
            if mode == other_mode:
                continue
            if other_mode not in known[one] or mode not in known[other]:
                continue
            modes = {one: other_mode, other: mode}
            yield tuple(
                tuple((layer, modes.get(layer, old)) for layer, old in stage)
                for stage in best.stage_map
            )


def fitting_step(costs: LayoutCosts, schedule: Schedule, stage_map: StageMap) -> float:
    """Nanoseconds of a stage map; infinity: it does not fit."""
    stages = choose(costs, stage_map)
    if not all(row.fits for row in rank_memory(costs, schedule, stages)):
        return float("inf")
    return evaluate(costs, schedule, stages).total_ticks


def test_no_exchange_of_recomputation_beats_a_plan() -> None:
    """The modes of any two layers of one rank, priced by the cost model."""
    gained = 0
    for batch in (24, 48):
        work = memory_bound(batch, 16)
        best = plan_space(work, stop=GapStop()).best
        assert best is not None
        assert best.row.virtual_stages > 1
        steps = [
            fitting_step(best.costs, best.schedule, stage_map)
            for stage_map in exchanged(best)
        ]
        assert steps
        assert min(steps) >= best.total
        search = Search(work, whole_space(work))
        prices = search.pricing.prices(best.row, best.option)
        order = search.order(best.row)
        solver = CutSolver(prices, best.costs, order, RuleCuts(prices, order).sizes)
        plain = solver.simulate(tuple(map(len, best.stage_map)))
        gained += plain is not None and plain.total > best.total
    assert gained == 2
