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
            (J6) with a plan, what may still be cheaper is looked at more closely, (K11) to (K16), and so again with
            each that is clearly cheaper; of a part that is entered later only families, ZeRO stages and classes of
            orders are priced that may                                                           -> _Prices.hold_to()
devices     the fewest devices whose step meets the deadline, ties by step. Parts come in the order of their devices,
            each searched below the deadline only; parts and families that (K10) excludes are left out, and the first
            part that has a plan is searched to its end                                              -> _fewest()

Bounds and gap are told in seconds on the plan's devices. Under `cost` the bound is what a step there would have to take
to be as cheap as the least open bound of any part; so the gap is that of the price.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from planner.cost import TICK_SECONDS
from planner.search.bounds.loads import part_ticks
from planner.search.bounds.parts import PartBounds
from planner.search.contenders import Contender, Contest, Field, contest_of, ticks_of
from planner.search.dive import dive_on_groups, is_poor
from planner.search.engine.division import check_division
from planner.search.engine.offloading import check_offload_constraints
from planner.search.layouts.order_classes import raise_bounds
from planner.search.layouts.orders import MOST_VIRTUAL_STAGES
from planner.search.layouts.space import space_of
from planner.search.parts import (
    Part,
    arrangements,
    check_prices,
    parts_of,
    whole,
)
from planner.search.result import Callbacks
from planner.search.solve import advance, begin, dive, search
from planner.search.stage_maps.inside import NO_LIMIT
from planner.spec.plan import PlanRequest
from planner.spec.profile import ModelProfile

_FEW_PARTS = 16
"""Fewer are simply taken in order."""
_ROUNDING = 1e-12
"""Seconds of a deadline are no whole ticks in binary."""
_CLEARLY_CHEAPER = 0.995
"""Than the plan that bounds are held to: worth to hold them to another."""
_SECOND_DIVE = 50
"""Pieces of several node groups taken up; what promises most then promises more truly."""
_CLIMBED = 10_000
"""Pieces of a part taken up for a plan to beat; most parts are proven sooner."""


def contest(
    request: PlanRequest, profile: ModelProfile, callbacks: Callbacks
) -> Contest:
    """Search for the plan that is best by the job's objective.

    Raises:
        DocumentError: a price is missing.
        UnsupportedError: the cluster has too many parts, or none where the job's constraints can be met.
    """
    field = Field(request, profile, callbacks)
    check_offload_constraints(field.whole)
    check_division(field.whole, MOST_VIRTUAL_STAGES)
    match request.job.objective:
        case "cost":
            return _cheapest(field)
        case "devices":
            return _fewest(field)
    return _fastest(field)


def _fastest(field: Field) -> Contest:
    parts = arrangements(field.request.cluster)
    if len(parts) > 1:
        return _raced(field, parts)
    space = space_of(field.whole)
    state = search(field.whole, space, field.request.options, field.callbacks)
    return Contest(
        Contender(whole(field.request.cluster), field.whole, space, state),
        state.report(),
    )


def _raced(field: Field, parts: Sequence[Part]) -> Contest:
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
    waiting = sorted(
        (part for part in others if part not in known),
        key=lambda part: least[part.groups],
    )
    until_dive = _SECOND_DIVE
    while waiting and not field.is_over:
        _hold_below(entered)
        bound, limit = min(map(_open_bound, entered)), entered[0].state.limit_ticks
        if least[waiting[0].groups] <= min(bound, limit - 1):
            entered.append(field.enter(waiting.pop(0)))
        elif bound >= limit or not field.take_up(one := min(entered, key=_open_bound)):
            break
        else:
            field.tell(_fastest_of(entered), bound)
            until_dive -= 1
            if until_dive == 0 and is_poor(one.state):
                dive_on_groups(one.state)
    _hold_below(entered)
    winner = _first(field, entered)
    _hold_below(entered)
    left = [one.state.least_ticks for one in entered if not one.state.is_proven]
    return contest_of(
        field,
        winner,
        min([*left, *(least[part.groups] for part in waiting)], default=NO_LIMIT),
        entered[0],
    )


def _open_bound(one: Contender) -> int:
    """Least bound of what is open."""
    return one.state.heap[0].bound_ticks if one.state.is_open else NO_LIMIT


def _fastest_of(same: Sequence[Contender]) -> Contender | None:
    """Who has the fastest plan; None: there is none yet."""
    return min((one for one in same if one.state.best), key=ticks_of, default=None)


def _hold_below(same: Sequence[Contender]) -> None:
    """Only what is faster than the fastest matters from now on."""
    found = [ticks_of(one) for one in same if one.state.best]
    for one in same:
        one.state.ceiling = min([one.state.ceiling, *found])


def _cheapest(field: Field) -> Contest:
    check_prices(field.request.cluster)
    parts = parts_of(field.request.cluster)
    prices = _Prices(field, parts)
    winner = prices.dived()
    prices.hold_to(winner)
    winner = prices.climbed(winner)
    prices.hold_to(winner)
    while (one := prices.least(winner)) is not None and field.take_up(one):
        if one.price < (winner.price if winner else math.inf):
            winner = one
            _hold_to(field.all, winner)
            prices.hold_to(winner)
        if field.is_due:
            field.tell(winner, prices.bound_on(winner))
    return contest_of(
        field, winner, prices.bound_on(winner), winner or field.enter(parts[-1])
    )


class _Prices:
    """Parts by the least price of what is open on them, whether they have been entered or not."""

    def __init__(self, field: Field, parts: Sequence[Part]) -> None:
        self._field, self._most, self._parts = field, parts[-1].devices, parts
        self._bounds = field.bound(parts)
        self._heap: list[tuple[float, int, int, Part | Contender]] = []
        self._held_to = math.inf
        self._fill()

    def _fill(self) -> None:
        """All parts anew, by their bounds; those that are entered, by what is open of them."""
        least, entered = (
            zip(self._parts, self._bounds.least, strict=True),
            {id(one.part): one for one in self._field.all},
        )
        self._heap = []
        for place, (part, ticks) in enumerate(least):
            price, one = (
                ticks * TICK_SECONDS * part.price_per_second,
                entered.get(id(part)),
            )
            if one is not None and one.state.heap:
                price = min(price, one.least_price)
            if price < math.inf:
                self._heap.append((price, part.devices, place, part))
        heapq.heapify(self._heap)

    def hold_to(self, winner: Contender | None) -> None:
        """Bound again what may be cheaper than the winner: (K11) to (K16)."""
        if (
            winner is not None
            and winner.price < self._held_to * _CLEARLY_CHEAPER
            and not self._field.is_over
        ):
            self._held_to = winner.price
            self._bounds.raised_to(
                [
                    winner.price / (part.price_per_second * TICK_SECONDS)
                    for part in self._parts
                ]
            )
            for one in self._field.all:
                raise_bounds(one.state, self._bounds.of_part(one.part))
            self._fill()

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
        even = sorted(
            (each for each in self._heap if self._most % each[1] == 0),
            key=lambda each: each[1],
        )
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
                item = self._field.enter(
                    item, _ceiling(item, winner), is_beaten=winner is not None
                )
                _hold_to([item], winner)
            if not item.state.is_open:
                heapq.heappop(self._heap)
            elif item.least_price > price or item is not self._heap[0][-1]:
                heapq.heapreplace(
                    self._heap, (max(price, item.least_price), devices, place, item)
                )
            else:
                return item
        return None

    def bound_on(self, winner: Contender | None) -> int:
        """Ticks on the winner's devices that cost as little as the least bound of all parts."""
        if winner is None:
            return 0
        left = [one.bound for one in self._field.all] + [
            each[0] for each in self._heap if isinstance(each[-1], Part)
        ]
        return int(min(min(left, default=math.inf) / winner.rate, ticks_of(winner)))


def _ceiling(part: Part, winner: Contender | None) -> int:
    """Ticks of a step on the part that is as expensive as the winner's."""
    return (
        math.ceil(winner.price / (part.price_per_second * TICK_SECONDS))
        if winner
        else NO_LIMIT
    )


def _hold_to(field: Sequence[Contender], winner: Contender | None) -> None:
    """Only what is cheaper than the winner matters from now on."""
    for one in field:
        if winner is not None and one is not winner:
            one.state.ceiling = math.ceil(winner.price / one.rate)


def _fewest(field: Field) -> Contest:
    seconds = field.request.job.deadline_seconds
    assert seconds is not None
    ceiling = math.floor(seconds / TICK_SECONDS * (1 + _ROUNDING)) + 1
    every = parts_of(field.request.cluster)
    fast_enough, most = (
        _fast_enough(field.bound(every), every, ceiling),
        every[-1].devices,
    )
    enough = _enough(field, fast_enough, ceiling)
    by_devices = [
        parts for parts in fast_enough if parts[0].devices <= (enough or most)
    ]
    for parts in by_devices:
        if field.is_over:
            break
        winner = _first(
            field, [field.enter(part, ceiling, is_beaten=True) for part in parts]
        )
        if winner is not None:
            return contest_of(
                field,
                winner,
                ticks_of(winner) if field.settled_below(winner) else 0,
                winner,
            )
    if (
        enough is not None
    ):  # the time was over before all with fewer devices were excluded
        winner = _first(
            field,
            [field.enter(part, ceiling, is_beaten=True) for part in by_devices[-1]],
        )
        field.settled_below(winner or field.all[-1])
        return contest_of(field, winner, 0, field.all[-1])
    largest = field.with_all(
        field.spoken_of(field.with_all(field.enter(every[-1], ceiling)))
    )
    ended = contest_of(field, None, 0, largest)
    return replace(ended, missed_seconds=_fastest_seconds(field, largest))


def _fast_enough(
    bounds: PartBounds, every: Sequence[Part], ceiling: int
) -> list[tuple[Part, ...]]:
    """Parts that may meet the deadline, by their devices."""
    found = [
        part for part, ticks in zip(every, bounds.least, strict=True) if ticks < ceiling
    ]
    return [tuple(parts) for _, parts in groupby(found, key=lambda part: part.devices)]


def _enough(
    field: Field, by_devices: Sequence[tuple[Part, ...]], ceiling: int
) -> int | None:
    """Few devices, a divisor of all, of a part that meets the deadline: by halving, as if more were faster.

    It is a plan to have before the proof that fewer do not, which takes long where there are many parts; None: there
    are few, or none was found.
    """
    if len(by_devices) <= _FEW_PARTS or not _finds(field, by_devices[-1], ceiling):
        return None
    most = by_devices[-1][0].devices
    places = [
        place for place, parts in enumerate(by_devices) if most % parts[0].devices == 0
    ]
    low, high = 0, len(places) - 1
    while low < high:
        middle = (low + high) // 2
        if _finds(field, by_devices[places[middle]], ceiling):
            high = middle
        elif field.is_over:
            break
        else:
            low = middle + 1
    return by_devices[places[high]][0].devices


def _finds(field: Field, parts: Sequence[Part], ceiling: int) -> bool:
    """Is there a plan on one of these parts?"""
    for one in [field.enter(part, ceiling, is_beaten=True) for part in parts]:
        if one.state.best is None:
            dive(one.state)
        while one.state.is_open and one.state.best is None and field.take_up(one):
            field.tell(None, 0)
        if one.state.best is not None:
            return True
    return False


def _fastest_seconds(field: Field, largest: Contender) -> float | None:
    """Step of the fastest plan on all devices, whatever the deadline; None: none fits, or the time was over."""
    free = begin(
        largest.work,
        largest.space,
        field.request.options,
        Callbacks(None, field.callbacks.should_stop),
    )
    free.deadline = field.deadline
    while free.is_open and free.seconds_left() > 0:
        advance(free)
    return free.best.ticks * TICK_SECONDS if free.best else None


def _first(field: Field, same: Sequence[Contender]) -> Contender | None:
    """The fastest plan of parts with equally many devices."""
    winner = min((one for one in same if one.state.best), key=ticks_of, default=None)
    while open_ones := [one for one in same if one.state.is_open]:
        one = min(open_ones, key=lambda each: each.state.heap[0].bound_ticks)
        if not field.take_up(one):
            break
        if one.state.best is not None and (
            winner is None or one.state.best.ticks < ticks_of(winner)
        ):
            winner = one
            for each in same:
                each.state.ceiling = one.state.best.ticks
        field.tell(
            winner,
            min(
                (each.state.least_ticks for each in same if each.state.heap), default=0
            ),
        )
    return winner
