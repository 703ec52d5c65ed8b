"""Work ends a search, the clock only in an emergency, and the caller at any moment."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from planner.check import check
from planner.cost import workload
from planner.search import Callbacks, planning, result
from planner.search.engine.engine import Search
from planner.search.engine.stop import WorkStop
from planner.search.queries import objectives
from planner.search.queries.objectives import BRAKE_SECONDS
from planner.search.result import AFTERWARDS_SECONDS
from planner.search.support import supported_space
from planner.spec import Plan
from tests.builders import job, request
from tests.search.test_search import CLUSTER, rugged, timeless

WORK_SECONDS = 0.05
"""Time of one step of a search."""
MODULES = (objectives, planning, result)


class Clock:
    """Advances with the work that is done, and counts it."""

    def __init__(self) -> None:
        self.now = 1e6
        self.works = 0

    def monotonic(self) -> float:
        """Return seconds."""
        return self.now

    def is_after(self, moment: float) -> Callable[[], bool]:
        """Return a function that returns whether a moment is over."""
        return lambda: self.now > moment

    def counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that takes its time."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self.now += WORK_SECONDS
            self.works += 1
            return work(*arguments, **named)

        return timed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of all modules of the search."""
    made = Clock()
    for module in MODULES:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=made.monotonic))
    monkeypatch.setattr(Search, "advance", made.counted(Search.advance))
    return made


def planned(
    clock: Clock, seconds: float, callbacks: Callbacks | None = None
) -> tuple[Plan, float]:
    """Return a valid plan, and how long it took."""
    model, began = rugged(8), clock.now
    asked = request(
        model, CLUSTER, job(32), time_limit_seconds=seconds, explain="full", top=5
    )
    found = planning.plan(asked, model, callbacks=callbacks)
    assert isinstance(found, Plan)
    assert check(found, model).problems == ()
    return found, clock.now - began


def test_the_clock_ends_a_search_that_its_work_has_not_ended(clock: Clock) -> None:
    """On a slow machine the answer ends soon after the limit, with its true gap."""
    whole, seconds = planned(clock, 600.0)
    assert whole.search.optimal
    brake = BRAKE_SECONDS + AFTERWARDS_SECONDS + 4 * WORK_SECONDS
    for limit in (seconds / 100, seconds / 20):
        found, took = planned(clock, limit)
        assert not found.search.optimal
        assert took <= limit + brake
        step = whole.prediction.step_seconds
        assert found.prediction.step_seconds >= step
        assert found.search.lower_bound_seconds <= step


def test_a_proof_in_time_does_not_depend_on_the_limit(clock: Clock) -> None:
    """A search that ends in time gives the same answer under any longer limit."""
    whole, seconds = planned(clock, 600.0)
    found, took = planned(clock, seconds + WORK_SECONDS)
    assert took == pytest.approx(seconds)
    of_another_request = {"id": whole.id, "request": timeless(whole)["request"]}
    assert timeless(found) | of_another_request == timeless(whole)


def test_after_the_limit_any_first_plan_will_do() -> None:
    """The search for a better first plan and the pruning of rows end with the limit."""
    work = workload(rugged(8), CLUSTER, job(32))
    space = supported_space(work)
    patient, hasty = Search(work, space), Search(work, space)
    patient.start()
    hasty.start(is_over=lambda: True)
    assert patient.best is not None
    assert hasty.best is not None
    assert hasty.work_done < patient.work_done
    assert patient.is_closed.any()
    assert not hasty.is_closed.any()


def test_a_caller_who_wants_to_stop_need_not_wait(clock: Clock) -> None:
    """Once asked to stop, the search ends after the step that it is in."""
    _, seconds = planned(clock, 600.0)
    for share in (0.1, 0.5, 0.9):
        moment = clock.now + share * seconds
        callbacks = Callbacks(should_stop=clock.is_after(moment))
        _, took = planned(clock, 600.0, callbacks)
        assert took <= share * seconds + 4 * WORK_SECONDS


def test_an_answer_that_work_ended_is_reproducible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal requests that a limit ended have equal answers, whatever the machine."""
    few = WorkStop(200_000)
    monkeypatch.setattr(WorkStop, "of_seconds", classmethod(lambda *_: few))
    model = rugged(16)
    asked = request(model, CLUSTER, job(32), top=0)
    first = planning.plan(asked, model)
    second = planning.plan(asked, model)
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert not first.search.optimal
    assert timeless(first) == timeless(second)
