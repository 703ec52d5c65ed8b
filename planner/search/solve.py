"""Best-first search over layouts, to a proven optimum of the cost model.

    (F1)  every layout has a lower bound that no stage map beats, and a better one from its segments
                                                            -> planner.search.bounds, planner.search.paths
    (F2)  always take up the layout of least bound: bound it better, or, when that is done, solve it
    (F3)  once the least bound is no better than the incumbent, no open layout is: the incumbent is proven -> search()
    (F4)  lower bound of the space = least bound of what is not proven; gap = (step - bound) / step       -> report()
    (F5)  alternatives: the layouts of least bounds beside the winner, each with the best stage map found within a fixed
          amount of work; they are real plans, but not proven to be their layouts' best                   -> rivals()

Ties go to the smaller bound, then to the order of enumeration, so the same request gives the same plan.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from planner.cost import TICK_SECONDS, LayoutCosts, Workload, layout_costs, schedule_of
from planner.search.bounds import lower_bound, may_fit, warm_ups
from planner.search.inside import NO_LIMIT, Inside, LayoutSearch, Outcome
from planner.search.result import Callbacks, Candidate, Found, Progress
from planner.search.segments import LayerModes, allowed_modes
from planner.spec.job import Constraint, Range
from planner.spec.layout import Layout
from planner.spec.plan import Options, SearchReport

_OPTIMAL_GAP = 1e-6
_RIVAL_POOL = 4
"""Layouts that are bounded again, for each alternative wanted."""
_RIVAL_ROUNDS = 1
"""Rounds of the search inside a rival layout: work, not time, so that the answer is always the same."""


@dataclass(frozen=True, slots=True, order=True)
class Open:
    """A layout that is bounded but not solved; least bound first."""

    bound_ticks: int
    order: int
    is_tight: bool = field(compare=False)
    """Bounded over its segments too."""
    costs: LayoutCosts = field(compare=False)
    modes: tuple[LayerModes, ...] = field(compare=False)


@dataclass
class _State:
    """The search as it runs."""

    considered: int
    deadline: float
    callbacks: Callbacks
    heap: list[Open]
    started: float = field(default_factory=time.monotonic)
    solved: int = 0
    best: Candidate | None = None
    bounds: dict[int, Open] = field(default_factory=dict)
    """Latest bound of every layout that may fit, by order."""

    @property
    def limit_ticks(self) -> int:
        """What a further layout has to beat."""
        return self.best.ticks if self.best else NO_LIMIT

    def seconds_left(self) -> float:
        """Until the time limit; nothing once the caller wants to stop."""
        if self.callbacks.should_stop and self.callbacks.should_stop():
            return 0.0
        return self.deadline - time.monotonic()

    def take(self, inside: Inside, costs: LayoutCosts) -> None:
        """Keep a stage map that beats the incumbent."""
        if inside.stage_map and inside.step and inside.step.total_ticks < self.limit_ticks:
            self.best = Candidate(costs, schedule_of(costs), inside.stage_map, inside.step)

    def close(self, layout: Open) -> None:
        """No stage map of the layout fits and beats the incumbent; without an incumbent, none fits at all."""
        if self.best is None:
            del self.bounds[layout.order]
        else:
            self.bounds[layout.order] = replace(layout, bound_ticks=max(layout.bound_ticks, self.limit_ticks))

    def push(self, layout: Open) -> None:
        """Open a layout again with a better bound."""
        self.bounds[layout.order] = layout
        heapq.heappush(self.heap, layout)

    def report(self) -> SearchReport:
        """Equation (F4)."""
        left = self.heap[0].bound_ticks if self.heap else self.limit_ticks
        incumbent = self.best.ticks if self.best else None
        bound = min(left, self.limit_ticks)
        gap = (incumbent - bound) / incumbent if incumbent else 0.0
        still_open = sum(layout.bound_ticks < self.limit_ticks for layout in self.heap)
        return SearchReport(
            layouts_considered=self.considered,
            layouts_pruned=self.considered - self.solved - still_open,
            layouts_solved=self.solved,
            seconds=round(time.monotonic() - self.started, 3),
            lower_bound_seconds=bound * TICK_SECONDS if bound < NO_LIMIT else 0.0,
            gap=gap,
            optimal=gap <= _OPTIMAL_GAP and (incumbent is not None or not self.heap),
        )

    def tell(self) -> None:
        """Report progress."""
        if self.callbacks.on_progress is None:
            return
        report = self.report()
        self.callbacks.on_progress(
            Progress(
                layouts_considered=self.considered,
                layouts_done=self.considered - len(self.heap),
                incumbent_seconds=self.best.ticks * TICK_SECONDS if self.best else None,
                lower_bound_seconds=report.lower_bound_seconds,
                gap=report.gap if self.best else None,
                elapsed_seconds=report.seconds,
            )
        )


def search(work: Workload, layouts: Sequence[Layout], options: Options, callbacks: Callbacks) -> Found:
    """Find and prove the best plan over the given layouts: equations (F1) to (F5)."""
    started = time.monotonic()
    wish = recompute_wish(work.job.constraints.get("recompute"))
    every = [bounded(work, layout, wish, order) for order, layout in enumerate(layouts)]
    fitting = [one for one in every if _may_fit(one)]
    heapq.heapify(heap := list(fitting))
    state = _State(len(layouts), started + options.time_limit_seconds, callbacks, heap, started)
    state.bounds = {one.order: one for one in fitting}
    while state.heap and state.heap[0].bound_ticks < state.limit_ticks and state.seconds_left() > 0:
        _take_up(state, heapq.heappop(state.heap))
        state.tell()
    if state.heap and state.heap[0].bound_ticks >= state.limit_ticks:
        state.heap.clear()
    report = state.report()
    if state.best is None:
        return Found((), report, tuple(one.costs for one in every))
    return Found((state.best, *rivals(state.best, state.bounds.values(), options.top)), report, ())


def _take_up(state: _State, layout: Open) -> None:
    """Bound a layout over its segments, or solve it: equation (F2)."""
    search = LayoutSearch(layout.costs, layout.modes, limit_ticks=state.limit_ticks)
    search.start()
    if search.is_empty:
        state.close(layout)
        return
    bound = max(layout.bound_ticks, search.bound)
    if not layout.is_tight:
        state.push(Open(bound, layout.order, True, layout.costs, layout.modes))
        return
    inside = search.finish(state.seconds_left)
    state.take(inside, layout.costs)
    if inside.outcome is not Outcome.STOPPED:
        state.solved += 1
    else:
        state.push(Open(max(bound, inside.bound_ticks), layout.order, True, layout.costs, layout.modes))


def rivals(best: Candidate, layouts: Iterable[Open], top: int) -> tuple[Candidate, ...]:
    """The next best plans of other layouts: equation (F5)."""
    others = sorted(one for one in layouts if one.costs is not best.costs)[: _RIVAL_POOL * top]
    searches = []
    for layout in others:
        search = LayoutSearch(layout.costs, layout.modes)
        search.start()
        if not search.is_empty:
            searches.append(search)
    searches.sort(key=lambda search: search.bound)
    found = []
    for search in searches[:top]:
        search.improve(_RIVAL_ROUNDS)
        if search.best is not None:
            found.append(Candidate(search.costs, search.schedule, *search.best))
    return tuple(sorted(found, key=lambda candidate: candidate.ticks)[:top])


def bounded(work: Workload, layout: Layout, wish: tuple[str, ...], order: int = 0) -> Open:
    """A layout with its lower bound: equation (F1)."""
    costs = layout_costs(work, layout)
    modes = allowed_modes(costs, wish)
    return Open(lower_bound(costs, modes, warm_ups(costs)), order, False, costs, modes)


def _may_fit(layout: Open) -> bool:
    return may_fit(layout.costs, layout.modes, warm_ups(layout.costs))


def recompute_wish(constraint: Constraint | None) -> tuple[str, ...]:
    """Recompute modes that the job permits."""
    if constraint is None or isinstance(constraint, Range):
        return ("per-layer",)
    return tuple(map(str, constraint)) if isinstance(constraint, tuple) else (str(constraint),)
