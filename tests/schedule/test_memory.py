"""What a rank holds over time follows from the events of the simulation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.schedule import (
    Durations,
    HeldBytes,
    build,
    memory_curves,
    peak_bytes,
    simulate,
)

from .strategies import schedules


@given(schedules)
def test_counting_units_gives_the_peak_in_flight(schedule) -> None:  # type: ignore[no-untyped-def]
    """The top of every curve is the number that follows from the order, and nothing is held in the end."""
    made = simulate(schedule, Durations.uniform(schedule.stages, recompute=1))
    curves = memory_curves(made)
    assert (
        tuple(max(held for _, held in curve) for curve in curves) == made.peak_in_flight
    )
    assert all(curve[-1][1] == 0 for curve in curves)
    assert all(
        list(curve) == sorted(curve, key=lambda step: step[0]) for curve in curves
    )


@given(st.integers(1, 5), st.integers(0, 6))
def test_zero_bubble_until_its_input_gradient(ranks: int, more: int) -> None:
    """With nothing left for W after I, ZB-H1 holds what 1F1B holds: P - r."""
    schedule = build("zb-h1", ranks=ranks, micro_batches=ranks + more)
    made = simulate(schedule, Durations.uniform(ranks))
    until_input = HeldBytes((10,) * ranks, weight=(0,) * ranks)
    assert peak_bytes(made, until_input) == tuple(
        10 * (ranks - rank) for rank in range(ranks)
    )


def test_torchgpipe_holds_one_whole_micro_batch() -> None:
    """All but the last hold only their input, until each is recomputed in turn."""
    schedule = build("torchgpipe", ranks=2, micro_batches=4)
    made = simulate(schedule, Durations.uniform(2, recompute=1))
    assert peak_bytes(made, HeldBytes((10, 10), recomputed=(1, 1))) == (13, 13)
    never = simulate(
        build("torchgpipe", ranks=2, micro_batches=4, recompute="never"),
        Durations.uniform(2),
    )
    assert peak_bytes(never, HeldBytes((10, 10), recomputed=(1, 1))) == (40, 40)


def test_curve_by_hand() -> None:
    """F from 0 to 1, I to 3, W to 6: all, then the part for W, then nothing."""
    made = simulate(
        build("zb-h1", ranks=1, micro_batches=1), Durations((1,), (2,), (3,))
    )
    assert memory_curves(made, HeldBytes((10,), weight=(4,))) == (
        ((0, 10), (3, 4), (6, 0)),
    )


def test_wrong_bytes_are_refused() -> None:
    """The error names the field."""
    with pytest.raises(LayoutError, match="weight: 1 values for 2 stages"):
        HeldBytes((1, 1), weight=(1,))
    with pytest.raises(LayoutError, match="recomputed: a part is larger"):
        HeldBytes((1, 1), recomputed=(1, 2))
    made = simulate(build("1f1b", ranks=1, micro_batches=1), Durations.uniform(1))
    with pytest.raises(LayoutError, match="2 stages for a schedule of 1"):
        memory_curves(made, HeldBytes((1, 1)))
