"""The engine against brute force over its whole space."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import (
    Workload,
    choose,
    rank_memory,
    schedule_of,
    workload,
)
from planner.search.engine.engine import plan_space
from planner.search.engine.result import Candidate, Result
from planner.search.engine.space import Space, whole_space
from planner.search.engine.stop import AnyStop, GapStop, WorkStop
from tests.search.engine.exact import (
    HOST_BANDWIDTHS,
    PLENTY,
    Layouts,
    all_cuts,
    all_maps,
    step_of,
    with_host,
    with_memory,
)
from tests.search.engine.test_table import decoder
from tests.strategies import Instance, instances

MOST_LAYOUTS = 4000


def whole(work: Workload) -> Space:
    """The whole space without the limit on tokens, which small models do not reach."""
    return whole_space(work, least_tokens=1)


def brute_force(work: Workload) -> tuple[int, bool] | None:
    """Least step of all rows, options, cuts and modes, and whether it takes offloading; None: nothing fits."""
    layouts = Layouts(work, whole(work))
    best: tuple[int, bool] | None = None
    for index in range(len(layouts.table)):
        row = layouts.row(index)
        offloads = any(layouts.options.offload(row))
        for option in layouts.options.of(row):
            prices = layouts.prices(row, option)
            costs = layouts.pricing.costs(row, option)
            stages = row.pipeline * row.virtual_stages
            for sizes in all_cuts(len(prices.kind_of), stages):
                for stage_map in all_maps(prices, sizes):
                    step = step_of(costs, stage_map)
                    if step is not None and (best is None or (step, offloads) < best):
                        best = step, offloads
    return best


def size_of(work: Workload) -> int:
    """Rows with options; times 3 ^ layers modes and the cuts are evaluated."""
    layouts = Layouts(work, whole(work))
    return sum(
        1 for index in range(len(layouts.table)) for _ in _options(layouts, index)
    )


def _options(layouts: Layouts, index: int) -> list[object]:
    return list(layouts.options.of(layouts.row(index)))


def tight(instance: Instance, seed: int) -> Workload:
    """The workload on devices, and hosts if they are known, that just hold some stage map of some row."""
    chooser = random.Random(seed)
    bandwidth = chooser.choice((None, None, *HOST_BANDWIDTHS))
    if bandwidth is not None:
        instance = with_host(instance, bandwidth, PLENTY)
    work = workload(instance.profile, instance.cluster, instance.job)
    layouts = Layouts(work, whole(work))
    if not len(layouts.table):
        return work
    row = layouts.row(chooser.randrange(len(layouts.table)))
    option = chooser.choice(list(layouts.options.of(row)))
    prices = layouts.prices(row, option)
    costs = layouts.pricing.costs(row, option)
    stages = row.pipeline * row.virtual_stages
    sizes = chooser.choice(list(all_cuts(len(prices.kind_of), stages)))
    stage_map = chooser.choice(list(all_maps(prices, sizes)))
    rows = rank_memory(costs, schedule_of(costs), choose(costs, stage_map))
    memory = max(each.peak_bytes for each in rows)
    smaller = with_memory(instance, max(1, memory))
    if bandwidth is not None:
        host = max(each.host_bytes for each in rows) - chooser.choice((0, 0, 1))
        smaller = with_host(smaller, bandwidth, max(1, host))
    return workload(smaller.profile, smaller.cluster, smaller.job)


@settings(max_examples=25, deadline=None)
@given(instances(most_layers=3), st.integers(0, 2**30))
def test_plan_is_the_optimum_of_the_whole_space(instance: Instance, seed: int) -> None:
    """The best step equals brute force over rows, options, cuts and modes, and is proven; ties offload nothing."""
    if len(workload(instance.profile, instance.cluster, instance.job).groups):
        return
    work = tight(instance, seed)
    if size_of(work) > MOST_LAYOUTS:
        return
    expected = brute_force(work)
    found = plan_space(work, whole(work))
    if expected is None:
        assert found.best is None
        return
    assert found.best is not None
    layout = found.best.layout
    offloads = layout.activation_offload or layout.optimizer_offload
    assert (found.best.total, offloads) == expected, (
        found.best.total,
        offloads,
        expected,
    )
    assert found.gap == 0.0
    assert found.lower_bound_all_cuts <= expected[0]


def answer(result: Result) -> tuple[object, ...]:
    """All of a result that must not depend on the machine."""
    best = result.best
    assert isinstance(best, Candidate)
    return best.layout, best.stage_map, best.total, result.lower_bound, result.progress


def test_answer_of_a_limited_search_is_reproducible() -> None:
    """Two searches that the same work limit cuts have equal plans, bounds and counts."""
    work = decoder("llama-3.1-8b", 16, 64, 8192)
    stop = AnyStop((GapStop(), WorkStop(400_000)))
    first = plan_space(work, whole(work), stop)
    again = decoder("llama-3.1-8b", 16, 64, 8192)
    assert answer(first) == answer(plan_space(again, whole(again), stop))
    assert first.gap > 0
    assert first.progress.work_done >= 400_000
