"""The check's replay of actions, against the simulator and by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check.actions import parse_actions
from planner.check.replay import (
    Action,
    StageDurations,
    most_in_flight,
    peaks,
    replay,
    stage_owners,
)
from planner.check.schedules import joint_pairs
from planner.errors import ScheduleError
from planner.schedule import Durations, Schedule, in_flight_per_stage, simulate
from tests.check.schedules import schedules

UNIT = StageDurations((1,), (1,), (1,), 0)


def stage(forward: int, of_input: int, of_weight: int, move: int) -> StageDurations:
    """A stage of whole sequences."""
    return StageDurations((forward,), (of_input,), (of_weight,), move)


@settings(max_examples=200)
@given(schedules(), st.data())
def test_ends_and_holdings_are_the_simulators(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Two players of the same lists agree on every rank's end and on what it holds of every stage: several stages per
    rank, waves, split backwards, joint pairs and sequence chunks included."""
    times = data.draw(
        st.lists(
            st.builds(stage, *[st.integers(0, 9)] * 4),
            min_size=schedule.stages,
            max_size=schedule.stages,
        )
    )
    moves = tuple(one.transfer for one in times[:-1])
    durations = Durations(
        forward=tuple(one.forward[0] for one in times),
        backward_input=tuple(one.backward_input[0] for one in times),
        backward_weight=tuple(one.backward_weight[0] for one in times),
        transfer_forward=moves,
        transfer_backward=moves,
    )
    actions = parse_actions(schedule.to_text())
    ends = replay(actions, times, joint_pairs(schedule.name, actions))
    assert tuple(ends) == simulate(schedule, durations).end_seconds
    held = [max(peaks(one), key=Counter.total) for one in actions]
    owners = stage_owners(actions)
    found = [held[owners[index]][index] for index in range(schedule.stages)]
    assert tuple(found) == in_flight_per_stage(schedule)


def test_two_stages_by_hand() -> None:
    """GPipe with two micro-batches, F = 1, B = 2, transfer 1: F F . . . . . B B on the first rank, done at 11."""
    actions = parse_actions(
        [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    )
    assert replay(actions, [stage(1, 1, 1, 1)] * 2) == [11, 8]


def test_input_gradient_lets_the_stage_before_go_on() -> None:
    """A split backward sends its gradient before the weights are done."""
    full = parse_actions([["0F0", "0B0"], ["1F0", "1B0"]])
    split = parse_actions([["0F0", "0B0"], ["1F0", "1I0", "1W0"]])
    assert replay(full, [UNIT, UNIT]) == [6, 4]
    assert replay(split, [UNIT, UNIT]) == [5, 4]


def test_stages_on_one_rank_hand_over_without_a_transfer() -> None:
    """A V of two ranks, transfers of 5: two of them down, none in the turn, two up."""
    turn = parse_actions([["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]])
    times = [stage(1, 1, 0, 5)] * 4
    assert replay(turn, times) == [4 + 4 + 4 * 5, 1 + 5 + 2 + 5 + 2 + 5 + 2]


def test_joint_pairs_start_and_end_together() -> None:
    """By hand, F = 1 and B = 2: the pair of 0F1 and 0B0 starts when 1B0 has ended (4), and 1F1 after the pair (7)."""
    actions = parse_actions(
        [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    )
    assert replay(actions, [UNIT, UNIT]) == [9, 7]
    assert replay(actions, [UNIT, UNIT], frozenset({Action(0, "B", 0)})) == [
        12,
        10,
    ]


def test_what_is_held() -> None:
    """A micro-batch is held from F until B, or until W when the backward is split."""
    assert (
        most_in_flight(parse_actions([["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]])[0])
        == 2
    )
    assert (
        most_in_flight(parse_actions([["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]])[0])
        == 2
    )
    assert most_in_flight(()) == 0


def test_dead_lock_names_who_waits() -> None:
    """Two ranks that wait for each other are named, each with its action."""
    actions = parse_actions(
        [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    )
    with pytest.raises(
        ScheduleError, match="deadlock: 0B0 on rank 0, 1F1 on rank 1 wait forever"
    ):
        replay(actions, [UNIT, UNIT])


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X0", "-1F0", "0F0 ", "0f0", "٣F٠"])
def test_what_is_no_action(text: str) -> None:
    """Only digits, one of F, B, I and W, and digits."""
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_actions([[text]])


def test_actions_are_written_as_read() -> None:
    """Reading and writing are inverse."""
    assert str(parse_actions([["12W34"]])[0][0]) == "12W34"
    assert parse_actions([["2F0"]]) == ((Action(2, "F", 0),),)
