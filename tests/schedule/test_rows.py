"""The actions of a rank as columns of numbers."""

import numpy as np
from hypothesis import given

from planner.schedule import Action, ActionKind, Schedule
from planner.schedule.in_flight import crests, in_flight_per_stage, most_held
from planner.schedule.rows import KINDS, Row

from .strategies import schedules


@given(schedules)
def test_a_row_is_read_like_the_tuple_of_its_actions(schedule: Schedule) -> None:
    """Length, order, places, slices, equality and hash are those of the tuple."""
    for row in map(Row.read, schedule.actions):
        actions = tuple(
            map(
                Action,
                row.stages.tolist(),
                map(KINDS.__getitem__, row.kinds.tolist()),
                row.units.tolist(),
            )
        )
        assert (len(row), tuple(row), row[-1], row[1:3]) == (
            len(actions),
            actions,
            actions[-1],
            actions[1:3],
        )
        assert row == actions
        assert actions == row
        assert hash(row) == hash(actions)
        assert row.texts == tuple(map(str, actions))
        assert all(
            isinstance(action, Action) and isinstance(action.kind, ActionKind)
            for action in row
        )


@given(schedules)
def test_actions_read_as_a_row_are_its_columns(schedule: Schedule) -> None:
    """A row of its actions is the row, and another order is another row."""
    for row in map(Row.read, schedule.actions):
        again = Row.read(tuple(row))
        for mine, theirs in (
            (row.stages, again.stages),
            (row.kinds, again.kinds),
            (row.units, again.units),
        ):
            assert np.array_equal(mine, theirs)
        assert row == again
        assert row != Row(row.stages[::-1], row.kinds[::-1], row.units[::-1])


@given(schedules)
def test_what_a_rank_holds_is_what_a_walk_over_its_actions_finds(
    schedule: Schedule,
) -> None:
    """Units of every stage go up with a forward, and down with a backward or a weight gradient."""
    fullest = [0] * schedule.stages
    for rank, row in enumerate(schedule.actions):
        held = dict.fromkeys(schedule.stages_of(rank), 0)
        moments: list[dict[int, int]] = []
        before: list[tuple[int, ...]] = []
        rose = False
        for action in row:
            if action.kind is ActionKind.FORWARD:
                held[action.stage] += 1
                rose = True
            elif action.kind is not ActionKind.BACKWARD_INPUT:
                before += [tuple(held.values())] if rose else []
                held[action.stage] -= 1
                rose = False
            moments.append(dict(held))
        most = max(moments, key=lambda each: sum(each.values()))
        assert {stage: units for stage, units in most_held(row).items() if units} == {
            stage: units for stage, units in most.items() if units
        }
        assert crests(schedule, rank) == tuple(sorted(set(before)))
        fullest = [
            max(units, most.get(stage, 0)) for stage, units in enumerate(fullest)
        ]
    assert in_flight_per_stage(schedule) == tuple(fullest)
