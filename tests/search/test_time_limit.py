"""The time limit holds for all of an answer, and so does the caller's wish to stop. The clock counts work here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from planner.check import check
from planner.search import Callbacks, contenders, planning, result, solve, state
from planner.search.answer import rivals, sensitivity
from planner.search.result import AFTERWARDS_SECONDS
from planner.search.stage_maps import inside
from planner.spec import Plan
from tests.builders import job, request
from tests.search.test_search import CLUSTER, rugged, timeless

WORK_SECONDS = 0.05
"""That taking up a part of the space, searching a layout and simulating a step last."""
MODULES = (contenders, planning, result, solve, state)


class Clock:
    """Goes on with the work that is done, and counts it."""

    def __init__(self) -> None:
        self.now, self.works = 1e6, 0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def is_behind(self, moment: float) -> Callable[[], bool]:
        """Has it gone on beyond a moment?"""
        return lambda: self.now > moment

    def counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Work that takes its time."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self.now += WORK_SECONDS
            self.works += 1
            return work(*arguments, **named)

        return timed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all modules of the search."""
    made = Clock()
    for module in MODULES:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=made.monotonic))
    for module, name in (
        (solve, "take_up"),
        (rivals, "take_up"),
        (sensitivity, "evaluate"),
        (rivals, "_candidate"),
    ):
        monkeypatch.setattr(module, name, made.counted(getattr(module, name)))
    monkeypatch.setattr(
        inside.LayoutSearch, "start", made.counted(inside.LayoutSearch.start)
    )
    return made


def planned(
    clock: Clock, seconds: float, callbacks: Callbacks | None = None
) -> tuple[Plan, float]:
    """A valid plan, and how long it took."""
    model, began = rugged(8), clock.now
    asked = request(
        model, CLUSTER, job(32), time_limit_seconds=seconds, explain="full", top=5
    )
    found = planning.plan(asked, model, callbacks=callbacks)
    assert isinstance(found, Plan)
    assert check(found, model).problems == ()
    return found, clock.now - began


def test_all_of_an_answer_ends_soon_behind_the_limit(clock: Clock) -> None:
    """Alternatives, sensitivity and relaxations of a search that the limit ended take a second at most, and one piece
    of work; alternatives are then those plans that the search came by, if it came by more than one."""
    whole, seconds = planned(clock, 600.0)
    assert whole.search.optimal
    for limit, least in ((seconds / 100, 0), (seconds / 20, 1), (seconds / 10, 1)):
        found, took = planned(clock, limit)
        assert not found.search.optimal
        assert limit <= took <= limit + AFTERWARDS_SECONDS + 4 * WORK_SECONDS
        assert len(found.alternatives) >= least
        assert len({one.layout.model_dump_json() for one in found.alternatives}) == len(
            found.alternatives
        )


def test_a_proof_in_time_leaves_the_rest_of_the_limit(clock: Clock) -> None:
    """What is told of a proven plan may take up all of the limit; the answer is then the same under any limit."""
    whole, seconds = planned(clock, 600.0)
    found, took = planned(clock, seconds + WORK_SECONDS)
    assert took == pytest.approx(seconds)
    of_another_request = {"id": whole.id, "request": timeless(whole)["request"]}
    assert timeless(found) | of_another_request == timeless(whole)


def test_a_caller_who_wants_to_stop_need_not_wait(clock: Clock) -> None:
    """Once asked to stop, the search takes up no more than it is at."""
    _, seconds = planned(clock, 600.0)
    for share in (0.1, 0.5, 0.9):
        _, took = planned(
            clock,
            600.0,
            Callbacks(should_stop=clock.is_behind(clock.now + share * seconds)),
        )
        assert took <= share * seconds + 4 * WORK_SECONDS
