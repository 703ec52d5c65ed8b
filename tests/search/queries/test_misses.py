"""Layouts that nearly fit, against brute force over cuts and recompute modes."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import Workload, choose, rank_memory, schedule_of, workload
from planner.search.engine.engine import Search
from planner.search.engine.options import Option, Row
from planner.search.engine.space import whole_space
from planner.search.queries.misses import misses, missing_bytes, needs
from planner.spec import Cluster, Job, ModelProfile
from tests.builders import cluster, job, layer, profile, with_recompute
from tests.search.engine.exact import Layouts, all_cuts, all_maps
from tests.search.engine.test_table import decoder
from tests.search.queries.outcomes import limits, stopped
from tests.search.test_brute_force import with_memory
from tests.strategies import Instance, instances

MIB = 2**20


def least_missing(layouts: Layouts, row: Row, option: Option) -> int:
    """Bytes that the best of all cuts and modes of a row lacks."""
    prices = layouts.prices(row, option)
    costs = layouts.pricing.costs(row, option)
    schedule = schedule_of(costs)
    found = []
    for sizes in all_cuts(len(prices.kind_of), row.pipeline * row.virtual_stages):
        for stage_map in all_maps(prices, sizes):
            rows = rank_memory(costs, schedule, choose(costs, stage_map))
            found.append(max(map(missing_bytes, rows)))
    return min(found)


def tiny(instance: Instance) -> Workload:
    """The workload on devices of one byte."""
    small = with_memory(instance, 1)
    return workload(small.profile, small.cluster, small.job)


@settings(max_examples=25, deadline=None)
@given(instances(most_layers=3), st.integers(0, 2**30))
def test_needs_are_the_least_memory_of_their_rows(
    instance: Instance, seed: int
) -> None:
    """A row's need is the minimum over all its cuts and recompute modes."""
    work = tiny(instance)
    if work.groups:
        return
    search = Search(work, whole_space(work, least_tokens=1))
    found = list(needs(search, limits()))
    layouts = Layouts(work, search.space)
    chooser = random.Random(seed)
    for need in chooser.sample(found, min(4, len(found))):
        assert need.missing_bytes == least_missing(layouts, need.row, need.option)


@settings(max_examples=15, deadline=None)
@given(instances(most_layers=3))
def test_the_nearest_miss_lacks_least_of_all_layouts(instance: Instance) -> None:
    """No row, option, cut and recompute mode of a small space lacks fewer bytes."""
    work = tiny(instance)
    if work.groups:
        return
    search = Search(work, whole_space(work, least_tokens=1))
    layouts = Layouts(work, search.space)
    pairs = [
        (row, option)
        for row in map(layouts.row, range(len(layouts.table)))
        for option in layouts.options.of(row)
    ]
    if len(pairs) > 200:
        return
    found = misses(search, limits())
    assert [miss.missing_bytes for miss in found] == sorted(
        miss.missing_bytes for miss in found
    )
    if found:
        least = min(least_missing(layouts, row, option) for row, option in pairs)
        assert found[0].missing_bytes == least


def heavy() -> ModelProfile:
    """Layers that save much and can recompute, so that memory decides."""
    return with_recompute(activation=20 * MIB, kept=MIB, parameters=100_000)


def search_of(model: ModelProfile, machines: Cluster, step: Job) -> Search:
    """The search over the whole space."""
    work = workload(model, machines, step)
    return Search(work, whole_space(work))


def test_misses_have_different_degrees() -> None:
    """At most three misses are returned, no two with the same degrees."""
    search = search_of(heavy(), cluster(4, memory_bytes=4 * MIB), job(8))
    found = misses(search, limits())
    degrees = {
        (one.layout.data_parallel_degree, one.layout.pipeline_parallel_degree)
        for one in found
    }
    assert len(degrees) == len(found) == 3


def test_memory_of_a_miss_is_enough() -> None:
    """A layout that nearly fits has a plan on devices with the missing bytes more."""
    machines = cluster(4, memory_bytes=4 * MIB)
    step = job(8, schedule=("gpipe", "1f1b"))
    (nearest, *_) = misses(search_of(heavy(), machines, step), limits())
    enough = 4 * MIB + nearest.missing_bytes
    larger = search_of(heavy(), cluster(4, memory_bytes=enough), step)
    assert larger.run(lambda best, bound, work: False).best is not None
    smaller = search_of(heavy(), cluster(4, memory_bytes=enough - 1), step)
    assert smaller.run(lambda best, bound, work: False).best is None


def test_needs_of_many_cuts_are_those_of_real_plans() -> None:
    """With too many cuts to compute all, a need is the memory of its stage map."""
    work = decoder("llama-3.1-70b", 8, 64, 8192)
    search = Search(work, whole_space(work))
    found = misses(search, limits())
    assert found
    for need in list(needs(search, limits()))[:8]:
        stages = choose(need.costs, need.stage_map)
        rows = rank_memory(need.costs, need.schedule, stages)
        assert need.missing_bytes == max(map(missing_bytes, rows))


def test_a_stopped_query_returns_nothing() -> None:
    """Without time no row is computed."""
    search = search_of(heavy(), cluster(4, memory_bytes=4 * MIB), job(8))
    assert misses(search, stopped()) == ()


def test_one_layer_has_one_cut() -> None:
    """Of one layer the miss is its least memory less that of the device."""
    model = profile(layer(parameters=1000, activation=10 * MIB))
    search = search_of(model, cluster(1, memory_bytes=MIB), job(1))
    (miss,) = misses(search, limits())
    assert miss.needed_bytes == miss.missing_bytes + MIB > 10 * MIB
