"""PipeDream in its steady state: against streams that are simulated or counted micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.schedule import Durations, build, simulate
from planner.schedule.actions import ActionKind
from planner.schedule.pipedream import (
    cycles,
    in_steady_state,
    steady_micro_batches,
    weight_versions,
)

times = st.integers(1, 9)


@st.composite
def stage_times(draw: st.DrawFn) -> Durations:
    """Unequal stages and boundaries, in whole units."""
    ranks = draw(st.integers(1, 5))

    def several(count: int, each: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(each, min_size=count, max_size=count)))

    transfers = several(ranks - 1, st.integers(0, 4))
    return Durations(
        forward=several(ranks, times),
        backward_input=several(ranks, times),
        backward_weight=several(ranks, times),
        transfer_forward=transfers,
        transfer_backward=transfers,
    )


@given(stage_times())
def test_long_streams_reach_the_steady_state(lasting: Durations) -> None:
    """Over 60 further micro-batches, a multiple of every run's length, a stream grows by exactly that."""
    ends = [
        simulate(
            build("pipedream", ranks=lasting.stages, micro_batches=count), lasting
        ).makespan
        for count in (240, 300)
    ]
    assert ends[1] - ends[0] == pytest.approx(steady_micro_batches(lasting, 60))


def test_equal_stages_have_no_bubble() -> None:
    """M (F + B), and no run of neighbours takes longer."""
    lasting = Durations.uniform(4, forward=10, backward_input=12, backward_weight=8)
    assert steady_micro_batches(lasting, 8) == 8 * 30
    assert {one.seconds / one.micro_batches for one in cycles(lasting)} == {30}


def ends_of_steps(
    lasting: Durations, micro_batches: int, tails: Sequence[int], steps: int
) -> list[float]:
    """When the last rank has ended each step of a stream, tails included, played action by action."""
    ranks = lasting.stages
    schedule = build("pipedream", ranks=ranks, micro_batches=micro_batches * steps)
    clock, place = [0.0] * ranks, [0] * ranks
    made: dict[tuple[int, ActionKind, int], float] = {}
    ends = [0.0] * steps
    while any(at < len(row) for at, row in zip(place, schedule.actions, strict=True)):
        for rank, row in enumerate(schedule.actions):
            while place[rank] < len(row):
                stage, kind, unit = row[place[rank]]
                is_forward = kind is ActionKind.FORWARD
                source = stage - 1 if is_forward else stage + 1
                if 0 <= source < ranks:
                    if (source, kind, unit) not in made:
                        break
                    boundary = lasting.transfer_forward[min(source, stage)]
                    arrives = made[source, kind, unit] + boundary
                    clock[rank] = max(clock[rank], arrives)
                backward = lasting.backward_input[rank] + lasting.backward_weight[rank]
                clock[rank] += lasting.forward[rank] if is_forward else backward
                made[stage, kind, unit] = clock[rank]
                place[rank] += 1
                step, last = divmod(unit + 1, micro_batches)
                if not is_forward and not last:
                    clock[rank] += tails[rank]
                    ends[step - 1] = max(ends[step - 1], clock[rank])
    return ends


@settings(max_examples=50)
@given(stage_times(), st.integers(1, 6), st.data())
def test_pauses_after_a_step_add_at_most_the_longest(
    lasting: Durations, micro_batches: int, data: st.DataObject
) -> None:
    """A step takes at most the longest tail more, against a stream of 90 steps; one rank takes it exactly."""
    ranks = lasting.stages
    tails = data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
    steady = steady_micro_batches(lasting, micro_batches)
    ends = ends_of_steps(lasting, micro_batches, tails, 90)
    measured = (ends[89] - ends[29]) / 60
    assert steady * 0.99 <= measured <= (steady + max(tails)) * 1.01
    same = ends_of_steps(lasting, micro_batches, [9] * ranks, 90)
    if ranks == 1:
        assert (same[89] - same[29]) / 60 == pytest.approx(steady + 9)


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
def test_versions_are_those_of_the_micro_batches_in_flight(
    ranks: int, micro_batches: int
) -> None:
    """Counted along a stream: a micro-batch uses the version of its forward until its backward."""
    schedule = build("pipedream", ranks=ranks, micro_batches=8 * micro_batches + ranks)
    for rank, row in enumerate(schedule.actions):
        updates = most = 0
        versions: dict[int, int] = {}
        for _, kind, unit in row:
            if kind is ActionKind.FORWARD:
                versions[unit] = updates
                most = max(most, len({*versions.values(), updates}))
                continue
            del versions[unit]
            updates += (unit + 1) % micro_batches == 0
            most = max(most, len({*versions.values(), updates}))
        assert most == weight_versions(ranks, micro_batches, rank)


def test_versions_of_the_papers() -> None:
    """PipeDream stashes P - r versions; PipeDream-2BW two."""
    assert [weight_versions(4, 1, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [weight_versions(4, 4, rank) for rank in range(4)] == [2, 2, 2, 1]


def test_short_steps_fill_the_pipeline_all_the_same() -> None:
    """One micro-batch per step: rank r holds P - r in the steady state, not one."""
    steady = in_steady_state(build("pipedream", ranks=4, micro_batches=1))
    held = [
        simulate(steady, Durations.uniform(4)).peak_in_flight[rank] for rank in range(4)
    ]
    assert held == [4, 3, 2, 1]
