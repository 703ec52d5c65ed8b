"""The ablation of the search: without a part of its bound it proves the same step."""

from __future__ import annotations

import pytest

from benchmarks.search_core import CASES, PARTS, work_of
from planner.search.engine.engine import plan_space
from planner.search.support import supported_space

WORK = work_of(CASES["resnet"])


@pytest.fixture(scope="module")
def whole() -> tuple[int, int]:
    """Nanoseconds and work of the search with all parts."""
    return searched()


def searched() -> tuple[int, int]:
    """Nanoseconds of the proven plan, and the work until then."""
    found = plan_space(WORK, supported_space(WORK))
    assert found.best is not None
    assert found.lower_bound == found.best.total
    return found.best.total, found.progress.work_done


@pytest.mark.parametrize("part", PARTS)
def test_every_part_saves_work_alone(
    part: str, whole: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same step, with at least as much work."""
    monkeypatch.setattr(*PARTS[part])
    nanoseconds, work = searched()
    assert nanoseconds == whole[0]
    assert work >= whole[1]
