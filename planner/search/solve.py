"""Best-first search over layouts, to a proven optimum of the cost model.

    (F1)  every layout has a lower bound that no stage map beats                    -> planner.search.bounds
    (F2)  solve layouts in the order of their bounds; the incumbent is the best so far
    (F3)  once the next bound is no better than the incumbent, all later ones are not either: the incumbent is proven
          (for `top` alternatives the same with the top-th best incumbent)          -> search()
    (F4)  lower bound of the whole space = least bound of what is not proven; gap = (step - bound) / step

Ties go to the smaller bound, then to the order of enumeration, so the same request gives the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.cost import TICK_SECONDS, LayoutCosts, Workload, layout_costs, reserved_bytes, schedule_of
from planner.schedule import Schedule
from planner.search.bounds import lower_bound, warm_ups
from planner.search.inside import Inside, Outcome, solve_layout
from planner.search.result import Callbacks, Candidate, Found, Progress
from planner.search.runs import LayerModes, allowed_modes, runs_of
from planner.spec.job import Constraint, Range
from planner.spec.layout import Layout
from planner.spec.plan import Options, SearchReport

_OPTIMAL_GAP = 1e-6


@dataclass(frozen=True, slots=True)
class Open:
    """A layout that is bounded but not solved."""

    costs: LayoutCosts
    schedule: Schedule
    modes: tuple[LayerModes, ...]
    bound_ticks: int
    order: int


@dataclass
class _State:
    """The search as it runs."""

    considered: int
    top: int
    deadline: float
    callbacks: Callbacks
    started: float = field(default_factory=time.monotonic)
    solved: int = 0
    best: list[Candidate] = field(default_factory=list)
    unproven: list[int] = field(default_factory=list)
    """Bounds of layouts that were stopped."""

    def limit_ticks(self) -> int | None:
        """What a further layout has to beat."""
        return self.best[-1].ticks if len(self.best) > self.top else None

    def seconds_left(self) -> float:
        """Until the time limit; nothing once the caller wants to stop."""
        if self.callbacks.should_stop and self.callbacks.should_stop():
            return 0.0
        return self.deadline - time.monotonic()

    def add(self, layout: Open, inside: Inside) -> None:
        """Take the result of one layout."""
        self.solved += 1
        if inside.outcome is Outcome.STOPPED:
            self.unproven.append(max(inside.bound_ticks, layout.bound_ticks))
        if inside.outcome is not Outcome.NOT_BETTER and inside.stage_map is not None and inside.step is not None:
            self.best.append(Candidate(layout.costs, layout.schedule, inside.stage_map, inside.step))
            self.best.sort(key=lambda candidate: candidate.ticks)
            del self.best[self.top + 1 :]

    def report(self, remaining: Sequence[Open]) -> SearchReport:
        """Equation (F4)."""
        incumbent = self.best[0].ticks if self.best else None
        bounds = [*self.unproven, *(layout.bound_ticks for layout in remaining[:1])]
        least = min(bounds, default=incumbent or 0)
        bound = least if incumbent is None else min(least, incumbent)
        gap = (incumbent - bound) / incumbent if incumbent else 0.0
        return SearchReport(
            layouts_considered=self.considered,
            layouts_pruned=self.considered - self.solved,
            layouts_solved=self.solved,
            seconds=round(time.monotonic() - self.started, 3),
            lower_bound_seconds=bound * TICK_SECONDS,
            gap=gap,
            optimal=gap <= _OPTIMAL_GAP and not (incumbent is None and bounds),
        )

    def tell(self, remaining: Sequence[Open]) -> None:
        """Report progress."""
        if self.callbacks.on_progress is None:
            return
        report = self.report(remaining)
        self.callbacks.on_progress(
            Progress(
                layouts_considered=self.considered,
                layouts_done=self.considered - len(remaining),
                incumbent_seconds=self.best[0].ticks * TICK_SECONDS if self.best else None,
                lower_bound_seconds=report.lower_bound_seconds,
                gap=report.gap if self.best else None,
                elapsed_seconds=report.seconds,
            )
        )


def search(work: Workload, layouts: Sequence[Layout], options: Options, callbacks: Callbacks) -> Found:
    """Find and prove the best plan over the given layouts: equations (F1) to (F4)."""
    deadline = time.monotonic() + options.time_limit_seconds
    state = _State(len(layouts), options.top, deadline, callbacks)
    wish = recompute_wish(work.job.constraints.get("recompute"))
    every = [bounded(work, layout, wish, order) for order, layout in enumerate(layouts)]
    remaining = sorted((one for one in every if may_fit(one)), key=lambda one: (one.bound_ticks, one.order))
    while remaining and state.seconds_left() > 0:
        limit = state.limit_ticks()
        if limit is not None and remaining[0].bound_ticks >= limit:
            remaining = []
            break
        layout = remaining.pop(0)
        runs = runs_of(layout.costs, layout.modes)
        state.add(
            layout,
            solve_layout(layout.costs, layout.schedule, runs, limit_ticks=limit, seconds_left=state.seconds_left),
        )
        state.tell(remaining)
    unfit = () if state.best else tuple(one.costs for one in every)
    return Found(tuple(state.best), state.report(remaining), unfit)


def bounded(work: Workload, layout: Layout, wish: tuple[str, ...], order: int = 0) -> Open:
    """A layout with its lower bound: equation (F1)."""
    costs = layout_costs(work, layout)
    schedule = schedule_of(costs)
    modes = allowed_modes(costs, wish)
    return Open(costs, schedule, modes, lower_bound(costs, modes, warm_ups(schedule)), order)


def may_fit(layout: Open) -> bool:
    """Can the layers' optimizer states, gradients and parameters fit at all, were they spread evenly?"""
    costs = layout.costs
    ogp = sum(options[0].ogp_bytes for options in layout.modes)
    ogp -= sum((len(shared.layers) - 1) * shared.ogp_bytes for shared in costs.shared)
    room = costs.work.capacity_bytes - reserved_bytes(costs.work)
    return ogp <= room * costs.layout.pipeline_parallel_degree


def recompute_wish(constraint: Constraint | None) -> tuple[str, ...]:
    """Recompute modes that the job permits."""
    if constraint is None or isinstance(constraint, Range):
        return ("per-layer",)
    return tuple(map(str, constraint)) if isinstance(constraint, tuple) else (str(constraint),)
