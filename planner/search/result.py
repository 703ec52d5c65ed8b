"""What the search hands out while it runs and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from planner.cost import TICK_SECONDS, LayoutCosts, StageMap, Step
from planner.schedule import Schedule
from planner.search.bounds.layout import BOUNDED
from planner.search.parts import Part
from planner.spec.layout import Layout
from planner.spec.plan import SearchReport

AFTERWARDS_SECONDS = 1.0
"""Behind the time limit: for what is told besides a plan that the limit itself left no time for."""
_ALTERNATIVES_SHARE = 0.6
"""Of that, for the alternatives: all else that is told needs them."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a running search stands."""

    layouts_considered: int
    layouts_done: int
    incumbent_seconds: float | None
    lower_bound_seconds: float
    gap: float | None
    elapsed_seconds: float


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the caller of a search may hang on it; the search itself knows no HTTP and no terminal."""

    on_progress: Callable[[Progress], None] | None = None
    should_stop: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be done for what is told besides the plan."""

    work: int
    """Parts of the space taken up for one question."""
    deadline: float
    """Of `time.monotonic`."""
    callbacks: Callbacks

    def should_stop(self) -> bool:
        """The caller wants to stop, or the time is over."""
        asked = self.callbacks.should_stop is not None and self.callbacks.should_stop()
        return asked or time.monotonic() > self.deadline

    def for_alternatives(self) -> Limits:
        """Until when alternatives are looked for."""
        return replace(
            self, deadline=self.deadline + _ALTERNATIVES_SHARE * AFTERWARDS_SECONDS
        )

    def afterwards(self) -> Limits:
        """Until when all else is told of the plan and its alternatives."""
        return replace(self, deadline=self.deadline + AFTERWARDS_SECONDS)


class Solution(Protocol):
    """A layout with a stage map and the step of its simulation."""

    @property
    def costs(self) -> LayoutCosts:
        """Costs of the layout."""

    @property
    def schedule(self) -> Schedule:
        """The order of actions."""

    @property
    def stage_map(self) -> StageMap:
        """Layers and recompute modes of every stage."""

    @property
    def layout(self) -> Layout:
        """The layout, with the recompute mode of its layers."""

    @property
    def total(self) -> int:
        """Nanoseconds of the step."""


class Ended(Protocol):
    """A search that ended, as `planner.search.queries.explain` reads it."""

    @property
    def best(self) -> Solution | None:
        """None: no plan was found."""

    @property
    def part(self) -> Part:
        """Devices that the plan uses."""

    @property
    def report(self) -> SearchReport:
        """Counts and proof."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A solved layout: its best stage map."""

    costs: LayoutCosts
    schedule: Schedule
    stage_map: StageMap
    step: Step

    @property
    def ticks(self) -> int:
        """Its step."""
        return self.step.total_ticks

    @property
    def total(self) -> int:
        """Nanoseconds of the step."""
        return self.step.total_ticks

    @property
    def layout(self) -> Layout:
        """The layout, with the recompute mode of its layers.

        A layer that does not offer the mode has no other choice. With several stages
        per rank or split backwards it is the rule that layers recompute by.
        """
        layout = self.costs.layout
        if layout.recompute != "per-layer" or layout.schedule not in BOUNDED:
            return layout
        pairs = [pair for stage in self.stage_map for pair in stage]
        layers = self.costs.layers
        chosen = {mode for layer, mode in pairs if len(layers[layer]) > 1}
        modes = chosen or {mode for _, mode in pairs}
        word = modes.pop() if len(modes) == 1 else "per-layer"
        return layout.model_copy(update={"recompute": word})

    @property
    def degrees(self) -> tuple[int, ...]:
        """How it shares the devices out."""
        return degrees_of(self.costs.layout)


def degrees_of(layout: Layout) -> tuple[int, ...]:
    """How a layout shares the devices out."""
    return (
        layout.data_parallel_degree,
        layout.tensor_parallel_degree,
        layout.pipeline_parallel_degree,
        layout.context_parallel_degree,
        layout.expert_parallel_degree,
    )


@dataclass(frozen=True, slots=True)
class Found:
    """Result of the search over layouts: best first, with the proof."""

    part: Part
    """Of the cluster, that the plan uses."""
    candidates: tuple[Candidate, ...]
    report: SearchReport
    unfit: tuple[LayoutCosts, ...]
    """Layouts of which no stage map fits; filled only when nothing fits at all."""

    @property
    def best(self) -> Candidate | None:
        """The plan."""
        return self.candidates[0] if self.candidates else None


def improved(report: SearchReport, ticks: int) -> SearchReport:
    """The report of a stopped search whose plan was beaten by its own alternative, of so many ticks."""
    seconds = ticks * TICK_SECONDS
    bound = min(report.lower_bound_seconds, seconds)
    gap = (seconds - bound) / seconds if seconds else 0.0
    return (
        report
        if report.optimal
        else report.model_copy(update={"lower_bound_seconds": bound, "gap": gap})
    )
