"""Alternatives: what a ceiling does to them."""

from __future__ import annotations

import pytest

from planner.search import plan
from planner.search.answer import rivals
from planner.spec import Plan
from tests.builders import job, request
from tests.search.test_search import CLUSTER, rugged


def _alternatives(
    ceilings: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[float, list[float]]:
    """Seconds of the plan, and of its alternatives."""
    monkeypatch.setattr(rivals, "_CEILINGS", ceilings)
    model = rugged(8)
    found = plan(request(model, CLUSTER, job(32), top=5), model)
    assert isinstance(found, Plan)
    return found.prediction.step_seconds, [
        one.step_seconds for one in found.alternatives
    ]


def test_what_is_above_every_ceiling_still_is_an_alternative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ceiling that only the plan itself reaches leaves as many alternatives as none at all, and none much slower."""
    best, free = _alternatives((), monkeypatch)
    same, held = _alternatives((1.0 + 1e-6,), monkeypatch)
    assert same == best
    assert len(held) == len(free) == 5
    assert max(held) > 1.01 * best
    assert all(mine <= 1.1 * its for mine, its in zip(held, free, strict=True))
