"""The bound of a row is never above the step of a cut that fits."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import Workload, choose, rank_memory, schedule_of, workload
from planner.search.engine.bound import IMPOSSIBLE
from planner.search.engine.engine import Search
from planner.search.engine.space import whole_space
from tests import builders
from tests.search.engine.exact import (
    HOST_BANDWIDTHS,
    PLENTY,
    Layouts,
    all_cuts,
    all_maps,
    random_map,
    stages_of,
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
def test_bound_of_every_cut_of_small_models(
    instance: Instance, seed: int, missing: int
) -> None:
    """On devices that just hold some stage map, no fitting cut and recomputation is below the bound."""
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
    prices = layouts.prices(row, option)
    costs = layouts.pricing.costs(row, option)
    stages = row.pipeline * row.virtual_stages
    maps = [
        stage_map
        for sizes in all_cuts(len(prices.kind_of), stages)
        for stage_map in all_maps(prices, sizes)
    ]
    chooser.shuffle(maps)
    maps = maps[:MOST_MAPS]
    order = schedule_of(costs)
    tight = chooser.choice(maps)
    rows = rank_memory(costs, order, choose(costs, tight))
    memory = max(each.peak_bytes for each in rows) - missing
    tight_instance = with_memory(instance, max(1, memory))
    smaller = workload(
        tight_instance.profile, tight_instance.cluster, tight_instance.job
    )
    layouts = Layouts(smaller, whole_space(smaller, least_tokens=1))
    bound = layouts.bound(row, option)
    costs = layouts.pricing.costs(row, option)
    steps = [step_of(costs, stage_map) for stage_map in maps]
    fitting = [step for step in steps if step is not None]
    assert all(bound <= step for step in fitting), (
        order.name,
        row,
        option,
        bound,
        min(fitting),
    )


def compare_random_maps(layouts: Layouts, count: int, seed: int) -> Counter[str]:
    """Compare the bounds of random rows with random cuts that fit.

    Args:
        layouts: of one workload.
        count: cuts that are compared.
        seed: of the choice.
    """
    chooser = random.Random(seed)
    found: Counter[str] = Counter()
    while found["compared"] < count:
        found["rows"] += 1
        assert found["rows"] < 100 * count
        row = layouts.row(chooser.randrange(len(layouts.table)))
        if row.micro_batches * row.pipeline * row.virtual_stages > MOST_UNITS:
            continue
        option = chooser.choice(list(layouts.options.of(row)))
        prices = layouts.prices(row, option)
        costs = layouts.pricing.costs(row, option)
        bound = layouts.bound(row, option)
        for _ in range(3):
            stage_map = random_map(prices, row.pipeline * row.virtual_stages, chooser)
            step = step_of(costs, stage_map)
            if step is None:
                continue
            assert bound <= step, (row, option, bound, step, stage_map)
            found["compared"] += 1
            found["several stages"] += row.virtual_stages > 1
            found["chunks"] += row.sequence_chunks > 1
    return found


CASES = [
    ("llama-3.2-1b", 8, 16, 8192),
    ("llama-3.1-8b", 16, 64, 8192),
    ("llama-3.1-70b", 64, 128, 8192),
    ("mixtral-8x7b", 32, 64, 4096),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_bound_of_random_rows(case: tuple[str, int, int, int]) -> None:
    """Random rows of catalogue decoders, chunks and several stages per rank among them."""
    work = decoder(*case)
    layouts = Layouts(work, whole_space(work))
    found = compare_random_maps(layouts, 60, seed=30)
    assert found["several stages"] > 5


def test_bound_of_even_pipelines_is_their_step() -> None:
    """With equal layers, no transfers and M > P, the bound of 1f1b is the even cut's step."""
    work = equal_layers(8, devices=4, batch=12)
    layouts = Layouts(work, whole_space(work, least_tokens=1))
    checked = 0
    for index in range(len(layouts.table)):
        row = layouts.row(index)
        order = layouts.order(row)
        if order.schedule != "1f1b" or row.micro_batches <= row.pipeline:
            continue
        for option in layouts.options.of(row):
            if option.zero_stage:
                continue
            prices = layouts.prices(row, option)
            costs = layouts.pricing.costs(row, option)
            sizes = [8 // row.pipeline] * row.pipeline
            modes = [prices.modes[kind][0].mode for kind in prices.kind_of]
            step = step_of(costs, stages_of(list(enumerate(modes)), sizes))
            assert step is not None
            bound = layouts.bound(row, option)
            assert bound <= step
            assert step - bound <= step * 1e-3
            checked += 1
    assert checked


def equal_layers(count: int, *, devices: int, batch: int) -> Workload:
    """Layers that are all equal, on links that take no time."""
    profile = builders.four_equal_layers()
    layers = profile.layers * (count // 4)
    named = tuple(
        layer.model_copy(update={"name": f"block{place}", "modules": (f"b.{place}",)})
        for place, layer in enumerate(layers)
    )
    profile = profile.model_copy(update={"layers": named})
    links = {"intra": builders.link(1e18), "inter": builders.link(1e18)}
    cluster = builders.cluster(devices, **links)
    return workload(profile, cluster, builders.job(batch))


@settings(max_examples=50)
@given(instances(), st.integers(0, 2**30))
def test_bounds_by_work_of_some_rows_first(instance: Instance, seed: int) -> None:
    """The bounds of rows do not depend on the order in which they are asked for.

    Of several sizes that are too large, only the larger ones may be found impossible.
    """
    work = workload(instance.profile, instance.cluster, instance.job)
    space = whole_space(work, least_tokens=1)
    at_once = Search(work, space).row_bounds
    indices = np.arange(len(at_once))
    np.random.default_rng(seed).shuffle(indices)
    search = Search(work, space)
    for some in np.array_split(indices, 4):
        search.bounds_by_work(some)
    may_fit = at_once < IMPOSSIBLE // 2
    assert (search.row_bounds[may_fit] == at_once[may_fit]).all()
    assert (search.row_bounds <= at_once).all()
