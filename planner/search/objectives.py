"""The search under each objective of a job.

step_time   the fastest step on all devices
cost        the least price of a token (J2), over all parts of the cluster. One best-first search goes through the
            layouts of all parts together: what is open has a least price, bound x the part's price per second, and the
            least comes next, so that of most parts only the families are ever bounded               -> _cheapest()
devices     the fewest devices whose step meets the deadline, ties by step. Parts come in the order of their devices,
            each searched below the deadline only; the first that has a plan is searched to its end  -> _fewest()

Bounds and gap are told in seconds on the plan's devices. Under `cost` the bound is what a step there would have to take
to be as cheap as the least open bound of any part; so the gap is that of the price.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from planner.cost import TICK_SECONDS, Workload, workload
from planner.search.inside import NO_LIMIT
from planner.search.parts import Part, check_prices, parts_of, whole
from planner.search.result import Callbacks, Progress
from planner.search.solve import State, advance, begin, search
from planner.search.space import Space, space_of
from planner.spec.plan import PlanRequest, SearchReport
from planner.spec.profile import ModelProfile

_OPTIMAL_GAP = 1e-6
_ROUNDING = 1e-12
"""Seconds of a deadline are no whole ticks in binary."""


@dataclass(frozen=True, slots=True)
class Contender:
    """The search over the layouts of one part of the cluster."""

    part: Part
    work: Workload
    space: Space
    state: State

    @property
    def rate(self) -> float:
        """Price of a tick of the part."""
        return self.part.price_per_second * TICK_SECONDS

    @property
    def least_price(self) -> float:
        """Of a step of what is open."""
        return self.state.heap[0].bound_ticks * self.rate

    @property
    def price(self) -> float:
        """Of a step of its best plan."""
        return self.state.best.ticks * self.rate if self.state.best else math.inf


@dataclass(frozen=True, slots=True)
class Contest:
    """How the search over parts ended."""

    winner: Contender
    """The part with the best plan; without any plan, the whole cluster."""
    field: tuple[Contender, ...]
    """All parts that were searched, the winner among them."""
    report: SearchReport
    """Over all of them."""
    missed_seconds: float | None = None
    """Fastest step of the whole cluster, where even that is behind the deadline."""


class _Field:
    """Makes contenders that share one request, deadline and progress."""

    def __init__(self, request: PlanRequest, profile: ModelProfile, callbacks: Callbacks) -> None:
        self.request, self.profile, self.callbacks = request, profile, callbacks
        self.started = time.monotonic()
        self.deadline = self.started + request.options.time_limit_seconds
        self.all: list[Contender] = []

    def enter(self, part: Part, ceiling: int = NO_LIMIT) -> Contender:
        """Bound the families of a part."""
        work = workload(self.profile, part.cluster, self.request.job)
        space = space_of(work)
        silent = Callbacks(should_stop=self.callbacks.should_stop)
        state = begin(work, space, self.request.options, silent, ceiling)
        state.deadline = self.deadline
        self.all.append(Contender(part, work, space, state))
        return self.all[-1]

    def take_up(self, one: Contender) -> bool:
        """Take up what has the least bound; False when the time is over."""
        if one.state.seconds_left() <= 0:
            return False
        advance(one.state)
        return True

    def tell(self, winner: Contender | None, bound_ticks: int) -> None:
        """Report progress: the best plan so far, and the bound on its devices."""
        if self.callbacks.on_progress is None:
            return
        report = _report(self, winner, bound_ticks)
        self.callbacks.on_progress(
            Progress(
                layouts_considered=report.layouts_considered,
                layouts_done=report.layouts_pruned + report.layouts_solved,
                incumbent_seconds=_ticks_of(winner) * TICK_SECONDS if winner else None,
                lower_bound_seconds=report.lower_bound_seconds,
                gap=report.gap if winner else None,
                elapsed_seconds=report.seconds,
            )
        )


def contest(request: PlanRequest, profile: ModelProfile, callbacks: Callbacks) -> Contest:
    """Search for the plan that is best by the job's objective.

    Raises:
        DocumentError: a price is missing.
        UnsupportedError: the cluster has too many parts.
    """
    field = _Field(request, profile, callbacks)
    match request.job.objective:
        case "cost":
            return _cheapest(field)
        case "devices":
            return _fewest(field)
    return _fastest(field)


def _fastest(field: _Field) -> Contest:
    part = whole(field.request.cluster)
    work = workload(field.profile, part.cluster, field.request.job)
    space = space_of(work)
    state = search(work, space, field.request.options, field.callbacks)
    winner = Contender(part, work, space, state)
    return Contest(winner, (winner,), state.report())


def _cheapest(field: _Field) -> Contest:
    check_prices(field.request.cluster)
    for part in parts_of(field.request.cluster):
        field.enter(part)
    winner: Contender | None = None
    largest = field.all[-1]
    while open_ones := [one for one in field.all if one.state.is_open]:
        one = min(open_ones, key=lambda each: (each.least_price, each.part.devices))
        if winner is None and largest.state.is_open:
            one = largest  # where plans fit soonest: without any, the search would begin with the tightest parts
        if not field.take_up(one):
            break
        if one.price < (winner.price if winner else math.inf):
            winner = one
            _hold_to(field.all, winner)
        field.tell(winner, _bound_on(winner, field.all))
    return _ended(field, winner, _bound_on(winner, field.all))


def _hold_to(field: Sequence[Contender], winner: Contender) -> None:
    """Only what is cheaper than the winner matters from now on."""
    for one in field:
        if one is not winner:
            one.state.ceiling = math.ceil(winner.price / one.rate)


def _bound_on(winner: Contender | None, field: Sequence[Contender]) -> int:
    """Ticks on the winner's devices that cost as little as the least bound of all parts."""
    if winner is None:
        return 0
    least = min((one.least_price for one in field if one.state.is_open), default=math.inf)
    return int(min(least / winner.rate, _ticks_of(winner)))


def _fewest(field: _Field) -> Contest:
    seconds = field.request.job.deadline_seconds
    assert seconds is not None
    ceiling = math.floor(seconds / TICK_SECONDS * (1 + _ROUNDING)) + 1
    for _, parts in groupby(parts_of(field.request.cluster), key=lambda part: part.devices):
        same = [field.enter(part, ceiling) for part in parts]
        winner = _first(field, same)
        if winner is not None:
            is_proven = not any(one.state.is_open for one in field.all)
            return _ended(field, winner, _ticks_of(winner) if is_proven else 0)
    ended = _ended(field, None, 0)
    free = begin(
        ended.winner.work, ended.winner.space, field.request.options, Callbacks(None, field.callbacks.should_stop)
    )
    free.deadline = field.deadline
    while free.is_open and free.seconds_left() > 0:
        advance(free)
    return replace(ended, missed_seconds=free.best.ticks * TICK_SECONDS if free.best else None)


def _first(field: _Field, same: Sequence[Contender]) -> Contender | None:
    """The fastest plan of parts with equally many devices."""
    winner: Contender | None = None
    while open_ones := [one for one in same if one.state.is_open]:
        one = min(open_ones, key=lambda each: each.state.heap[0].bound_ticks)
        if not field.take_up(one):
            break
        if one.state.best is not None and (winner is None or one.state.best.ticks < _ticks_of(winner)):
            winner = one
            for each in same:
                each.state.ceiling = one.state.best.ticks
        field.tell(winner, min((each.state.heap[0].bound_ticks for each in same if each.state.heap), default=0))
    return winner


def _ended(field: _Field, winner: Contender | None, bound_ticks: int) -> Contest:
    report = _report(field, winner, bound_ticks)
    for one in field.all:
        one.state.settle()
    last = field.all[-1]
    return Contest(winner or last, tuple(field.all), report)


def _report(field: _Field, winner: Contender | None, bound_ticks: int) -> SearchReport:
    """Counts of all parts together, and the bound on the winner's devices."""
    states = [one.state for one in field.all]
    considered, solved = sum(state.considered for state in states), sum(state.solved for state in states)
    still_open = sum(one.count for state in states for one in state.heap if one.bound_ticks < state.limit_ticks)
    ticks = _ticks_of(winner) if winner else 0
    gap = (ticks - min(bound_ticks, ticks)) / ticks if ticks else 0.0
    return SearchReport(
        layouts_considered=considered,
        layouts_pruned=considered - solved - still_open,
        layouts_solved=solved,
        seconds=round(time.monotonic() - field.started, 3),
        lower_bound_seconds=min(bound_ticks, ticks) * TICK_SECONDS if winner else 0.0,
        gap=gap,
        optimal=gap <= _OPTIMAL_GAP and (winner is not None or not still_open),
        clusters_considered=len(states),
    )


def _ticks_of(one: Contender) -> int:
    assert one.state.best is not None
    return one.state.best.ticks
