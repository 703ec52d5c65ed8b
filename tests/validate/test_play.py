"""The checker's own player of actions, against the scheduler's simulator and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import LayoutError, ScheduleError
from planner.schedule import Schedule, build, names
from planner.schedule.in_flight import in_flight_per_stage
from planner.schedule.simulate import Durations, simulate
from planner.validate.actions import parse
from planner.validate.play import Action, StageTimes, end_nanoseconds, in_flight

UNIT = StageTimes(forward=1, backward_input=1, backward_weight=1, transfer=0)


@st.composite
def one_stage_schedules(draw: st.DrawFn) -> Schedule:
    """A schedule of the catalogue with one stage per rank, and one copy of it."""
    one_copy = [name for name in names(fixed_only=True) if name not in ("chimera", "dualpipe")]
    name, ranks = draw(st.sampled_from(one_copy)), draw(st.integers(1, 5))
    try:
        return build(name, ranks=ranks, micro_batches=draw(st.integers(1, 9)), virtual_stages=1)
    except LayoutError:
        return build("1f1b", ranks=ranks, micro_batches=draw(st.integers(1, 9)))


@given(one_stage_schedules(), st.data())
def test_ends_and_holdings_are_the_simulators(schedule: Schedule, data: st.DataObject) -> None:
    """Two players of the same lists agree on every rank's end and on what it holds, split backwards included."""
    times = data.draw(
        st.lists(st.builds(StageTimes, *[st.integers(0, 9)] * 4), min_size=schedule.stages, max_size=schedule.stages)
    )
    moves = tuple(one.transfer for one in times[:-1])
    durations = Durations(
        forward=tuple(one.forward for one in times),
        backward_input=tuple(one.backward_input for one in times),
        backward_weight=tuple(one.backward_weight for one in times),
        transfer_forward=moves,
        transfer_backward=moves,
    )
    actions = parse(schedule.to_text())
    assert end_nanoseconds(actions, times) == simulate(schedule, durations).end_seconds
    assert tuple(map(in_flight, actions)) == in_flight_per_stage(schedule)


def test_two_stages_by_hand() -> None:
    """GPipe with two micro-batches, F = 1, B = 2, transfer 1: F F . . . . . B B on the first rank, done at 11."""
    actions = parse([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    assert end_nanoseconds(actions, [StageTimes(1, 1, 1, 1)] * 2) == (11, 8)


def test_input_gradient_lets_the_stage_before_go_on() -> None:
    """A split backward sends its gradient before the weights are done."""
    full = parse([["0F0", "0B0"], ["1F0", "1B0"]])
    split = parse([["0F0", "0B0"], ["1F0", "1I0", "1W0"]])
    assert end_nanoseconds(full, [UNIT, UNIT]) == (6, 4)
    assert end_nanoseconds(split, [UNIT, UNIT]) == (5, 4)


def test_what_is_held() -> None:
    """A micro-batch is held from F until B, or until W when the backward is split."""
    assert in_flight(parse([["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]])[0]) == 2
    assert in_flight(parse([["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]])[0]) == 2
    assert in_flight(()) == 0


def test_dead_lock_names_who_waits() -> None:
    """Two ranks that wait for each other are told, each with the action it stands at."""
    actions = parse([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    with pytest.raises(ScheduleError, match="dead-lock: 0B0 on rank 0, 1F1 on rank 1 wait for ever"):
        end_nanoseconds(actions, [UNIT, UNIT])


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X0", "-1F0", "0F0 ", "0f0", "٣F٠"])
def test_what_is_no_action(text: str) -> None:
    """Only digits, one of F, B, I and W, and digits."""
    with pytest.raises(ScheduleError, match="is no action"):
        parse([[text]])


def test_actions_are_written_as_read() -> None:
    """Reading and writing are inverse."""
    assert str(parse([["12W34"]])[0][0]) == "12W34"
    assert parse([["2F0"]]) == ((Action(2, "F", 0),),)
