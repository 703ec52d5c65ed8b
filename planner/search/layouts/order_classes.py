"""Classes of orders: layouts of a family that recompute and split their backwards in one way, of which bounds know more
than of all together.

    searched    gpipe and 1f1b: one stage per rank, and full backwards
    per layer   dealt, with full backwards that recompute layer by layer
    alike       dealt, with full backwards; all layers recompute alike
    split       dealt, with split backwards, which do not recompute

    made        made for their stages: they may hold less than any schedule, so that less is known of them
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.nearest import Split
from planner.search.layouts.orders import SYNTHESIZED, Order, splits_backward
from planner.search.layouts.space import Family
from planner.search.state import Alike, Group, Open, State

SEARCHED, PER_LAYER, ALIKE, SPLIT, MADE = range(5)
CLASSES = 5
_STAGES = 3
_APART = 1 << 32
"""Between the places of a family's classes in the enumeration: families are fewer."""
FamilyBounds = Mapping[tuple[Split, int, int], NDArray[np.float64]]
"""Ticks by split, sequence chunks and pipeline ranks: [ZeRO stages (0 and 1, 2, 3), class]."""


def class_of(order: Order) -> int:
    """Which class an order is of."""
    if order.schedule == SYNTHESIZED:
        return MADE
    if not order.is_dealt:
        return SEARCHED
    if order.recompute == "per-layer":
        return PER_LAYER
    return SPLIT if splits_backward(order.schedule) else ALIKE


def raise_bounds(state: State, least: FamilyBounds) -> None:
    """Families take no less than is known of them, class by class; what does not fit is closed. Of those that are
    opened, it counts for groups of layouts.

    Args:
        state: of the search over a part.
        least: of its families.
    """
    known = state.heap.copy()
    state.heap.clear()
    for one in known:
        if one.bound_ticks >= state.limit_ticks:
            state.push(one)
        elif isinstance(one.item, Family):
            state.bounds.pop(one.order, None)
            for part in _by_class(one, one.item, least, state.limit_ticks):
                state.push(part)
        else:
            state.push(
                replace(one, bound_ticks=max(one.bound_ticks, _least_of(one, least)))
            )


def _least_of(one: Open, least: FamilyBounds) -> int:
    """Ticks that no layout of a group takes less than; 0 where nothing is known."""
    match one.item:
        case Group(family=family, zero=zero):
            orders = family.orders
        case Alike(orders=orders, group=Group(family=family, zero=zero)):
            pass
        case _:
            return 0
    known = least.get(_key(family))
    ticks = (
        np.inf
        if known is None
        else known[_stages_of(zero.stage), list(set(map(class_of, orders)))].min()
    )
    return int(ticks) if ticks < np.inf else 0


def _key(family: Family) -> tuple[Split, int, int]:
    return family.split, family.sequence_chunks, family.pipeline


def _by_class(
    one: Open, family: Family, least: FamilyBounds, limit_ticks: int
) -> Iterator[Open]:
    """What may beat the limit together, for it is opened once; what may not, ZeRO stages before classes, by itself."""
    ticks = least.get(_key(family), np.zeros((_STAGES, CLASSES)))
    stages = frozenset(_stages_of(zero.stage) for zero in family.zeros)
    kinds = frozenset(map(class_of, family.orders))
    near_stages = frozenset(
        stage for stage in stages if ticks[stage, list(kinds)].min() < limit_ticks
    )
    near_kinds = frozenset(
        kind
        for kind in kinds
        if ticks[list(near_stages), kind].min(initial=np.inf) < limit_ticks
    )
    for mine, some in (
        (near_stages, near_kinds),
        (stages - near_stages, kinds),
        (near_stages, kinds - near_kinds),
    ):
        bound = ticks[np.ix_(sorted(mine), sorted(some))].min(initial=np.inf)
        if bound < np.inf:
            is_near = bound < limit_ticks or (mine, some) == (stages, kinds)
            part = (
                family if (mine, some) == (stages, kinds) else _part(family, mine, some)
            )
            order = one.order if is_near else _apart(one, mine, some)
            yield replace(
                one,
                bound_ticks=max(one.bound_ticks, int(bound)),
                order=order,
                item=part,
            )


def _part(family: Family, stages: Collection[int], kinds: Collection[int]) -> Family:
    return replace(
        family,
        zeros=tuple(zero for zero in family.zeros if _stages_of(zero.stage) in stages),
        orders=tuple(order for order in family.orders if class_of(order) in kinds),
    )


def _stages_of(zero_stage: int) -> int:
    """ZeRO 0 and 1 hold and exchange alike as far as bounds know."""
    return max(0, zero_stage - 1)


def _apart(
    one: Open, stages: Collection[int], kinds: Collection[int]
) -> tuple[int, ...]:
    """A place of its own in the enumeration, for what no other part of the family is."""
    number = sum(1 << (stage * CLASSES + kind) for stage in stages for kind in kinds)
    return (one.order[0] + number * _APART,)
