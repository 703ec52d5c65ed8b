"""A plan at once, before anything is proven: equation (F6) of `planner.search.solve`."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from planner.cost import layout_costs, schedule_of
from planner.search.bounds.layout import Totals, lower_bound, may_fit, warm_ups
from planner.search.bounds.loads import portions, priced_bound
from planner.search.layouts.space import Family
from planner.search.result import Candidate
from planner.search.stage_maps.inside import first_plan
from planner.search.stage_maps.segments import choices
from planner.search.state import State

_LOOKED_AT = 16
"""Families whose linear bound is told."""
_POOR = 1.3
"""Bounds that a plan takes which is not worth keeping."""
_MOST_RANKS = 16
"""Of longer pipelines a stage map takes long to find."""
_TRIED = 4
"""Degrees with the least bounds for which a stage map is looked for."""


def is_poor(state: State) -> bool:
    """Is there no plan yet, or one so slow, measured by the least bound, that better ones must be easy to find?"""
    return state.is_open and state.limit_ticks > _POOR * state.heap[0].bound_ticks


def dive_on_groups(state: State, like: Family | None = None) -> Family | None:
    """On several node groups: stage maps of the layouts with the least linear bounds.

    Args:
        state: of a search that begins; a better plan becomes its best.
        like: only families of its degrees and micro-batches.

    Returns:
        The family whose plan was taken; None where none was, or where the state's part is a single node group.
    """
    if not state.work.groups:
        return None
    families = [
        one.item
        for one in sorted(state.heap)
        if isinstance(one.item, Family) and not one.item.is_dealt
    ]
    short = [each for each in families if each.pipeline <= _MOST_RANKS]
    chosen = [each for each in short if like is None or _key(each) == _key(like)][
        :_LOOKED_AT
    ]
    bounded = (one for each in chosen for one in _parts(state, each))
    winner = None
    least: dict[tuple[int, ...], tuple[int, Family]] = {}
    for bound, part in sorted(bounded, key=itemgetter(0)):
        least.setdefault(part.degrees, (bound, part))
    for bound, part in list(least.values())[:_TRIED]:
        if (
            state.seconds_left() > 0
            and bound < state.limit_ticks
            and _found(state, part)
        ):
            winner = part
    return winner


def _parts(state: State, family: Family) -> Iterator[tuple[int, Family]]:
    if state.seconds_left() > 0:
        yield from portions(state.work, family, state.limit_ticks)


def _key(family: Family) -> tuple[object, ...]:
    return family.split, family.degrees, family.standing.rank_orders


def _found(state: State, part: Family) -> bool:
    """Was a plan found that beats the limit?"""
    order = part.orders[-1]
    is_better = False
    for zero in part.leanest:
        costs = layout_costs(state.work, part.layout(zero, order))
        modes = choices(costs, state.wish)
        totals, units = Totals.of(costs, modes), warm_ups(costs)
        if not may_fit(costs, totals, units):
            continue
        bound = max(
            lower_bound(costs, totals, units),
            priced_bound(costs, modes, state.limit_ticks),
        )
        found = (
            first_plan(costs, modes, bound, limit_ticks=state.limit_ticks)
            if bound < state.limit_ticks
            else None
        )
        if found is not None:
            state.take(Candidate(costs, schedule_of(costs), *found))
            is_better = True
    return is_better
