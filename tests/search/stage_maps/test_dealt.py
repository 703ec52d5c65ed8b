"""The rule that deals layers to stages, and the bounds of what it deals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import choose, evaluate, layout_costs, workload
from planner.errors import LayoutError
from planner.schedule import ActionKind, build, find
from planner.schedule.in_flight import in_flight_vectors
from planner.search.bounds.layout import Totals, any_order_bound
from planner.search.engine.dealing import balanced, deal, deal_among, even_sizes
from planner.search.layouts.orders import DEALT
from planner.search.layouts.space import layouts
from planner.search.stage_maps.dealt import (
    Uniform,
    layout_schedule,
    layout_traits,
    ranks_of,
    traits_of,
)
from planner.search.stage_maps.segments import uniform_modes
from tests.strategies import Instance, instances

WORK = st.lists(st.integers(1, 30), min_size=2, max_size=9)


@given(WORK, st.data())
def test_even_sizes_have_the_least_squares(
    work: list[int], data: st.DataObject
) -> None:
    """(E1): no contiguous partition has a smaller sum of squared stages."""
    stages = data.draw(st.integers(1, len(work)))
    cuts = combinations(range(1, len(work)), stages - 1)
    least = min(
        sum(
            sum(work[start:stop]) ** 2
            for start, stop in pairwise((0, *each, len(work)))
        )
        for each in cuts
    )
    sizes = even_sizes(np.array([work]), (0,) * stages).tolist()
    stops = np.cumsum(sizes).tolist()
    assert (
        sum(sum(work[start:stop]) ** 2 for start, stop in pairwise((0, *stops)))
        == least
    )


@given(
    WORK,
    st.sampled_from(
        [(0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)]
    ),
)
def test_balancing_never_makes_a_rank_busier(
    work: list[int], stage_ranks: tuple[int, ...]
) -> None:
    """(E2): every stage keeps a layer, none is lost, and the busiest rank has no more to do than before."""
    if len(work) < len(stage_ranks):
        return
    even = even_sizes(np.array([work]), (0,) * len(stage_ranks))
    sizes = balanced(np.array([work] * len(stage_ranks)), even, np.array(stage_ranks))
    assert sizes.min() >= 1
    assert sizes.sum() == len(work)
    assert busiest(work, sizes.tolist(), stage_ranks) <= busiest(
        work, even.tolist(), stage_ranks
    )


def busiest(work: list[int], sizes: list[int], stage_ranks: tuple[int, ...]) -> int:
    """Work of the busiest rank."""
    stops = np.cumsum(sizes).tolist()
    loads = [sum(work[start:stop]) for start, stop in pairwise((0, *stops))]
    return max(
        sum(load for load, rank in zip(loads, stage_ranks, strict=True) if rank == each)
        for each in set(stage_ranks)
    )


@given(
    WORK,
    WORK,
    st.sampled_from([(0, 1), (1, 0)]),
    st.sampled_from([(0, 1, 0, 1), (0, 1, 1, 0)]),
)
def test_every_layer_lasts_as_on_its_own_device(
    fast: list[int], slow: list[int], devices: tuple[int, int], ranks: tuple[int, ...]
) -> None:
    """(E1) and (E2) on two kinds of devices: at first the sum of the squares, each by the device's own work of all
    layers, is least; at last no layer that the busiest rank gives away makes the ranks less busy."""
    works = tuple(zip(*zip(fast, slow, strict=False), strict=True))
    if len(works[0]) < len(ranks):
        return
    kinds, whole = [devices[rank] for rank in ranks], [sum(work) for work in works]

    def ticks(sizes: Sequence[int]) -> list[int]:
        stops = np.cumsum(sizes).tolist()
        return [
            sum(works[kind][start:stop])
            for kind, (start, stop) in zip(kinds, pairwise((0, *stops)), strict=True)
        ]

    def squares(sizes: Sequence[int]) -> float:
        return sum(
            each**2 / whole[kind]
            for kind, each in zip(kinds, ticks(sizes), strict=True)
        )

    def loads(sizes: Sequence[int]) -> list[int]:
        return [
            sum(
                each
                for each, rank in zip(ticks(sizes), ranks, strict=True)
                if rank == one
            )
            for one in (0, 1)
        ]

    cuts = combinations(range(1, len(works[0])), len(ranks) - 1)
    every = [
        tuple(stop - start for start, stop in pairwise((0, *each, len(works[0]))))
        for each in cuts
    ]
    even = even_sizes(np.array(works), kinds).tolist()
    assert squares(even) == pytest.approx(min(map(squares, every)))
    sizes = deal_among(works, devices, ranks)
    busiest_rank = loads(sizes).index(max(loads(sizes)))
    moved = [
        [size + (place == taker) - (place == giver) for place, size in enumerate(sizes)]
        for giver, taker in permutations(range(len(ranks)), 2)
        if sizes[giver] > 1 and ranks[giver] == busiest_rank
    ]
    assert max(loads(sizes)) <= min(max(loads(other)) for other in [even, *moved])


def test_heavy_head_is_balanced_by_the_other_stage_of_its_rank() -> None:
    """Two ranks of two stages; the last layer weighs three: its rank gets fewer of the others."""
    sizes = deal((1, 1, 1, 1, 1, 1, 1, 3), (0, 1, 0, 1))
    assert busiest([1, 1, 1, 1, 1, 1, 1, 3], list(sizes), (0, 1, 0, 1)) == 5


@pytest.mark.parametrize("name", DEALT)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_short_schedules_tell_the_traits_of_long_ones(name: str, ranks: int) -> None:
    """(E5): a stage holds no fewer micro-batches of many than of few, and ranks end with the same kind of action."""
    entry = find(name)
    for virtual, micro_batches in (
        (v, m) for v in (1, 2, 3) for m in (1, 2, 3, 4, 6, 8, 12, 16, 20)
    ):
        if not entry.takes_virtual_stages(virtual):
            continue
        try:
            schedule = build(
                name, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual
            )
        except LayoutError:
            continue
        traits, vectors = (
            traits_of(name, ranks, micro_batches, virtual),
            in_flight_vectors(schedule),
        )
        for rank, held in zip((0, ranks - 1), traits.held, strict=True):
            fewer = [held.get(stage, 0) for stage in schedule.stages_of(rank)]
            assert any(
                all(a <= b for a, b in zip(fewer, many, strict=True))
                for many in vectors[rank]
            )
        last = schedule.actions[-1]
        ends_low = last[-1][:2] == (
            schedule.stages_of(ranks - 1)[0],
            ActionKind.BACKWARD,
        )
        assert ends_low or not traits.ends_low


@settings(max_examples=25)
@given(instances())
def test_bounds_of_dealt_layouts_are_admissible(instance: Instance) -> None:
    """No dealt layout is faster than (B1), (B3) and (E3), (E4) say, or holds less than (E5) says."""
    work = workload(instance.profile, instance.cluster, instance.job)
    for layout in layouts(work):
        if layout.schedule not in DEALT:
            continue
        costs = layout_costs(work, layout)
        modes = uniform_modes(costs, layout.recompute)
        layers, ranks, traits = (
            Uniform.of(costs, modes),
            ranks_of(costs),
            layout_traits(costs),
        )
        sizes = deal(layers.work, ranks)
        ticks = evaluate(
            costs, layout_schedule(costs), choose(costs, layers.stage_map(sizes))
        ).total_ticks
        assert any_order_bound(costs, Totals.of(costs, modes)) <= ticks
        assert layers.bound(sizes, ranks, ends_low=traits.ends_low) <= ticks
        assert layers.may_hold(sizes, traits)
