"""Which layouts come nearest to fitting, where none fits."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from planner.cost import LayoutCosts, Workload, layout_costs
from planner.cost.groups import groups_of
from planner.cost.layers import priced
from planner.search.layouts.offloading import NOTHING
from planner.search.layouts.space import Family, Space
from planner.spec.layout import Layout

_NEAREST = 8
"""Families among which the nearest misses are looked for, of those that offload nothing and of those that do."""


def unfit(work: Workload, space: Space) -> Iterator[LayoutCosts]:
    """Layouts among which the nearest miss is: of the families that need least when all is spread evenly, some that
    offload nothing and some that do."""
    even: list[tuple[float, int, Family]] = []
    for family in space.families:
        order = next((one for one in family.orders if not one.is_dealt), None)
        if order is not None:
            costs = _alike(work, family.layout(family.leanest[0], order))
            even.append((_even_share(costs), len(even), family))
    on_device, on_host = ([one for one in even if (one[2].offloading != NOTHING) is host] for host in (False, True))
    for _, _, family in (*heapq.nsmallest(_NEAREST, on_device), *heapq.nsmallest(_NEAREST, on_host)):
        for zero in reversed(family.leanest):
            costs = layout_costs(work, family.layout(zero, family.orders[0]))
            for order in family.orders:
                if not order.is_dealt:
                    yield costs.under(family.layout(zero, order))


def _alike(work: Workload, layout: Layout) -> LayoutCosts:
    """As if all ranks were alike: where replicas have unequal shares, bytes are the same and priced far sooner."""
    if work.groups or len(set(layout.micro_batch_shares or ())) < 2:
        return layout_costs(work, layout)
    return priced(work, layout, groups_of(layout, work.domain_devices))


def _even_share(costs: LayoutCosts) -> float:
    """Bytes per device if everything were spread evenly: a cheap order of how near layouts come."""
    ogp = sum(min(cost.ogp_bytes for cost in options.values()) for options in costs.layers)
    activations = max(min(cost.activation_bytes for cost in options.values()) for options in costs.layers)
    return ogp / costs.layout.pipeline_parallel_degree + activations
