"""Windows of stage boundaries leave out no stage map that could be better."""

from __future__ import annotations

from itertools import accumulate, groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import layout_costs, workload
from planner.search.bounds import room_bytes, warm_ups
from planner.search.segments import allowed_modes
from planner.search.windows import Kinds, Windows, windows_of
from tests.brute_force import PARTITIONED, price_all
from tests.search.test_brute_force import memory_of
from tests.strategies import Instance, instances


@settings(max_examples=15)
@given(instances(), st.floats(0.8, 1.5))
def test_windows_hold_every_stage_map_that_is_fast_enough_and_fits(instance: Instance, factor: float) -> None:
    """(W1) to (W4): the boundaries of every such stage map lie within."""
    work = workload(instance.profile, instance.cluster, instance.job)
    priced = price_all(instance.profile, instance.cluster, instance.job)
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
                assert all(a <= b <= c for a, b, c in zip(windows.least, behind, windows.most, strict=True))


def test_without_limits_every_stage_has_a_layer() -> None:
    """Five layers on three ranks: the second starts before layer 1, 2 or 3, the third before 2, 3 or 4."""
    windows = Windows.everywhere(5, 3)
    assert (windows.least, windows.most, windows.width) == ((0, 1, 2, 5), (0, 3, 4, 5), 3)
    assert not windows.is_empty
