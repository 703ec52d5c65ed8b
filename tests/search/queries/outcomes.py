"""Outcomes of searches over the whole space of small models."""

from __future__ import annotations

import time
from dataclasses import replace

from planner.cost import TICK_SECONDS, Workload
from planner.search.engine.bound import IMPOSSIBLE
from planner.search.engine.engine import Search
from planner.search.engine.space import whole_space
from planner.search.engine.stop import AnyStop, GapStop, Stop, WorkStop
from planner.search.parts import whole
from planner.search.queries.outcome import Outcome
from planner.search.result import Callbacks, Limits
from planner.spec.plan import SearchReport

WORK = 100_000_000
"""Work that no search of a small model needs."""


def outcome_of(work: Workload, stop: Stop | None = None) -> Outcome:
    """The best plan of a workload on all its devices."""
    search = Search(work, whole_space(work))
    result = search.run(stop or AnyStop((GapStop(), WorkStop(WORK))))
    seconds = 0.0
    if result.lower_bound < IMPOSSIBLE:
        seconds = result.lower_bound * TICK_SECONDS
    report = SearchReport(
        layouts_considered=len(search.table),
        layouts_pruned=len(search.table) - search.solved,
        layouts_solved=search.solved,
        seconds=0.0,
        lower_bound_seconds=seconds,
        gap=result.gap,
        gap_all_cuts=result.gap_all_cuts,
        optimal=result.gap == 0,
    )
    return Outcome(whole(work.cluster), search, report, result.best)


def limits(work: int = WORK, seconds: float = 600.0) -> Limits:
    """Limits that nothing small reaches, unless they are given."""
    return Limits(work, time.monotonic() + seconds, Callbacks())


def stopped() -> Limits:
    """Limits of which the time is over."""
    return replace(limits(), callbacks=Callbacks(should_stop=lambda: True))
