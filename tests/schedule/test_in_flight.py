"""What a rank holds follows from the order of its actions."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from planner.schedule import (
    ActionKind,
    Durations,
    Schedule,
    build,
    in_flight,
    in_flight_per_stage,
    in_flight_vectors,
    simulate,
)

from .strategies import schedules


def held_over_time(schedule: Schedule, rank: int) -> list[tuple[int, ...]]:
    """Units of each stage of a rank during every action, counted from the events of a simulation."""
    events = simulate(schedule, Durations.uniform(schedule.stages)).events[rank]
    opened = {
        (e.action.stage, e.action.micro_batch): e.start_seconds
        for e in events
        if e.action.kind is ActionKind.FORWARD
    }
    closed = {
        (e.action.stage, e.action.micro_batch): e.end_seconds
        for e in events
        if e.action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
    }
    return [
        tuple(
            sum(
                opened[unit] <= event.start_seconds < closed[unit]
                for unit in opened
                if unit[0] == stage
            )
            for stage in schedule.stages_of(rank)
        )
        for event in events
    ]


@given(schedules)
def test_counts_are_those_of_the_events(schedule: Schedule) -> None:
    """Peaks, peaks per stage and maximal combinations agree with counting over time."""
    vectors = in_flight_vectors(schedule)
    for rank in range(schedule.ranks):
        held = held_over_time(schedule, rank)
        assert in_flight(schedule)[rank] == max(map(sum, held))
        at_peak = tuple(
            in_flight_per_stage(schedule)[stage] for stage in schedule.stages_of(rank)
        )
        if not schedule.replica_ranks:
            assert at_peak in held
            assert sum(at_peak) == max(map(sum, held))
        assert set(vectors[rank]) <= set(held)
        assert all(
            any(_reaches(vector, each) for vector in vectors[rank]) for each in held
        )
        assert not any(
            _reaches(a, b) for a, b in product(vectors[rank], repeat=2) if a != b
        )


def _reaches(large: tuple[int, ...], small: tuple[int, ...]) -> bool:
    return all(left >= right for left, right in zip(large, small, strict=True))


@given(st.integers(1, 6), st.integers(1, 9))
def test_one_stage_per_rank_has_one_number(ranks: int, micro_batches: int) -> None:
    """With one stage per rank all three answers are the same."""
    schedule = build("1f1b", ranks=ranks, micro_batches=micro_batches)
    assert in_flight(schedule) == in_flight_per_stage(schedule)
    assert in_flight_vectors(schedule) == tuple(
        ((units,),) for units in in_flight(schedule)
    )
