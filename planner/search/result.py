"""What the search reports while it runs and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from planner.cost import LayoutCosts, StageMap
from planner.schedule import Schedule
from planner.search.parts import Part
from planner.spec.layout import Layout
from planner.spec.plan import SearchReport

AFTERWARDS_SECONDS = 1.0
"""After the time limit: for what is reported in addition to the plan."""
_ALTERNATIVES_SHARE = 0.6
"""Of that, for the alternatives, which all other reports need."""


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a running search."""

    layouts_considered: int
    layouts_done: int
    incumbent_seconds: float | None
    lower_bound_seconds: float
    gap: float | None
    elapsed_seconds: float


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the caller of a search may pass: the search knows no HTTP and no terminal."""

    on_progress: Callable[[Progress], None] | None = None
    should_stop: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what is computed in addition to the plan."""

    work: int
    """Work of one query, in units of `planner.search.engine.stop`."""
    deadline: float
    """Of `time.monotonic`."""
    callbacks: Callbacks

    def should_stop(self) -> bool:
        """Return whether the caller wants to stop or the time is over."""
        asked = self.callbacks.should_stop is not None and self.callbacks.should_stop()
        return asked or time.monotonic() > self.deadline

    def for_alternatives(self) -> Limits:
        """Return the limits of the search for alternatives."""
        return replace(
            self, deadline=self.deadline + _ALTERNATIVES_SHARE * AFTERWARDS_SECONDS
        )

    def afterwards(self) -> Limits:
        """Return the limits of all other queries."""
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
