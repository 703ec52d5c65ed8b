"""Alternatives: the next best plans beside the winner, of other degrees first.

    (A1)  what the search left open or closed is taken up in the order of its bounds, whatever the incumbent
    (A2)  the first alternatives differ from the plan and from each other in their degrees; only when these run out, in
          schedule, micro-batch size, ZeRO stage or recomputation alone: further plans of the same degrees, and of the
          plan's own, are looked at only then
    (A3)  each is the best of a few layouts of its degrees, with the best stage map found by a fixed amount of work, and
          of long schedules fewer are looked at: a real plan, but not proven to be the best of its degrees, nor, by 3 %,
          the next best of all
    (A4)  of the groups of ranks that may share out the states of a ZeRO stage only one is looked at: that of the least
          bound, or the largest where that is no more than 1 % above; so many near twins would take up all of (A3)

    (A5)  behind the time limit, or once the caller wants to stop, the plans that the search itself came by stand in for
          those that were not looked at
    (A6)  what is slower than a ceiling is not looked at while there is something else, it is only known to be no
          faster; so few stage maps have to be bounded and priced. Once nothing is left below the ceiling, it is raised

Work is counted, not timed, so that the answer is always the same where the time suffices.              -> rivals()
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from planner.cost import schedule_of
from planner.search.bounds.loads import bound_of
from planner.search.layouts.space import Family
from planner.search.result import Candidate, Limits, degrees_of
from planner.search.solve import dealt_candidate, per_layer_candidate, take_up
from planner.search.stage_maps.inside import NO_LIMIT, first_plan
from planner.search.stage_maps.synthesized import Unordered, synthesized
from planner.search.state import (
    Alike,
    Dealt,
    DealtPerLayer,
    Group,
    Open,
    Searched,
    State,
)

_TAKEN_UP = 1000
"""Parts of the space looked at, for each alternative wanted: most are only bounded."""
_CEILINGS = (1.1, 1.5)
"""In steps of the best plan."""
_MUCH = 1.03
"""Of the ticks of an alternative, what another one would have to be faster by for which it were worth to go on."""
_PER_DEGREES = 2
"""Plans looked at with the same degrees."""
_MOST_PLANS = 5
"""Plans looked at, for each alternative wanted."""
_MOST_ACTIONS = 100_000
"""Of the schedules that are simulated, for each alternative wanted; once that many are found, no more."""
_ROUNDS = 1
"""Of the search inside a layout."""
_SYNTHESIS_WORK = 0.05
"""Of CP-SAT on the order of one layout."""


def rivals(state: State, top: int, limits: Limits) -> tuple[Candidate, ...]:
    """The next best plans, fastest first.

    Args:
        state: of a search that ended with a plan.
        top: how many are wanted.
        limits: of the time.
    """
    best = state.best
    if best is None or top == 0:
        return ()
    found = list(_looked_at(state, best, _TAKEN_UP * top, top, limits))
    if limits.should_stop():
        looked_at = {one.costs.layout for one in found}
        found += [
            one
            for one in state.met.values()
            if one is not best and one.costs.layout not in looked_at
        ]
    found.sort(key=lambda one: one.ticks)
    chosen: dict[tuple[int, ...], Candidate] = {}
    for one in found:
        if one.degrees != best.degrees:
            chosen.setdefault(one.degrees, one)
    first = list(chosen.values())[:top]
    others = [one for one in found if not any(one is each for each in first)]
    return tuple(
        sorted([*first, *others[: top - len(first)]], key=lambda one: one.ticks)
    )


def _looked_at(
    state: State, best: Candidate, budget: int, top: int, limits: Limits
) -> Iterator[Candidate]:
    """Plans of other layouts, by (A1), (A3) and (A4)."""
    # Everything is looked at as if there were no incumbent; the search's own state stays as it is.
    ceilings = iter([*(int(factor * best.ticks) for factor in _CEILINGS), NO_LIMIT])
    free = State(
        state.work,
        state.considered,
        limits.deadline,
        limits.callbacks,
        ceiling=next(ceilings),
    )
    free.nearest |= state.nearest
    heap, later = list(_nearest(free, state.bounds.values())), list[Open]()
    heapq.heapify(heap)
    seen: Counter[tuple[int, ...]] = Counter()
    fastest: dict[tuple[int, ...], int] = {}
    told = dict.fromkeys(state.bounds, best.ticks)
    actions, is_later = _MOST_ACTIONS * top, False
    while budget > 0 and seen.total() < _MOST_PLANS * top and not limits.should_stop():
        if not heap and not is_later:
            heap, is_later = later, True
        if not heap or _is_enough(
            fastest, top, heap[0].bound_ticks if actions > 0 else NO_LIMIT
        ):
            return
        one = heapq.heappop(heap)
        here = _degrees(one)
        if seen[here] >= _PER_DEGREES or _is_the_plan(one, best):
            continue
        if not is_later and (
            here == best.degrees or one.bound_ticks >= fastest.get(here, NO_LIMIT)
        ):
            later.append(one)
            continue
        while free.ceiling <= one.bound_ticks < NO_LIMIT:
            free.ceiling = next(ceilings)
        budget -= 1
        if not _is_ready(one):
            parts = (
                _again(free, one, told)
                or list(take_up(free, one))
                or _above(one, free.ceiling)
            )
            _push_all(heap, _nearest(free, parts))
            continue
        candidate = _candidate(one, free.ceiling, limits)
        if candidate is None and (above := _above(one, free.ceiling)):
            _push_all(heap, above)
            continue
        seen[here] += 1
        actions -= _actions(one)
        if candidate is not None:
            fastest[here] = min(candidate.ticks, fastest.get(here, candidate.ticks))
            yield candidate


def _again(free: State, one: Open, told: dict[tuple[int, ...], int]) -> list[Open]:
    """A part of a family of searched stage maps on several node groups that the search knew to be no faster than the
    plan, bounded again below the ceiling, if that tells more: to price it takes far longer.

    Args:
        free: tells the ceiling.
        one: what is to be taken up.
        told: below which ceiling parts were bounded, by their places; a part that is not there needs it no more.
    """
    family = one.item
    if not isinstance(family, Family) or family.ways_before is None or family.is_dealt:
        return []
    if free.ceiling == NO_LIMIT or told.get(one.order, NO_LIMIT) >= free.ceiling:
        return []
    told[one.order] = free.ceiling
    bound = bound_of(free.work, family, free.ceiling)
    return [replace(one, bound_ticks=bound)] if bound > one.bound_ticks else []


def _above(one: Open, ceiling: int) -> list[Open]:
    """What has no plan below a ceiling, to be looked at again above it: equation (A6)."""
    is_held = isinstance(one.item, Searched | DealtPerLayer) and ceiling < NO_LIMIT
    return [replace(one, bound_ticks=ceiling)] if is_held else []


def _is_enough(
    fastest: Mapping[tuple[int, ...], int], top: int, least_ticks: int
) -> bool:
    """So many degrees have plans that nothing of so many ticks is much faster than any of them: equation (A3)."""
    return (
        len(fastest) >= top and sorted(fastest.values())[top - 1] <= _MUCH * least_ticks
    )


def _nearest(state: State, parts: Iterable[Open]) -> Iterator[Open]:
    """Without those of other groups of ranks: equation (A4)."""
    return (
        part
        for part in parts
        if isinstance(part.item, Family) or part.order[:2] in state.nearest
    )


def _push_all(heap: list[Open], parts: Iterable[Open]) -> None:
    for part in parts:
        heapq.heappush(heap, part)


def _is_ready(one: Open) -> bool:
    """A single layout that needs no further bound."""
    match one.item:
        case Dealt(is_steady=is_steady):
            return is_steady
        case DealtPerLayer(stage_map=stage_map):
            return bool(stage_map)
        case Searched(is_tight=is_tight) | Unordered(is_tight=is_tight):
            return is_tight
    return False


def _actions(one: Open) -> int:
    """Forwards and backwards of a single layout's step."""
    assert isinstance(one.item, Searched | Dealt | DealtPerLayer | Unordered)
    costs = one.item.costs
    stages = (
        costs.layout.pipeline_parallel_degree * costs.layout.virtual_stages_per_rank
    )
    return 2 * stages * costs.micro_batches * costs.layout.sequence_chunks


def _candidate(one: Open, ceiling: int, limits: Limits) -> Candidate | None:
    """The plan of a single layout; None when none was found that fits, or below the ceiling where it is searched."""
    match one.item:
        case Dealt() as dealt:
            return dealt_candidate(dealt)
        case DealtPerLayer() as dealt:
            return per_layer_candidate(dealt)
        case Unordered() as unordered:
            return synthesized(
                unordered, limit_ticks=NO_LIMIT, each=_SYNTHESIS_WORK
            ).candidate
        case Searched(costs=costs, modes=modes):
            stop = limits.should_stop
            found = first_plan(
                costs,
                modes,
                one.bound_ticks,
                limit_ticks=ceiling,
                rounds=_ROUNDS,
                should_stop=stop,
            )
            return Candidate(costs, schedule_of(costs), *found) if found else None
    return None


def _is_the_plan(one: Open, best: Candidate) -> bool:
    return (
        isinstance(one.item, Searched | Dealt | DealtPerLayer | Unordered)
        and one.item.costs.layout == best.costs.layout
    )


def _degrees(one: Open) -> tuple[int, ...]:
    match one.item:
        case Family() as family:
            return family.degrees
        case Group() | Alike() as several:
            return several.family.degrees
        case (
            Searched(costs=costs)
            | Dealt(costs=costs)
            | DealtPerLayer(costs=costs)
            | Unordered(costs=costs)
        ):
            return degrees_of(costs.layout)
