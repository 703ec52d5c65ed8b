"""Recompute modes of one rank, with many layers and many modes, against plain sums."""

from __future__ import annotations

import time
from typing import NamedTuple, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.engine.mixtures import Group, fewest_nanoseconds
from planner.search.engine.prices import Modes


class Mode(NamedTuple):
    """What the choice reads of a layer's cost."""

    activation_bytes: int
    backward_ticks: int
    temporary_bytes: int


MODE = st.builds(Mode, st.integers(0, 12), st.integers(0, 20), st.integers(0, 6))
KIND = st.lists(MODE, min_size=1, max_size=5)
GROUP = st.builds(
    Group, kind=st.integers(0, 1), count=st.integers(1, 30), units=st.just(1.0)
)


def fewest_of_all(layers: list[list[Mode]], room: int) -> int | None:
    """Return the least time of all mixtures, by the bytes that they save."""
    best: int | None = None
    for largest in {one.temporary_bytes for modes in layers for one in modes}:
        least = {0: 0}
        for modes in layers:
            added: dict[int, int] = {}
            for saved, spent in least.items():
                for one in modes:
                    if one.temporary_bytes > largest:
                        continue
                    size = saved + one.activation_bytes
                    total = spent + one.backward_ticks
                    added[size] = min(added.get(size, total), total)
            least = added
        fitting = [spent for size, spent in least.items() if size + largest <= room]
        if fitting and (best is None or min(fitting) < best):
            best = min(fitting)
    return best


@settings(max_examples=150, deadline=None)
@given(
    kinds=st.tuples(KIND, KIND),
    groups=st.lists(GROUP, min_size=1, max_size=3),
    room=st.integers(0, 400),
)
def test_chosen_modes_take_least_time_of_all_that_fit(
    kinds: tuple[list[Mode], list[Mode]], groups: list[Group], room: int
) -> None:
    """No mixture within the memory takes less time, with up to 90 layers."""
    modes = [cast(Modes, tuple(each)) for each in kinds]
    layers = [kinds[group.kind] for group in groups for _ in range(group.count)]
    found = fewest_nanoseconds(groups, modes, room)
    expected = fewest_of_all(layers, room)
    if found is None:
        assert expected is None
        return
    assert [len(choice) for choice in found] == [group.count for group in groups]
    chosen = [
        kinds[group.kind][place]
        for group, choice in zip(groups, found, strict=True)
        for place in choice
    ]
    saved = sum(one.activation_bytes for one in chosen)
    assert saved + max(one.temporary_bytes for one in chosen) <= room
    assert sum(one.backward_ticks for one in chosen) == expected


def test_five_modes_of_many_layers_are_chosen_fast() -> None:
    """126 layers in 5 modes have 1e7 mixtures; most are never listed."""
    sizes = (822_640_664, 419_954_712, 385_875_968, 67_633_176, 33_554_432)
    times = (100_000_000, 103_100_003, 104_500_019, 117_300_011, 119_000_023)
    pairs = zip(sizes, times, strict=True)
    kind = cast(Modes, tuple(Mode(size, spent, 0) for size, spent in pairs))
    groups = [Group(0, 63, 4.0), Group(0, 63, 2.0)]
    start = time.perf_counter()
    for share in range(1, 10):
        assert fewest_nanoseconds(groups, [kind], share * 3.0e10) is not None
    assert time.perf_counter() - start < 2.0
