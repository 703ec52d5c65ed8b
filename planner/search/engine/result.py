"""What a search returns."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost import LayoutCosts, StageMap, Step
from planner.schedule import Schedule, find
from planner.search.engine.options import Option, Row
from planner.search.engine.space import Space
from planner.spec.layout import Layout, RecomputeWord


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan: a layout with its cut, modes and simulated step."""

    row: Row
    option: Option
    costs: LayoutCosts
    schedule: Schedule
    stage_map: StageMap
    step: Step

    @property
    def total(self) -> int:
        """Nanoseconds of the step."""
        return self.step.total_ticks

    @property
    def layout(self) -> Layout:
        """The layout, with the recompute mode of its layers.

        Layers that have only one mode make no choice. A synthesized order has the mode
        that all layers have if they offer it.
        """
        if find(self.costs.layout.schedule).needs_durations:
            return self.costs.layout
        pairs = [pair for stage in self.stage_map for pair in stage]
        modes = {mode for layer, mode in pairs if len(self.costs.layers[layer]) > 1}
        if not modes:
            modes = {mode for _, mode in pairs}
        word: RecomputeWord = modes.pop() if len(modes) == 1 else "per-layer"
        return self.costs.layout.model_copy(update={"recompute": word})


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a running search."""

    rows: int
    rows_passed: int
    """Rows at the front of the list that are bounded, pruned or excluded by their work."""
    options_bounded: int
    solved: int
    best: int | None
    """Nanoseconds of the best step."""
    lower_bound: int
    work_done: int


@dataclass(frozen=True, slots=True)
class Result:
    """The best plan of a space and what was proven about it."""

    best: Candidate | None
    """None: the search found no plan below its ceiling before it ended."""
    lower_bound: int
    """Nanoseconds that no layout of the space beats with the cuts that are evaluated.

    Those are the cuts of the schedule's rule, and moves of one layer that start from a
    cut whose step is at most `PROMISING` times the best one, or from one that takes at
    most `NEARLY_PROMISING` times as long if a move makes it as fast as that. While the
    search is open, moves that it has not tried may still reach a shorter step."""
    lower_bound_all_cuts: int
    """Nanoseconds that no layout of the space beats with any cut."""
    open_nodes: int
    """Rows, and rows with an option, that are neither solved nor excluded."""
    space: Space
    progress: Progress

    @property
    def gap(self) -> float:
        """Fraction of the best step above the bound."""
        return _gap(self.best, self.lower_bound)

    @property
    def gap_all_cuts(self) -> float:
        """The same over all cuts."""
        return _gap(self.best, self.lower_bound_all_cuts)


def _gap(best: Candidate | None, bound: int) -> float:
    if best is None:
        return 1.0
    return max(0, best.total - bound) / max(1, best.total)
