"""Bounds on one cut and on many: no recomputation of a cut that fits is faster."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import choose, rank_memory, schedule_of, workload
from planner.search.engine.bound import Order
from planner.search.engine.capacity import may_beat
from planner.search.engine.options import Row
from planner.search.engine.paths import Paths, paths_of
from planner.search.engine.rule import RuleCuts
from planner.search.engine.space import whole_space
from tests.search.engine.exact import (
    HOST_BANDWIDTHS,
    PLENTY,
    Layouts,
    all_cuts,
    all_maps,
    random_map,
    step_of,
    with_host,
    with_memory,
)
from tests.search.engine.test_table import decoder
from tests.strategies import Instance, instances

MOST_MAPS = 400
MOST_UNITS = 2048


@settings(max_examples=150, deadline=None)
@given(instances(most_layers=6), st.integers(0, 2**30), st.sampled_from((0, 0, 1)))
def test_no_recomputation_of_a_cut_beats_its_bound(
    instance: Instance, seed: int, missing: int
) -> None:
    """On devices that just hold some stage map, under one option and the least of all."""
    chooser = random.Random(seed)
    bandwidth = chooser.choice((None, None, *HOST_BANDWIDTHS))
    if bandwidth is not None:
        instance = with_host(instance, bandwidth, PLENTY)
    work = workload(instance.profile, instance.cluster, instance.job)
    if work.groups:
        return
    layouts = Layouts(work, whole_space(work, least_tokens=1))
    if not len(layouts.table):
        return
    row = layouts.row(chooser.randrange(len(layouts.table)))
    option = chooser.choice(list(layouts.options.of(row)))
    costs = layouts.pricing.costs(row, option)
    prices = layouts.prices(row, option)
    stages = row.pipeline * row.virtual_stages
    cuts = list(all_cuts(len(prices.kind_of), stages))
    sizes = chooser.choice(cuts)
    maps = list(all_maps(prices, sizes))
    chooser.shuffle(maps)
    maps = maps[:MOST_MAPS]
    rows = rank_memory(costs, schedule_of(costs), choose(costs, maps[0]))
    memory = max(each.peak_bytes for each in rows) - missing
    instance = with_memory(instance, max(1, memory))
    smaller = workload(instance.profile, instance.cluster, instance.job)
    layouts = Layouts(smaller, whole_space(smaller, least_tokens=1))
    costs = layouts.pricing.costs(row, option)
    steps = [step_of(costs, stage_map) for stage_map in maps]
    fitting = [step for step in steps if step is not None]
    order = layouts.order(row)
    least = layouts.pricing.least(row)
    assert least is not None
    for priced in (layouts.prices(row, option), least):
        bounds = RuleCuts(priced, order).bounds
        bound = bounds.bounds([sizes])[0]
        assert all(bound <= step for step in fitting), (row, option, bound)
        among = bounds.bounds(cuts)[cuts.index(sizes)]
        assert among == pytest.approx(bound)
        limits = [float(step + 1) for step in fitting]
        assert all(may_beat([priced], [order], limit).all() for limit in limits), row


CASES = [
    ("llama-3.2-1b", 8, 16, 8192),
    ("llama-3.1-8b", 16, 64, 8192),
    ("llama-3.1-70b", 64, 128, 8192),
    ("mixtral-8x7b", 32, 64, 4096),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_no_random_cut_of_decoders_beats_its_bound(
    case: tuple[str, int, int, int],
) -> None:
    """Random rows of catalogue decoders, chunks and several stages per rank among them."""
    work = decoder(*case)
    layouts = Layouts(work, whole_space(work))
    chooser = random.Random(8)
    compared = several = 0
    while compared < 60:
        row = layouts.row(chooser.randrange(len(layouts.table)))
        if units_of(row) > MOST_UNITS:
            continue
        option = chooser.choice(list(layouts.options.of(row)))
        prices = layouts.prices(row, option)
        stage_map = random_map(prices, row.pipeline * row.virtual_stages, chooser)
        step = step_of(layouts.pricing.costs(row, option), stage_map)
        if step is None:
            continue
        sizes = tuple(map(len, stage_map))
        bound = RuleCuts(prices, layouts.order(row)).bound(sizes)
        assert bound <= step, (row, option, stage_map)
        compared += 1
        several += row.virtual_stages > 1
    assert several > 5


def units_of(row: Row) -> int:
    """Micro-batches of all stages."""
    return row.micro_batches * row.pipeline * row.virtual_stages


def test_the_path_of_1f1b_is_its_fill_and_the_work_of_a_rank() -> None:
    """P - 1 other stages once, and one stage for every micro-batch, forward and back."""
    paths = paths_of(Order("1f1b", 4, 12, 1, 1))
    assert isinstance(paths, Paths)
    forward = np.sort(paths.forward, axis=1)
    for counts in forward.tolist():
        assert sum(counts) == pytest.approx(12 + 3)
    assert (paths.forward.sum(axis=1) == paths.backward.sum(axis=1)).all()


def test_synthesized_orders_have_no_path() -> None:
    """Their order depends on the durations."""
    assert paths_of(Order("synthesized", 4, 8, 1, 1)) is None
