"""One row: recomputation of a rank, and bounds of single cuts, against brute force."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.cost import Workload, layout_costs, workload
from planner.profiler.counted import counted_profile
from planner.search.engine.bound import (
    IMPOSSIBLE,
    Order,
    lower_bound,
    traits_of,
)
from planner.search.engine.constraints import MODES
from planner.search.engine.cut import all_cuts
from planner.search.engine.engine import Search
from planner.search.engine.mixtures import Group, fewest_nanoseconds
from planner.search.engine.options import Row
from planner.search.engine.prices import Prices
from planner.search.engine.rule import RuleCuts
from planner.search.engine.solve import CutSolver, Item, RowSolver
from planner.search.engine.space import whole_space
from planner.spec import Cluster, Job, Layout, NodeGroup
from tests.builders import job, layer, profile
from tests.check.mixed import as_counted, group
from tests.search.engine.exact import Layouts, all_maps, step_of
from tests.search.engine.test_engine import tight, whole
from tests.search.engine.test_groups import mixed_works
from tests.search.engine.test_table import decoder
from tests.strategies import Instance, instances


def item_of(layouts: Layouts, chooser: random.Random) -> Item:
    """A random row with a random option."""
    row = layouts.row(chooser.randrange(len(layouts.table)))
    option = chooser.choice(list(layouts.options.of(row)))
    prices = layouts.prices(row, option)
    costs = layouts.pricing.costs(row, option)
    order = layouts.order(row)
    cuts = RuleCuts(prices, order).sizes
    return Item(row, option, prices, costs, order, cuts)


@settings(max_examples=80, deadline=None)
@given(instances(most_layers=4), st.integers(0, 2**30))
def test_bound_of_a_cut_is_below_all_its_modes(instance: Instance, seed: int) -> None:
    """No fitting choice of modes for a cut is below the cut's bound, on tight devices."""
    if len(workload(instance.profile, instance.cluster, instance.job).groups):
        return
    work = tight(instance, seed)
    layouts = Layouts(work, whole(work))
    if not len(layouts.table):
        return
    chooser = random.Random(seed + 1)
    item = item_of(layouts, chooser)
    solver = RowSolver(item).cuts
    stages = item.order.ranks * item.order.virtual_stages
    sizes = chooser.choice(list(all_cuts(len(item.prices.kind_of), stages)))
    steps = [
        step_of(item.costs, stage_map) for stage_map in all_maps(item.prices, sizes)
    ]
    fitting = [step for step in steps if step is not None]
    assert all(solver.rule.bound(sizes) <= step for step in fitting)
    found = solver.evaluate(sizes)
    if found is not None:
        assert found.total in fitting
    if item.order.virtual_stages == item.order.chunks == 1:
        assert (found is None) == (not fitting)


@pytest.mark.parametrize(
    "case",
    [("llama-3.1-8b", 16, 64, 8192), ("llama-3.1-70b", 64, 128, 8192)],
    ids=lambda case: case[0],
)
def test_bound_of_a_cut_at_scale(case: tuple[str, int, int, int]) -> None:
    """The plan of a rule's cut, with the recomputation that its memory requires, is not below its bound or the row's."""
    work = decoder(*case)
    layouts = Layouts(work, whole_space(work))
    chooser = random.Random(7)
    compared = 0
    for _ in range(400):
        item = item_of(layouts, chooser)
        if item.row.micro_batches * item.row.pipeline * item.row.virtual_stages > 1024:
            continue
        if traits_of(item.order).is_split:
            item.modes = ("none",)
        solver = RowSolver(item).cuts
        for sizes in item.cuts:
            found = solver.evaluate(sizes)
            if found is None:
                continue
            assert solver.rule.bound(sizes) <= found.total, item.order
            assert layouts.bound(item.row, item.option) <= found.total, item.order
            compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    "case",
    [("llama-3.1-70b", 64, 128, 8192), ("mixtral-8x7b", 64, 128, 4096)],
    ids=lambda case: case[0],
)
def test_bound_of_a_row_is_below_its_options(case: tuple[str, int, int, int]) -> None:
    """No option of a row is faster under the row's cuts than the row's bounds."""
    work = decoder(*case)
    search = Search(work, whole_space(work))
    chooser = random.Random(11)
    compared = 0
    for _ in range(150):
        node = search.bound_row(chooser.randrange(len(search.table)))
        row = Row.of(search.table, node.index)
        order = search.order(row)
        option = chooser.choice(list(search.options.of(row)))
        if row.micro_batches * row.pipeline * row.virtual_stages > 512:
            continue
        (one,) = search.bound_options(node, row, [(0, option)])
        if one.item is None:
            continue
        found = RowSolver(one.item).solve(10**15, moves=False)
        if found is not None:
            assert node.bound_all_cuts <= node.nanoseconds <= found.total, (
                order,
                option,
            )
            assert one.bound_all_cuts <= one.nanoseconds <= found.total, (order, option)
            compared += 1
    assert compared > 5


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**30))
def test_recomputation_of_a_rank_is_the_cheapest_that_fits(seed: int) -> None:
    """Modes of a rank equal the best of all mixtures, for every memory."""
    chooser = random.Random(seed)
    work = decoder("llama-3.2-1b", 8, 8, 8192)
    layouts = Layouts(work, whole_space(work))
    row = layouts.row(chooser.randrange(len(layouts.table)))
    option = next(iter(layouts.options.of(row)))
    prices = layouts.pricing.prices(row, option)
    groups = [
        Group(chooser.randrange(len(prices.modes)), chooser.randint(1, 3), units)
        for units in (float(chooser.randint(1, 8)),) * chooser.randint(1, 2)
    ]
    layers = [group for group in groups for _ in range(group.count)]
    every = [
        [(group.units, one) for one in prices.modes[group.kind]] for group in layers
    ]
    priced = []
    for chosen in product(*every):
        saved = sum(units * one.activation_bytes for units, one in chosen)
        largest = max(one.temporary_bytes for _, one in chosen)
        priced.append((saved + largest, sum(one.backward_ticks for _, one in chosen)))
    room = chooser.choice(priced)[0] - chooser.choice((0, 0, 1))
    fitting = [spent for bytes_, spent in priced if bytes_ <= room]
    found = fewest_nanoseconds(groups, prices.modes, room)
    if not fitting:
        assert found is None
        return
    assert found is not None
    spent = sum(
        prices.modes[group.kind][place].backward_ticks
        for group, choice in zip(groups, found, strict=True)
        for place in choice
    )
    assert spent == min(fitting)


@pytest.mark.parametrize(("nodes", "per_node"), [(3, 8), (4, 6)])
def test_bound_of_rows_with_unequal_shares(nodes: int, per_node: int) -> None:
    """No plan of a row whose replicas have unequal shares is below the row's bound, where groups cross nodes unequally too."""
    nodes_ = NodeGroup(device="h100-sxm5-80gb", nodes=nodes, devices_per_node=per_node)
    asked = Job(
        global_batch_size=64,
        sequence_length=4096,
        precision="bf16-mixed",
        optimizer="adamw",
    )
    profile = counted_profile("llama-3.2-1b", sequence_length=4096)
    work = workload(profile, Cluster(node_groups=(nodes_,)), asked)
    search = Search(work, whole_space(work))
    uneven = np.flatnonzero(search.table.larger_shares > 0).tolist()
    compared = 0
    for index in random.Random(3).sample(uneven, 40):
        row = Row.of(search.table, index)
        order = search.order(row)
        node = search.bound_row(index)
        for option in search.options.of(row):
            prices = search.pricing.prices(row, option)
            costs = search.pricing.costs(row, option)
            cuts = node.cuts or RuleCuts(prices, order).sizes
            item = Item(row, option, prices, costs, order, cuts)
            found = RowSolver(item).solve(10**15, moves=False)
            if found is None:
                continue
            assert found.layout.has_uneven_shares
            assert node.nanoseconds <= found.total, (order, option)
            assert search.row_bounds[index] <= found.total
            assert lower_bound(prices, order) <= found.total
            compared += 1
    assert compared > 40


@settings(max_examples=60)
@given(mixed_works(), st.integers(0, 2**30))
def test_layouts_on_node_groups_have_the_best_stage_map(
    work: Workload, seed: int
) -> None:
    """Of all cuts and modes that fit every class of replicas, under gpipe and 1f1b."""
    chooser = random.Random(seed)
    space = replace(whole_space(work, least_tokens=1), schedules=("1f1b", "gpipe"))
    layouts = Layouts(work, space)
    assume(len(layouts.table))
    for index in chooser.choices(range(len(layouts.table)), k=4):
        row = layouts.row(index)
        option = chooser.choice(list(layouts.options.of(row)))
        prices = layouts.prices(row, option)
        costs = layouts.pricing.costs(row, option)
        steps = []
        for sizes in all_cuts(len(prices.kind_of), row.pipeline):
            maps = all_maps(prices, sizes)
            steps += [step_of(costs, stage_map) for stage_map in maps]
        solver = CutSolver(prices, costs, layouts.order(row), ())
        found = solver.solve(IMPOSSIBLE)
        fitting = [step for step in steps if step is not None]
        assert (found and found.total) == min(fitting, default=None)


def test_modes_fit_the_class_of_replicas_with_least_memory() -> None:
    """Two replicas on devices of different memory: the smaller one decides what recomputes."""
    each = layer(
        flops=10**6, activation=10_000, kept=100, modes=("none", "full"), recompute=5e-6
    )
    model = as_counted(profile(each * 4))
    large = group(1.0, devices=1, memory_bytes=10**9, reserved_bytes=0)
    small = group(2.0, devices=1, memory_bytes=30_000, reserved_bytes=0)

    def recomputing(*machines: NodeGroup) -> int:
        """Layers that recompute."""
        work = workload(model, Cluster(node_groups=machines), job(8))
        layout = Layout(data_parallel_degree=2, recompute="per-layer")
        costs = layout_costs(work, layout)
        prices = Prices.of([costs], MODES)
        order = Order("1f1b", 1, costs.micro_batches, 1, 1)
        found = CutSolver(prices, costs, order, ((4,),)).solve(IMPOSSIBLE)
        assert found is not None
        (stage,) = found.stage_map
        return [mode for _, mode in stage].count("full")

    assert recomputing(large, large) == 0
    assert 0 < recomputing(large, small) < 4
    assert recomputing(small, large) == recomputing(large, small)
