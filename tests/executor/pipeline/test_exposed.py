"""Exposed communication, told from bubbles by hand."""

from __future__ import annotations

import pytest

from planner.executor.pipeline.exposed import exposed_seconds
from planner.spec.measured import MeasuredAction
from tests.executor.plans import make_plan


def _actions(rank: int, *rows: tuple[str, float, float]) -> list[MeasuredAction]:
    return [
        MeasuredAction(rank=rank, action=name, start_seconds=start, end_seconds=end)
        for name, start, end in rows
    ]


def test_waiting_for_what_is_made_is_exposed() -> None:
    """1F0 is made at 2 and starts at 3: one second of transfer after two of bubble. 0B0 starts as it is made."""
    plan = make_plan(("a", "b"), (1, 1), micro_batches=1)
    first = _actions(
        0, ("0F0", 0, 2), ("0B0", 7, 9), ("reduce", 9, 9.5), ("optimizer", 9.5, 10)
    )
    second = _actions(1, ("1F0", 3, 5), ("1B0", 5, 7), ("optimizer", 8, 9))
    assert exposed_seconds(plan, first + second) == {0: 0.5, 1: 1.0}


def test_a_busy_rank_does_not_wait() -> None:
    """The tensor arrives while the rank computes: nothing is exposed but what comes after its own work."""
    plan = make_plan(("a", "b"), (1, 1), micro_batches=2, schedule="gpipe")
    first = _actions(0, ("0F0", 0, 1), ("0F1", 1, 2))
    second = _actions(1, ("1F0", 1, 4), ("1F1", 4.25, 7))
    assert exposed_seconds(plan, first + second)[1] == 0.25


def test_replicas_and_stages_of_one_rank_hand_on_among_themselves() -> None:
    """Each replica waits for its own neighbour; a rank's two stages send nothing."""
    plan = make_plan(("a", "b"), (1, 1), data=2, micro_batches=1)
    rows = [*_actions(0, ("0F0", 0, 1)), *_actions(1, ("0F0", 0, 3))]
    rows += [*_actions(2, ("1F0", 2, 4)), *_actions(3, ("1F0", 3, 4))]
    assert exposed_seconds(plan, rows) == {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.0}
    virtual = make_plan(
        ("a", "b"), (1, 1), pipeline=1, micro_batches=1, schedule="interleaved-1f1b"
    )
    assert exposed_seconds(virtual, _actions(0, ("0F0", 0, 1), ("1F0", 5, 6))) == {
        0: 0.0
    }


def test_split_backwards() -> None:
    """I hands the gradient on, W needs none."""
    plan = make_plan(("a", "b"), (1, 1), micro_batches=2, schedule="zb-h1")
    rows = [
        *_actions(1, ("1F0", 1, 2), ("1I0", 2, 3), ("1W0", 3, 4)),
        *_actions(0, ("0F0", 0, 1), ("0I0", 4, 5)),
    ]
    assert exposed_seconds(plan, rows) == {0: pytest.approx(1.0), 1: 0.0}
