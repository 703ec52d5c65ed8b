"""The search under each objective of a job.

step_time   the fastest step on all devices; of a heterogeneous cluster, on any of its node groups in any order (J3):
            slow devices may be better left out                                          -> _fastest(), _raced()
            (J4) a part is entered once nothing that is open has a lesser bound than the work of all layers on its
            devices; most never are                                                                    -> _raced()
cost        the least price of a token (J2), over all parts of the cluster. One best-first search goes through all parts
            and their layouts together: what is open has a least price, bound x the part's price per second, and the
            least comes next. A part that is not entered yet has the bound of its number of devices (K10), and families
            keep theirs when it is; most never come to be entered                               -> _cheapest()
            (J5) first of all comes a plan to beat: parts whose devices divide all are looked into for any plan, the
            best of them is searched, then those with fewer devices, then those with more, as long as each is cheaper
            than the last                                                                           -> _Prices.climbed()
devices     the fewest devices whose step meets the deadline, ties by step. Parts come in the order of their devices,
            each searched below the deadline only, those left out that (K10) excludes; the first that has a plan is
            searched to its end                                                                      -> _fewest()

Bounds and gap are told in seconds on the plan's devices. Under `cost` the bound is what a step there would have to take
to be as cheap as the least open bound of any part; so the gap is that of the price.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from planner.cost import TICK_SECONDS, Workload, workload
from planner.cost.workload import on_part, rearranged
from planner.search.dive import dive_on_groups, is_poor
from planner.search.inside import NO_LIMIT
from planner.search.loads import part_ticks
from planner.search.offloading import check_offload_constraints
from planner.search.part_bounds import PartBounds
from planner.search.parts import Part, arrangements, check_prices, parts_of, whole
from planner.search.result import Callbacks, Progress
from planner.search.solve import advance, begin, dive, search
from planner.search.space import Space, space_of
from planner.search.state import State
from planner.spec.plan import PlanRequest, SearchReport
from planner.spec.profile import ModelProfile

_OPTIMAL_GAP = 1e-6
_FEW_PARTS = 16
"""Fewer are simply taken in order."""
_ROUNDING = 1e-12
"""Seconds of a deadline are no whole ticks in binary."""
_CLIMBED = 10_000
"""Pieces of a part taken up for a plan to beat; most parts are proven sooner."""
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


class _Field:
    """Makes contenders that share one request, deadline and progress."""

    def __init__(self, request: PlanRequest, profile: ModelProfile, callbacks: Callbacks) -> None:
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

    def enter(self, part: Part, ceiling: int = NO_LIMIT) -> Contender:
        """Bound the families of a part, or go on with it."""
        place = (part.nodes, part.devices)
        if place in self._known:
            return self._known[place]
        work = self._workload(part)
        space = space_of(work)
        silent = Callbacks(should_stop=self.callbacks.should_stop)
        state = begin(work, space, self.request.options, silent, ceiling)
        if self._bounds is not None:
            state.raise_bounds(self._bounds.of_part(part))
        state.deadline = self.deadline
        self._known[place] = Contender(part, work, space, state)
        self.all.append(self._known[place])
        return self.all[-1]

    def _workload(self, part: Part) -> Workload:
        """Of a part; what is known of the layers on the same devices and links is looked at once."""
        if len(self.request.cluster.node_groups) == 1:
            return on_part(self.whole, part.cluster)
        if len(part.groups) < 2:
            return workload(self.profile, part.cluster, self.request.job)
        return rearranged(self.whole, part.cluster, part.groups)

    @cached_property
    def whole(self) -> Workload:
        """Of the whole cluster."""
        return workload(self.profile, self.request.cluster, self.request.job)

    def spoken_of(self, one: Contender) -> Contender:
        """Whose layouts are told of where none fits: its own, or, if it has none, those of the largest that has."""
        others = (each for each in self.all if each.space.families)
        return one if one.space.families else max(others, key=lambda each: each.part.devices, default=one)

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
            self.tell_now(winner, _report(self, winner, bound_ticks))
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
        UnsupportedError: the cluster has too many parts, or none where the job's constraints can be met.
    """
    field = _Field(request, profile, callbacks)
    check_offload_constraints(field.whole)
    match request.job.objective:
        case "cost":
            return _cheapest(field)
        case "devices":
            return _fewest(field)
    return _fastest(field)


def _fastest(field: _Field) -> Contest:
    parts = arrangements(field.request.cluster)
    if len(parts) > 1:
        return _raced(field, parts)
    space = space_of(field.whole)
    state = search(field.whole, space, field.request.options, field.callbacks)
    return Contest(Contender(whole(field.request.cluster), field.whole, space, state), state.report())


def _raced(field: _Field, parts: Sequence[Part]) -> Contest:
    """The fastest plan of any of these parts, of which the first is the whole cluster: (J4)."""
    first, *others = parts
    entered = [field.enter(first)]
    dive(entered[0].state)
    found = dive_on_groups(entered[0].state) if is_poor(entered[0].state) else None
    for part in others:
        if found is not None and len(part.groups) == len(first.groups):
            entered.append(field.enter(part))
            _hold_below(entered)
            dive_on_groups(entered[-1].state, like=found)
    least = {part.groups: part_ticks(entered[0].work, part.groups) for part in others}
    known = [one.part for one in entered]
    waiting = sorted((part for part in others if part not in known), key=lambda part: least[part.groups])
    while waiting and not field.is_over:
        _hold_below(entered)
        bound, limit = min(map(_open_bound, entered)), entered[0].state.limit_ticks
        if least[waiting[0].groups] <= min(bound, limit - 1):
            entered.append(field.enter(waiting.pop(0)))
        elif bound >= limit or not field.take_up(min(entered, key=_open_bound)):
            break
        else:
            field.tell(_fastest_of(entered), bound)
    _hold_below(entered)
    winner = _first(field, entered)
    _hold_below(entered)
    left = [one.state.least_ticks for one in entered if not one.state.is_proven]
    return _ended(field, winner, min([*left, *(least[part.groups] for part in waiting)], default=NO_LIMIT), entered[0])


def _open_bound(one: Contender) -> int:
    """Least bound of what is open."""
    return one.state.heap[0].bound_ticks if one.state.is_open else NO_LIMIT


def _fastest_of(same: Sequence[Contender]) -> Contender | None:
    """Who has the fastest plan; None: there is none yet."""
    return min((one for one in same if one.state.best), key=_ticks_of, default=None)


def _hold_below(same: Sequence[Contender]) -> None:
    """Only what is faster than the fastest matters from now on."""
    found = [_ticks_of(one) for one in same if one.state.best]
    for one in same:
        one.state.ceiling = min([one.state.ceiling, *found])


def _cheapest(field: _Field) -> Contest:
    check_prices(field.request.cluster)
    parts = parts_of(field.request.cluster)
    prices = _Prices(field, parts)
    winner = prices.climbed(prices.dived())
    while (one := prices.least(winner)) is not None and field.take_up(one):
        if one.price < (winner.price if winner else math.inf):
            winner = one
            _hold_to(field.all, winner)
        if field.is_due:
            field.tell(winner, prices.bound_on(winner))
    return _ended(field, winner, prices.bound_on(winner), winner or field.enter(parts[-1]))


class _Prices:
    """Parts by the least price of what is open on them, whether they have been entered or not."""

    def __init__(self, field: _Field, parts: Sequence[Part]) -> None:
        self._field, self._most = field, parts[-1].devices
        least = zip(parts, field.bound(parts).least, strict=True)
        self._heap: list[tuple[float, int, int, Part | Contender]] = [
            (ticks * TICK_SECONDS * part.price_per_second, part.devices, place, part)
            for place, (part, ticks) in enumerate(least)
            if ticks < math.inf
        ]
        heapq.heapify(self._heap)

    def dived(self) -> Contender | None:
        """A plan at once, the cheapest that is found on parts whose devices divide those of all: without one to beat,
        the search would begin with the tightest parts."""
        winner: Contender | None = None
        even = [each for each in sorted(self._heap) if self._most % each[1] == 0]
        for price, _, _, part in even:
            assert isinstance(part, Part)
            if self._field.is_over or price >= (winner.price if winner else math.inf):
                break
            one = self._field.enter(part)
            _hold_to(self._field.all, winner)
            dive(one.state)
            if one.price < (winner.price if winner else math.inf):
                winner = one
        _hold_to(self._field.all, winner)
        return winner

    def climbed(self, winner: Contender | None) -> Contender | None:
        """A good plan soon: that of the part that was dived into, or of an even part beside it, where that is cheaper.
        It is what parts are held to that take long to search; their order is that of their bounds from here on."""
        even = sorted((each for each in self._heap if self._most % each[1] == 0), key=lambda each: each[1])
        parts = [each[-1] for each in even if isinstance(each[-1], Part)]
        if winner is None:
            return None
        start = parts.index(winner.part)
        winner = self._searched(parts[start], winner)
        for way in (reversed(parts[:start]), parts[start + 1 :]):
            for part in way:
                best = self._searched(part, winner)
                if best is winner:
                    break
                winner = best
        return winner

    def _searched(self, part: Part, winner: Contender) -> Contender:
        """Who has the cheapest plan once a part has been searched for some time below the price known."""
        one = self._field.enter(part)
        _hold_to([one], winner)
        for _ in range(_CLIMBED):
            if not (one.state.is_open and self._field.take_up(one)):
                break
            if self._field.is_due:
                self._field.tell(winner, self.bound_on(winner))
        best = one if one.price < winner.price else winner
        _hold_to(self._field.all, best)
        return best

    def least(self, winner: Contender | None) -> Contender | None:
        """What is to be taken up next: None when nothing is left that may be cheaper, or the time is over."""
        while self._heap and not self._field.is_over:
            price, devices, place, item = self._heap[0]
            if price >= (winner.price if winner else math.inf):
                break
            if isinstance(item, Part):
                item = self._field.enter(item)
                _hold_to([item], winner)
            if not item.state.is_open:
                heapq.heappop(self._heap)
            elif item.least_price > price or item is not self._heap[0][-1]:
                heapq.heapreplace(self._heap, (max(price, item.least_price), devices, place, item))
            else:
                return item
        return None

    def bound_on(self, winner: Contender | None) -> int:
        """Ticks on the winner's devices that cost as little as the least bound of all parts."""
        if winner is None:
            return 0
        left = [one.bound for one in self._field.all] + [each[0] for each in self._heap if isinstance(each[-1], Part)]
        return int(min(min(left, default=math.inf) / winner.rate, _ticks_of(winner)))


def _hold_to(field: Sequence[Contender], winner: Contender | None) -> None:
    """Only what is cheaper than the winner matters from now on."""
    for one in field:
        if winner is not None and one is not winner:
            one.state.ceiling = math.ceil(winner.price / one.rate)


def _fewest(field: _Field) -> Contest:
    seconds = field.request.job.deadline_seconds
    assert seconds is not None
    ceiling = math.floor(seconds / TICK_SECONDS * (1 + _ROUNDING)) + 1
    every = parts_of(field.request.cluster)
    bounded = zip(every, field.bound(every).least, strict=True)
    fast_enough = [part for part, ticks in bounded if ticks < ceiling]
    by_devices = [tuple(parts) for _, parts in groupby(fast_enough, key=lambda part: part.devices)]
    enough = _enough(field, by_devices, ceiling)
    for parts in by_devices if enough is None else by_devices[: enough + 1]:
        if field.is_over:
            break
        winner = _first(field, [field.enter(part, ceiling) for part in parts])
        if winner is not None:
            return _ended(field, winner, _ticks_of(winner) if field.settled_below(winner) else 0, winner)
    if enough is not None:  # the time was over before all with fewer devices were excluded
        winner = _first(field, [field.enter(part, ceiling) for part in by_devices[enough]])
        field.settled_below(winner or field.all[-1])
        return _ended(field, winner, 0, field.all[-1])
    largest = field.spoken_of(field.enter(every[-1], ceiling))
    ended = _ended(field, None, 0, largest)
    return replace(ended, missed_seconds=_fastest_seconds(field, largest))


def _enough(field: _Field, by_devices: Sequence[tuple[Part, ...]], ceiling: int) -> int | None:
    """Place of parts that meet the deadline, with few devices that divide all: by halving, as if more were faster.

    It is a plan to have before the proof that fewer do not, which takes long where there are many parts; None: there
    are few, or none was found.
    """
    if len(by_devices) <= _FEW_PARTS or not _finds(field, by_devices[-1], ceiling):
        return None
    most = by_devices[-1][0].devices
    places = [place for place, parts in enumerate(by_devices) if most % parts[0].devices == 0]
    low, high = 0, len(places) - 1
    while low < high:
        middle = (low + high) // 2
        if _finds(field, by_devices[places[middle]], ceiling):
            high = middle
        elif field.is_over:
            break
        else:
            low = middle + 1
    return places[high]


def _finds(field: _Field, parts: Sequence[Part], ceiling: int) -> bool:
    """Is there a plan on one of these parts?"""
    for one in [field.enter(part, ceiling) for part in parts]:
        if one.state.best is None:
            dive(one.state)
        while one.state.is_open and one.state.best is None and field.take_up(one):
            field.tell(None, 0)
        if one.state.best is not None:
            return True
    return False


def _fastest_seconds(field: _Field, largest: Contender) -> float | None:
    """Step of the fastest plan on all devices, whatever the deadline; None: none fits, or the time was over."""
    free = begin(largest.work, largest.space, field.request.options, Callbacks(None, field.callbacks.should_stop))
    free.deadline = field.deadline
    while free.is_open and free.seconds_left() > 0:
        advance(free)
    return free.best.ticks * TICK_SECONDS if free.best else None


def _first(field: _Field, same: Sequence[Contender]) -> Contender | None:
    """The fastest plan of parts with equally many devices."""
    winner = min((one for one in same if one.state.best), key=_ticks_of, default=None)
    while open_ones := [one for one in same if one.state.is_open]:
        one = min(open_ones, key=lambda each: each.state.heap[0].bound_ticks)
        if not field.take_up(one):
            break
        if one.state.best is not None and (winner is None or one.state.best.ticks < _ticks_of(winner)):
            winner = one
            for each in same:
                each.state.ceiling = one.state.best.ticks
        field.tell(winner, min((each.state.least_ticks for each in same if each.state.heap), default=0))
    return winner


def _ended(field: _Field, winner: Contender | None, bound_ticks: int, otherwise: Contender) -> Contest:
    """The end: with the best plan, or without any."""
    report = _report(field, winner, bound_ticks)
    field.tell_now(winner, report)
    for one in field.all:
        one.state.settle()
    return Contest(winner or field.spoken_of(otherwise), report)


def _report(field: _Field, winner: Contender | None, bound_ticks: int) -> SearchReport:
    """Counts of all parts together, and the bound on the winner's devices."""
    states = [one.state for one in field.all]
    considered, solved = sum(state.considered for state in states), sum(state.solved for state in states)
    still_open = sum(one.count for state in states for one in state.left)
    ticks = _ticks_of(winner) if winner else 0
    gap = (ticks - min(bound_ticks, ticks)) / ticks if ticks else 0.0
    return SearchReport(
        layouts_considered=considered,
        layouts_pruned=considered - solved - still_open,
        layouts_solved=solved,
        seconds=round(time.monotonic() - field.started, 3),
        lower_bound_seconds=min(bound_ticks, ticks) * TICK_SECONDS if winner else 0.0,
        gap=gap,
        optimal=gap <= _OPTIMAL_GAP and (winner is not None or not (still_open or field.is_over)),
        clusters_considered=len(states),
    )


def _ticks_of(one: Contender) -> int:
    assert one.state.best is not None
    return one.state.best.ticks
