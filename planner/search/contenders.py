"""Parts of a cluster that compete for the best plan: who they are, what they share, and how it ends.

What is known of the parts before their layouts are looked at (`planner.search.bounds.parts`) raises the bounds of their
families; where some plan is known, families that surely do not beat it are not even made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner.cost import TICK_SECONDS, Workload, workload
from planner.cost.workload import on_part, rearranged
from planner.search.bounds.parts import PartBounds
from planner.search.layouts.order_classes import raise_bounds
from planner.search.layouts.space import Family, Space, space_of
from planner.search.parts import Part
from planner.search.result import Callbacks, Progress
from planner.search.solve import advance, begin
from planner.search.stage_maps.inside import NO_LIMIT
from planner.search.state import State, solved_of
from planner.spec.cluster import Cluster
from planner.spec.plan import PlanRequest, SearchReport
from planner.spec.profile import ModelProfile

_OPTIMAL_GAP = 1e-6
_TOLD_SECONDS = 0.1
"""Between two reports of progress: to count what is open in all parts takes longer than to take up one of them."""
_TOLD_SHARE = 0.02
"""Of the time, for reports."""


@dataclass(frozen=True, slots=True)
class Contender:
    """The search over the layouts of one part of the cluster."""

    part: Part
    work: Workload
    space: Space
    state: State
    is_whole: bool = True
    """No family was left out for its bound."""

    @property
    def rate(self) -> float:
        """Price of a tick of the part."""
        return self.part.price_per_second * TICK_SECONDS

    @property
    def least_price(self) -> float:
        """Of a step of what is open."""
        return self.state.heap[0].bound_ticks * self.rate

    @property
    def bound(self) -> float:
        """Least price of a step of all that may beat the limit, proven or not."""
        return math.inf if self.state.is_proven else self.state.least_ticks * self.rate

    @property
    def price(self) -> float:
        """Of a step of its best plan."""
        return self.state.best.ticks * self.rate if self.state.best else math.inf


@dataclass(frozen=True, slots=True)
class Contest:
    """How the search over parts ended."""

    winner: Contender
    """The part with the best plan; without any, the whole cluster, or the largest part that has layouts."""
    report: SearchReport
    """Over all parts that were searched."""
    missed_seconds: float | None = None
    """Fastest step of the whole cluster, where even that is behind the deadline."""


class Field:
    """Makes contenders that share one request, deadline and progress."""

    def __init__(
        self, request: PlanRequest, profile: ModelProfile, callbacks: Callbacks
    ) -> None:
        self.request, self.profile, self.callbacks = request, profile, callbacks
        self.started = time.monotonic()
        self.deadline = self.started + request.options.time_limit_seconds
        self.all: list[Contender] = []
        self._known: dict[tuple[tuple[int, ...], int], Contender] = {}
        self._due = -math.inf
        self._bounds: PartBounds | None = None

    def bound(self, parts: Sequence[Part]) -> PartBounds:
        """Bound all parts and their families before any of them is entered."""
        self._bounds = PartBounds(self.whole, parts)
        return self._bounds

    @property
    def is_over(self) -> bool:
        """The time is over, or the caller wants to stop."""
        asked = self.callbacks.should_stop is not None and self.callbacks.should_stop()
        return asked or time.monotonic() > self.deadline

    def enter(
        self, part: Part, ceiling: int = NO_LIMIT, *, is_beaten: bool = False
    ) -> Contender:
        """Bound the families of a part, or go on with it.

        Args:
            part: of the cluster.
            ceiling: in ticks; only plans of fewer matter.
            is_beaten: some plan is known; then families that surely do not beat the ceiling are left out.
        """
        place = (part.nodes, part.devices)
        if place in self._known:
            return self._known[place]
        self._known[place] = self._begun(part, ceiling, is_beaten=is_beaten)
        self.all.append(self._known[place])
        return self.all[-1]

    def _begun(self, part: Part, ceiling: int, *, is_beaten: bool) -> Contender:
        work, bounds = self._workload(part), self._bounds
        least = {} if bounds is None else bounds.of_part(part)
        near = {
            (split, ranks)
            for (split, _, ranks), ticks in least.items()
            if ticks.min() < ceiling
        }
        leaves_out = is_beaten and bounds is not None and bounds.is_known(part)
        space = space_of(
            work, (lambda split, ranks: (split, ranks) in near) if leaves_out else None
        )
        silent = Callbacks(should_stop=self.callbacks.should_stop)
        state = begin(work, space, self.request.options, silent, ceiling)
        state.deadline = self.deadline
        if bounds is not None:
            raise_bounds(state, least)
        return Contender(part, work, space, state, is_whole=not leaves_out)

    def with_all(self, one: Contender) -> Contender:
        """With the families that were left out of it, bounded: among them are the next best plans."""
        if one.is_whole:
            return one
        full = self._begun(one.part, one.state.limit_ticks, is_beaten=False)
        known = {(each.split, each.pipeline) for each in one.space.families}
        for each in full.state.bounds.values():
            if (
                isinstance(each.item, Family)
                and (each.item.split, each.item.pipeline) not in known
            ):
                missing = replace(each, order=(-1 - each.order[0],))
                one.state.bounds[missing.order] = missing
        return replace(one, space=full.space, is_whole=True)

    def _workload(self, part: Part) -> Workload:
        """Of a part; what is known of the layers on the same devices and links is looked at once."""
        if len(self.request.cluster.node_groups) == 1:
            return on_part(self.whole, part.cluster)
        if len(part.groups) < 2:
            return self._priced(part.cluster)
        return rearranged(self.whole, part.cluster, part.groups)

    @cached_property
    def whole(self) -> Workload:
        """Of the whole cluster."""
        return self._priced(self.request.cluster)

    def _priced(self, cluster: Cluster) -> Workload:
        request = self.request
        return workload(
            self.profile, cluster, request.job, calibration=request.calibration
        )

    def spoken_of(self, one: Contender) -> Contender:
        """Whose layouts are told of where none fits: its own, or, if it has none, those of the largest that has."""
        others = (each for each in self.all if each.space.families)
        return (
            one
            if one.space.families
            else max(others, key=lambda each: each.part.devices, default=one)
        )

    def settled_below(self, winner: Contender) -> bool:
        """Is nothing open on as many devices as the winner's, or fewer? More are forgotten."""
        self.all = [one for one in self.all if one.part.devices <= winner.part.devices]
        return all(one.state.is_proven for one in self.all)

    def take_up(self, one: Contender) -> bool:
        """Take up what has the least bound; False when the time is over."""
        if one.state.seconds_left() <= 0:
            return False
        advance(one.state)
        return True

    @property
    def is_due(self) -> bool:
        """Somebody waits for progress, and has waited for some time."""
        return self.callbacks.on_progress is not None and time.monotonic() >= self._due

    def tell(self, winner: Contender | None, bound_ticks: int) -> None:
        """Report progress now and then: the best plan so far, and the bound on its devices."""
        if self.is_due:
            began = time.monotonic()
            self.tell_now(winner, report_of(self, winner, bound_ticks))
            ended = time.monotonic()
            self._due = ended + max(_TOLD_SECONDS, (ended - began) / _TOLD_SHARE)

    def tell_now(self, winner: Contender | None, report: SearchReport) -> None:
        """Report progress."""
        if self.callbacks.on_progress is None:
            return
        self.callbacks.on_progress(
            Progress(
                layouts_considered=report.layouts_considered,
                layouts_done=report.layouts_pruned + report.layouts_solved,
                incumbent_seconds=ticks_of(winner) * TICK_SECONDS if winner else None,
                lower_bound_seconds=report.lower_bound_seconds,
                gap=report.gap if winner else None,
                elapsed_seconds=report.seconds,
            )
        )


def contest_of(
    field: Field, winner: Contender | None, bound_ticks: int, otherwise: Contender
) -> Contest:
    """The end: with the best plan, or without any."""
    report = report_of(field, winner, bound_ticks)
    field.tell_now(winner, report)
    for one in field.all:
        one.state.settle()
    return Contest(
        field.with_all(winner) if winner else field.spoken_of(otherwise), report
    )


def report_of(field: Field, winner: Contender | None, bound_ticks: int) -> SearchReport:
    """Counts of all parts together, and the bound on the winner's devices."""
    states = [one.state for one in field.all]
    considered, solved = (
        sum(state.considered for state in states),
        sum(state.solved for state in states),
    )
    still_open = sum(one.count for state in states for one in state.left)
    ticks = ticks_of(winner) if winner else 0
    gap = (ticks - min(bound_ticks, ticks)) / ticks if ticks else 0.0
    solved = solved_of(solved, is_proven=winner is not None and gap <= _OPTIMAL_GAP)
    return SearchReport(
        layouts_considered=considered,
        layouts_pruned=considered - solved - still_open,
        layouts_solved=solved,
        seconds=round(time.monotonic() - field.started, 3),
        lower_bound_seconds=min(bound_ticks, ticks) * TICK_SECONDS if winner else 0.0,
        gap=gap,
        optimal=gap <= _OPTIMAL_GAP
        and (winner is not None or not (still_open or field.is_over)),
        clusters_considered=len(states),
    )


def ticks_of(one: Contender) -> int:
    """Of the step of its best plan; it has one."""
    assert one.state.best is not None
    return one.state.best.ticks
