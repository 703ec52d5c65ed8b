"""Classes of orders: layouts of a family that recompute and split their backwards in one way, of which bounds know more
than of all together.

    searched    gpipe and 1f1b: one stage per rank, and full backwards
    per layer   dealt, with full backwards that recompute layer by layer
    alike       dealt, with full backwards; all layers recompute alike
    split       dealt, with split backwards, which do not recompute

Orders that are made for their stages may be of any: theirs is the least bound of all. They count as a class besides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from planner.cost.nearest import Split
from planner.search.orders import SYNTHESIZED, Order, splits_backward
from planner.search.space import Family
from planner.search.state import Open, State

SEARCHED, PER_LAYER, ALIKE, SPLIT = range(4)
CLASSES = 4
_ANY = 4
"""An order that may be of each."""
_APART = 1 << 32
"""Between the places of a family's classes in the enumeration: families are fewer."""
FamilyBounds = Mapping[tuple[Split, int, int], tuple[float, ...]]
"""Ticks by split, sequence chunks and pipeline ranks; of every class."""


def class_of(order: Order) -> int:
    """Which class an order is of."""
    if order.schedule == SYNTHESIZED:
        return _ANY
    if not order.is_dealt:
        return SEARCHED
    if order.recompute == "per-layer":
        return PER_LAYER
    return SPLIT if splits_backward(order.schedule) else ALIKE


def raise_bounds(state: State, least: FamilyBounds) -> None:
    """Families that are not opened yet take no less than is known of them, class by class; what does not fit is closed.

    Args:
        state: of the search over a part.
        least: of its families.
    """
    families = [(one, one.item) for one in state.heap if isinstance(one.item, Family)]
    others = [one for one in state.heap if not isinstance(one.item, Family)]
    state.heap.clear()
    for one, family in families:
        state.bounds.pop(one.order, None)
        for part in _by_class(one, family, least, state.limit_ticks):
            state.push(part)
    for one in others:
        state.push(one)


def _by_class(one: Open, family: Family, least: FamilyBounds, limit_ticks: int) -> Iterator[Open]:
    """What may beat the limit together, for it is opened once; what may not, class by class."""
    ticks = least.get((family.split, family.sequence_chunks, family.pipeline), (0.0,) * CLASSES)
    bounds = (*ticks, min(ticks))
    kinds = [class_of(order) for order in family.orders]
    near = {kind for kind in kinds if bounds[kind] < limit_ticks}
    apart = sorted(set(kinds) - near)
    for place, together in ((0, near), *((1 + kind, {kind}) for kind in apart)):
        orders = tuple(order for order, kind in zip(family.orders, kinds, strict=True) if kind in together)
        bound = min((bounds[kind] for kind in together), default=math.inf)
        if orders and bound < math.inf:
            is_all = len(orders) == len(family.orders)
            part, at = (family, one.order) if is_all else (replace(family, orders=orders), _at(one, place))
            yield replace(one, bound_ticks=max(one.bound_ticks, int(bound)), order=at, item=part)


def _at(one: Open, place: int) -> tuple[int, ...]:
    return (one.order[0] + place * _APART,)
