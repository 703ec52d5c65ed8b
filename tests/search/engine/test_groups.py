"""The engine on several node groups: bounds, table and search against brute force."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.cost import Workload, workload
from planner.search.engine.bound import lower_bound
from planner.search.engine.capacity import may_beat
from planner.search.engine.engine import plan_space
from planner.search.engine.options import Option
from planner.search.engine.row_bounds import RowBounds
from planner.search.engine.rule import RuleCuts
from planner.search.engine.space import whole_space
from planner.spec.cluster import Cluster, NodeGroup
from planner.spec.job import Job
from planner.spec.profile import ModelProfile
from tests.builders import job
from tests.check.mixed import as_counted
from tests.search.engine.exact import Layouts, all_cuts, all_maps, step_of
from tests.search.test_mixed import node_groups
from tests.strategies import models

MOST_MAPS = 40
MOST_ROWS = 8
MOST_LAYOUTS = 3000
MEMORIES = (10**9, 10**9, 60_000, 20_000)


@st.composite
def mixed_works(draw: st.DrawFn) -> Workload:
    """Two or three node groups, each with its own speed, links and memory."""
    count = draw(st.sampled_from((2, 2, 3)))
    groups = [draw(node_groups(alike=False)) for _ in range(count)]
    groups = [_sized(group, draw(st.sampled_from(MEMORIES))) for group in groups]
    model: ModelProfile = as_counted(draw(models(most_layers=4)))
    assume(any(row.forward_flops for one in model.layers for row in one.measurements))
    batch = draw(st.sampled_from((2, 4, 5, 6, 8)))
    asked: Job = job(batch, optimizer=draw(st.sampled_from(("sgd", "adam"))))
    return workload(model, Cluster(node_groups=tuple(groups)), asked)


def _sized(group: NodeGroup, memory_bytes: int) -> NodeGroup:
    assert not isinstance(group.device, str)
    device = group.device.model_copy(update={"memory_bytes": memory_bytes})
    return group.model_copy(update={"device": device})


@settings(max_examples=200)
@given(mixed_works(), st.integers(0, 2**30))
def test_no_bound_is_above_a_step_that_fits(work: Workload, seed: int) -> None:
    """Neither those of a row nor those of an option, a cut or the capacity of ranks."""
    chooser = random.Random(seed)
    layouts = Layouts(work, whole_space(work, least_tokens=1))
    count = len(layouts.table)
    for index in chooser.sample(range(count), min(count, MOST_ROWS)):
        option = chooser.choice(list(layouts.options.of(layouts.row(index))))
        compare_bounds(layouts, index, option, chooser)


def compare_bounds(
    layouts: Layouts, index: int, option: Option, chooser: random.Random
) -> int:
    """Compare all bounds of a row with steps of random cuts and modes; return how many."""
    row = layouts.row(index)
    order = layouts.order(row)
    prices = layouts.prices(row, option)
    costs = layouts.pricing.costs(row, option)
    maps = [
        (sizes, stage_map)
        for sizes in all_cuts(len(prices.kind_of), row.pipeline * row.virtual_stages)
        for stage_map in all_maps(prices, sizes)
    ]
    chooser.shuffle(maps)
    bound = layouts.bound(row, option)
    rule = RuleCuts(prices, order)
    least = layouts.pricing.least(row)
    assert least is not None
    bounds = RowBounds(layouts.space, layouts.options, layouts.pricing)
    row_bound = bounds.of(layouts.table.take(np.array([index])))[0]
    compared = 0
    for sizes, stage_map in maps[:MOST_MAPS]:
        step = step_of(costs, stage_map)
        if step is None:
            continue
        compared += 1
        assert bound <= step, (row, option, bound, step, stage_map)
        assert lower_bound(least, order) <= step
        assert row_bound <= step
        assert rule.bound(sizes) <= step
        assert may_beat([least, prices], [order], step + 1).all()
    return compared


@settings(max_examples=60)
@given(mixed_works())
def test_search_is_brute_force_over_rows_options_cuts_and_modes(work: Workload) -> None:
    """On small clusters all cuts are evaluated: equal steps, and proven."""
    layouts = Layouts(work, whole_space(work, least_tokens=1))
    counted = sum(
        len(layouts.options.of(layouts.row(index)))
        for index in range(len(layouts.table))
    )
    assume(counted <= MOST_LAYOUTS)
    result = plan_space(work, whole_space(work, least_tokens=1))
    best = None if result.best is None else result.best.total
    assert best == _brute_force(layouts)
    assert result.lower_bound == (best or result.lower_bound)


def _brute_force(layouts: Layouts) -> int | None:
    """Return the least nanoseconds of all stage maps that fit; None: there is none."""
    steps: list[int] = []
    for index in range(len(layouts.table)):
        row = layouts.row(index)
        stages = row.pipeline * row.virtual_stages
        for option in layouts.options.of(row):
            prices = layouts.prices(row, option)
            costs = layouts.pricing.costs(row, option)
            for sizes in all_cuts(len(prices.kind_of), stages):
                for stage_map in all_maps(prices, sizes):
                    step = step_of(costs, stage_map)
                    if step is not None:
                        steps.append(step)
    return min(steps, default=None)
