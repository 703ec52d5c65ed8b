"""The rules of schedules by name, against the schedules themselves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from planner.check.actions import parse_actions
from planner.check.schedules import (
    SCHEDULES,
    Shape,
    joint_pairs,
    loop,
    permits_schedule,
    wave,
)
from planner.schedule import Schedule, build, find, in_flight, names
from planner.spec.job import Range
from tests.check.schedules import PLANNABLE, schedules


def shape_of(schedule: Schedule) -> Shape:
    """The numbers of a schedule."""
    return Shape(
        schedule.ranks,
        schedule.micro_batches,
        schedule.virtual_stages,
        schedule.sequence_chunks,
    )


def test_every_schedule_is_known() -> None:
    """No schedule of the catalogue lacks its rules, and stages per rank and sequence chunks are as there."""
    assert set(SCHEDULES) == set(names())
    for name, rules in SCHEDULES.items():
        entry = find(name)
        assert (rules.least_stages, rules.most_stages) == (
            entry.least_virtual_stages,
            entry.most_virtual_stages,
        )
        assert rules.cuts_sequence == entry.takes_sequence_chunks


def test_what_runs_can_be_told() -> None:
    """The checker refuses no schedule that the executor runs."""
    assert not [name for name in names(runnable_only=True) if SCHEDULES[name].refused]


@settings(max_examples=200)
@given(schedules())
def test_rules_are_the_schedules(schedule: Schedule) -> None:
    """Stages stand where the rule puts them, pairs are those of the schedule, ranks hold what the closed form says."""
    rules, shape = SCHEDULES[schedule.name], shape_of(schedule)
    assert schedule.stage_ranks in [place(shape) for place in rules.placements]
    found = joint_pairs(schedule.name, parse_actions(schedule.to_text()))
    expected = schedule.paired if schedule.joint_pairs else frozenset()
    assert {tuple(one) for one in found} == {tuple(one) for one in expected}
    for rank, held in enumerate(in_flight(schedule)):
        assert rules.in_flight(shape, rank) in (held, None)


@pytest.mark.parametrize("name", PLANNABLE)
def test_every_schedule_promises_something(name: str) -> None:
    """With enough micro-batches there is a closed form for every schedule with the fewest stages per rank."""
    schedule = build(
        name, ranks=2, micro_batches=8, virtual_stages=SCHEDULES[name].least_stages
    )
    assert [
        SCHEDULES[name].in_flight(shape_of(schedule), rank) for rank in range(2)
    ] == list(in_flight(schedule))


def test_placements_by_hand() -> None:
    """Three ranks, two stages each: around, or down and up."""
    assert loop(Shape(3, 1, 2)) == (0, 1, 2, 0, 1, 2)
    assert wave(Shape(3, 1, 2)) == (0, 1, 2, 2, 1, 0)
    assert wave(Shape(2, 1, 3)) == (0, 1, 1, 0, 0, 1)


def test_constraints_know_other_names() -> None:
    """A job may say VPP, or list schedules; a range or a number is no schedule."""
    assert permits_schedule("VPP", "interleaved-1f1b")
    assert permits_schedule(("gpipe", "1F1B"), "1f1b")
    assert not permits_schedule("gpipe", "1f1b")
    assert not permits_schedule(("no-such-schedule", 3), "1f1b")
    assert not permits_schedule(Range(min=1), "1f1b")
