"""Prices of kinds are those of the cost model, to the nanosecond and byte."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import layout_costs, workload
from planner.search.engine.space import whole_space
from planner.search.engine.split_backward import forbids_recompute
from tests.search.engine.exact import Layouts
from tests.search.engine.test_table import decoder
from tests.strategies import Instance, instances


def check_row(layouts: Layouts, seed: int) -> None:
    """Compare every layer and mode of one random row and option.

    Where replicas differ, prices are the least of theirs.
    """
    chooser = random.Random(seed)
    row = layouts.row(chooser.randrange(len(layouts.table)))
    option = chooser.choice(list(layouts.options.of(row)))
    costs = layout_costs(layouts.work, layouts.options.layout(row, option))
    prices = layouts.pricing.prices_with_recompute(row, option)
    for layer, kind in enumerate(prices.kind_of):
        modes = tuple(costs.layers[layer].values())
        if not costs.columns:
            assert prices.modes[kind] == modes
        for least, one in zip(prices.modes[kind], modes, strict=True):
            assert least.forward_ticks <= one.forward_ticks
            assert least.backward_ticks <= one.backward_ticks
            assert least.activation_bytes <= one.activation_bytes
    counted = Counter(prices.kind_of)
    assert [
        counted[kind] for kind in range(len(prices.modes))
    ] == prices.counts.tolist()
    assert layouts.pricing.costs(row, option) == costs
    own = layouts.pricing.prices(row, option).modes
    forbids = forbids_recompute(layouts.space.schedules[row.schedule])
    assert own == tuple(modes[:1] if forbids else modes for modes in prices.modes)


@settings(max_examples=60, deadline=None)
@given(instances(), st.integers(0, 2**30))
def test_prices_of_small_models(instance: Instance, seed: int) -> None:
    """Every layer of a random row has the costs that the cost model gives it."""
    work = workload(instance.profile, instance.cluster, instance.job)
    if work.groups:
        return
    layouts = Layouts(work, whole_space(work, least_tokens=1))
    if len(layouts.table):
        check_row(layouts, seed)


def test_prices_of_a_decoder() -> None:
    """The same for rows that are derived, whose blocks are one kind."""
    layouts = Layouts(*_decoder())
    for seed in range(20):
        check_row(layouts, seed)
    row = layouts.row(0)
    option = next(iter(layouts.options.of(row)))
    prices = layouts.pricing.prices_with_recompute(row, option)
    assert len(prices.modes) == 3


def _decoder() -> tuple:  # type: ignore[type-arg]
    work = decoder("llama-3.1-8b", 16, 16, 8192)
    return work, whole_space(work)
