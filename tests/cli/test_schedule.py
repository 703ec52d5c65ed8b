"""`planner schedule`."""

from __future__ import annotations

import pytest

from planner.schedule import names
from tests.cli.support import Command

SHAPE = ("--stages", "4", "--micro-batches", "8")


def test_json_has_the_contracts_keys(planner: Command) -> None:
    """Makespan, span, bubble, peak and actions of 1F1B are those of its closed forms: (M + P - 1)(F + B)."""
    found = planner("schedule", "1f1b", *SHAPE, "--json").json
    assert set(found) == {"makespan", "span", "bubble_fraction", "peak_in_flight", "actions"}
    assert found["makespan"] == (8 + 4 - 1) * 3
    assert found["bubble_fraction"] == pytest.approx(3 / 11)
    assert found["peak_in_flight"] == [4, 3, 2, 1]
    assert found["actions"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]


def test_bubble_is_one_minus_busy(planner: Command) -> None:
    """bubble_fraction is 1 - busy / (P x makespan) for durations that differ by stage."""
    found = planner("schedule", "gpipe", *SHAPE, "--forward", "1,2,3,4", "--transfer", "0.5", "--json").json
    busy = 8 * (1 + 2 + 3 + 4) + 4 * 8 * 2
    assert found["bubble_fraction"] == pytest.approx(1 - busy / (4 * found["makespan"]))


def test_transfers_delay_consumers_only(planner: Command) -> None:
    """One micro-batch over two stages pays the transfer there and back."""
    words = ("schedule", "gpipe", "--stages", "2", "--micro-batches", "1", "--json")
    assert planner(*words, "--transfer", "5").json["makespan"] == planner(*words).json["makespan"] + 10


def test_one_stage_has_no_boundary(planner: Command) -> None:
    """A pipeline of one stage takes a transfer time and has nowhere to spend it."""
    words = ("schedule", "1f1b", "--stages", "1", "--micro-batches", "3", "--json")
    assert planner(*words, "--transfer", "5").json["makespan"] == 9


@pytest.mark.parametrize("name", names())
def test_every_schedule_by_name(planner: Command, name: str) -> None:
    """Every schedule of the catalogue is simulated; those of several stages per rank say so when given one."""
    plain = planner("schedule", name, *SHAPE, "--json")
    found = plain if plain.code == 0 else planner("schedule", name, *SHAPE, "--virtual", "2", "--json")
    assert found.code == 0
    assert len(found.json["actions"]) == 4


def test_text_and_actions(planner: Command) -> None:
    """The text tells the same, and --actions adds every rank's order."""
    short, long = planner("schedule", "1f1b", *SHAPE).out, planner("schedule", "1f1b", *SHAPE, "--actions").out
    assert "peak in flight  4 3 2 1" in short
    assert long.startswith(short.rstrip("\n"))
    assert "rank 3: 3F0 3B0 3F1" in long


@pytest.mark.parametrize(("limit", "code"), [("4", 0), ("3", 3)])
def test_memory_limit(planner: Command, limit: str, code: int) -> None:
    """A schedule whose rank holds more units than the limit ends with 3 and names that rank."""
    ended = planner("schedule", "1f1b", *SHAPE, "--memory-limit", limit)
    assert ended.code == code
    assert ("rank 0 holds 4" in ended.err) is (code == 3)


@pytest.mark.parametrize(
    "words",
    [
        ("2f2b", *SHAPE),
        ("1f1b", *SHAPE, "--forward", "1,2"),
        ("1f1b", *SHAPE, "--transfer", "1,2"),
        ("1f1b", *SHAPE, "--backward-weight", "-1"),
        ("1f1b", *SHAPE, "--virtual", "2"),
        ("1f1b", *SHAPE, "--sequence-chunks", "2"),
    ],
    ids=" ".join,
)
def test_wrong_input(planner: Command, words: tuple[str, ...]) -> None:
    """What does not fit the schedule is refused with the reason, never ignored."""
    ended = planner("schedule", *words)
    assert (ended.code, ended.out) == (2, "")
    assert "error: " in ended.err
