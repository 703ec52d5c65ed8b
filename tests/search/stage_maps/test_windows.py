"""Windows of stage boundaries leave out no stage map that could be better."""

from __future__ import annotations

from itertools import accumulate, groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import layout_costs, workload
from planner.search.bounds.layout import room_bytes, warm_ups
from planner.search.stage_maps.segments import allowed_modes
from planner.search.stage_maps.windows import Kinds, Windows, reach, windows_of, within
from planner.spec import Layout
from tests import builders
from tests.brute_force import PARTITIONED, Priced
from tests.search.test_brute_force import memory_of, tight_instances
from tests.strategies import Instance


@settings(max_examples=15)
@given(tight_instances(), st.floats(0.8, 1.5))
def test_windows_hold_every_stage_map_that_is_fast_enough_and_fits(
    case: tuple[Instance, list[Priced]], factor: float
) -> None:
    """(W1) to (W5): the boundaries of every such stage map lie within."""
    instance, priced = case
    work = workload(instance.profile, instance.cluster, instance.job)
    for layout, same in groupby(priced, key=lambda one: one.layout):
        if layout.schedule not in PARTITIONED:
            continue
        maps = list(same)
        limit = int(factor * min(one.nanoseconds for one in maps)) + 1
        costs = layout_costs(work, layout)
        modes = Kinds.of(allowed_modes(costs, ("per-layer",)))
        windows = windows_of(costs, modes, warm_ups(costs), room_bytes(costs), limit)
        for one in maps:
            if one.nanoseconds < limit and one.peak <= memory_of(instance):
                behind = (0, *accumulate(one.layers_per_stage))
                assert all(
                    a <= b <= c
                    for a, b, c in zip(windows.least, behind, windows.most, strict=True)
                )


def test_windows_are_narrower_where_memory_makes_layers_recompute() -> None:
    """Four of six layers would take the first rank 96 ms of 100; but it holds two micro-batches, for which 500 MB
    have no room unless one and a half layers recompute, which makes 108 ms (W5)."""
    drafts = (
        builders.layer(forward=1e-3, modes=("none", "full"), activation=100_000_000) * 6
    )
    work = workload(builders.profile(drafts), builders.cluster(2), builders.job(8))
    costs = layout_costs(
        work, Layout(pipeline_parallel_degree=2, schedule="1f1b", recompute="per-layer")
    )
    kinds, room, limit = (
        Kinds.of(allowed_modes(costs, ("per-layer",))),
        500_000_000,
        100_000_000,
    )
    by_work = within(reach(costs, kinds, warm_ups(costs), room, limit), 6)
    assert by_work == Windows((0, 3, 6), (0, 4, 6))
    assert windows_of(costs, kinds, warm_ups(costs), room, limit) == Windows(
        (0, 3, 6), (0, 3, 6)
    )


def test_without_limits_every_stage_has_a_layer() -> None:
    """Five layers on three ranks: the second starts before layer 1, 2 or 3, the third before 2, 3 or 4."""
    windows = Windows.everywhere(5, 3)
    assert (windows.least, windows.most, windows.width) == (
        (0, 1, 2, 5),
        (0, 3, 4, 5),
        3,
    )
    assert not windows.is_empty
