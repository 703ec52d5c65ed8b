"""Every schedule has the step time and the memory that its source claims."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.schedule import Durations, build, simulate

times = st.integers(1, 9)
few = st.integers(1, 6)


@given(
    st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]),
    few,
    st.integers(1, 14),
    times,
    times,
    times,
)
def test_flushed_schedules_share_one_bubble(
    name: str,
    ranks: int,
    micro_batches: int,
    forward: int,
    backward_input: int,
    backward_weight: int,
) -> None:
    """GPipe, 1F1B and eager 1F1B all take (M + P - 1)(F + B)."""
    durations = Durations.uniform(
        ranks,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
    )
    made = simulate(build(name, ranks=ranks, micro_batches=micro_batches), durations)
    whole = forward + backward_input + backward_weight
    assert made.makespan == (micro_batches + ranks - 1) * whole
    assert made.bubble_fraction == pytest.approx(
        (ranks - 1) / (micro_batches + ranks - 1)
    )


@given(few, st.integers(1, 14))
def test_in_flight_of_one_stage_per_rank(ranks: int, micro_batches: int) -> None:
    """GPipe holds M, 1F1B min(M, P - r), eager 1F1B min(M, 2 (P - r) - 1)."""

    def peaks(name: str) -> tuple[int, ...]:
        schedule = build(name, ranks=ranks, micro_batches=micro_batches)
        return simulate(schedule, Durations.uniform(ranks)).peak_in_flight

    assert peaks("gpipe") == (micro_batches,) * ranks
    assert peaks("1f1b") == tuple(
        min(micro_batches, ranks - rank) for rank in range(ranks)
    )
    assert peaks("eager-1f1b") == tuple(
        min(micro_batches, 2 * (ranks - rank) - 1) for rank in range(ranks)
    )


@given(
    st.sampled_from(["interleaved-1f1b", "interleaved-memory-optimised", "looped-bfs"]),
    few,
    st.integers(1, 3),
    st.integers(2, 3),
    times,
    times,
)
def test_virtual_stages_divide_the_bubble(
    name: str, ranks: int, rounds: int, virtual: int, forward: int, backward: int
) -> None:
    """With V stages per rank the step takes M V (f + b) + (P - 1)(f + b), f and b of one stage."""
    schedule = build(
        name, ranks=ranks, micro_batches=rounds * ranks, virtual_stages=virtual
    )
    durations = Durations.uniform(
        ranks * virtual, forward=forward, backward_input=backward, backward_weight=0
    )
    units = rounds * ranks * virtual
    assert simulate(schedule, durations).makespan == (units + ranks - 1) * (
        forward + backward
    )


@given(few, st.integers(1, 3), st.integers(2, 3))
def test_in_flight_of_virtual_stages(ranks: int, rounds: int, virtual: int) -> None:
    """Warm-up and one more, but never more than all units."""
    micro_batches = rounds * ranks
    units = micro_batches * virtual

    def peaks(name: str) -> tuple[int, ...]:
        schedule = build(
            name, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual
        )
        return simulate(schedule, Durations.uniform(ranks * virtual)).peak_in_flight

    ahead = (virtual - 1) * ranks + 1
    behind = [ranks - 1 - rank for rank in range(ranks)]
    assert peaks("interleaved-1f1b") == tuple(
        min(units, ahead + 2 * after) for after in behind
    )
    assert peaks("interleaved-memory-optimised") == tuple(
        min(units, ahead + after) for after in behind
    )
    assert peaks("looped-bfs") == (units,) * ranks


@given(few, st.integers(0, 8), times, times, times)
def test_zero_bubble_h1(
    ranks: int, more: int, forward: int, backward_input: int, backward_weight: int
) -> None:
    """ZB-H1: span M (F + I + W) + (P - 1) max(I, F + I - W), P micro-batches held on every rank."""
    micro_batches = ranks + more
    durations = Durations.uniform(
        ranks,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
    )
    made = simulate(build("zb-h1", ranks=ranks, micro_batches=micro_batches), durations)
    bubble = (ranks - 1) * max(
        backward_input, forward + backward_input - backward_weight
    )
    assert (
        made.span
        == micro_batches * (forward + backward_input + backward_weight) + bubble
    )
    assert made.peak_in_flight == (ranks,) * ranks


@given(few, st.integers(0, 8), times, times, times)
def test_zero_bubble_h2(
    ranks: int, more: int, forward: int, backward_input: int, backward_weight: int
) -> None:
    """ZB-H2: span M (F + I + W) + (P - 1) max(0, I - F, F + I - 2 W), 2 P - 1 micro-batches held on every rank."""
    micro_batches = 2 * ranks - 1 + more
    durations = Durations.uniform(
        ranks,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
    )
    made = simulate(build("zb-h2", ranks=ranks, micro_batches=micro_batches), durations)
    bubble = (ranks - 1) * max(
        0, backward_input - forward, forward + backward_input - 2 * backward_weight
    )
    assert (
        made.span
        == micro_batches * (forward + backward_input + backward_weight) + bubble
    )
    assert made.peak_in_flight == (2 * ranks - 1,) * ranks


@given(few, st.integers(0, 8), times)
def test_zero_bubble_v(ranks: int, more: int, unit: int) -> None:
    """ZB-V with f = i = w: no bubble in span, (P - 1) f in makespan, 2 P half micro-batches held on every rank."""
    micro_batches = 2 * ranks - 1 + more
    durations = Durations.uniform(
        2 * ranks, forward=unit, backward_input=unit, backward_weight=unit
    )
    made = simulate(build("zb-v", ranks=ranks, micro_batches=micro_batches), durations)
    assert made.span == 6 * micro_batches * unit
    assert made.makespan == (6 * micro_batches + ranks - 1) * unit
    assert made.peak_in_flight == (min(2 * ranks, 2 * micro_batches),) * ranks


@given(st.integers(2, 6), st.integers(2, 20))
def test_transfers_cost_1f1b_more_than_gpipe(ranks: int, micro_batches: int) -> None:
    """GPipe pays 2 (P - 1) c, 1F1B 2 c (M + P - 3 - floor((M - 2) / P)): it waits for a round trip again and again."""
    durations = Durations.uniform(
        ranks, forward=100, backward_input=100, backward_weight=100, transfer=1
    )
    ideal = (micro_batches + ranks - 1) * 300

    def extra(name: str) -> float:
        return (
            simulate(
                build(name, ranks=ranks, micro_batches=micro_batches), durations
            ).makespan
            - ideal
        )

    assert extra("gpipe") == 2 * (ranks - 1)
    if micro_batches >= ranks:
        assert extra("1f1b") == 2 * (
            micro_batches + ranks - 3 - (micro_batches - 2) // ranks
        )
    assert extra("eager-1f1b") == 2 * (ranks - 1)


@given(st.integers(2, 5), st.integers(1, 3), st.integers(2, 3))
def test_transfers_of_interleaved(ranks: int, rounds: int, virtual: int) -> None:
    """Interleaved 1F1B pays 2 (P V - 1) c: its warm-up hides all transfers but those of the first and last unit."""
    schedule = build(
        "interleaved-1f1b",
        ranks=ranks,
        micro_batches=rounds * ranks,
        virtual_stages=virtual,
    )
    quiet = Durations.uniform(
        ranks * virtual, forward=100, backward_input=100, backward_weight=100
    )
    busy = Durations.uniform(
        ranks * virtual,
        forward=100,
        backward_input=100,
        backward_weight=100,
        transfer=1,
    )
    extra = simulate(schedule, busy).makespan - simulate(schedule, quiet).makespan
    assert extra == 2 * (ranks * virtual - 1)
