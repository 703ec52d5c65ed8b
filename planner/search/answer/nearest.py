"""Which layouts come nearest to fitting, where none fits."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from operator import itemgetter

from planner.cost import LayoutCosts, Workload, choose, layout_costs, stage_memory
from planner.cost.groups import groups_of
from planner.cost.layers import priced
from planner.search.bounds.layout import BOUNDED
from planner.search.bounds.steady_state import holding
from planner.search.engine.offloading import NOTHING
from planner.search.layouts.orders import SYNTHESIZED, Order, recompute_wish
from planner.search.layouts.space import Family, Space
from planner.search.result import Found
from planner.search.stage_maps.dealt import ranks_of
from planner.search.stage_maps.dealt_on_groups import uniform
from planner.search.stage_maps.inside import LeastMemory, least_memory
from planner.search.stage_maps.segments import choices, uniform_modes
from planner.spec.layout import Layout
from planner.spec.plan import Miss

_MOST_KEPT = ("none", "selective", "full")
"""Modes of recomputation, what keeps most first."""
MOST_MISSES = 3
_NEAREST = 8
"""Families among which the nearest misses are looked for, of those that offload nothing and of those that do."""


def unfit(work: Workload, space: Space) -> Iterator[LayoutCosts]:
    """Layouts among which the nearest miss is: of the families that need least when all is spread evenly, some that
    offload nothing and some that do; dealt ones where there are no others."""
    even: list[tuple[float, int, Family]] = []
    is_dealt = all(
        order.is_dealt for family in space.families for order in family.orders
    )
    for family in space.families:
        order = next(iter(_leanest(family, is_dealt=is_dealt)), None)
        if order is not None:
            costs = _alike(work, family.layout(family.leanest[0], order))
            even.append((_even_share(costs), len(even), family))
    on_device, on_host = (
        [one for one in even if (one[2].offloading != NOTHING) is host]
        for host in (False, True)
    )
    for _, _, family in (
        *heapq.nsmallest(_NEAREST, on_device),
        *heapq.nsmallest(_NEAREST, on_host),
    ):
        for zero in reversed(family.leanest):
            costs = layout_costs(work, family.layout(zero, family.orders[0]))
            for order in _leanest(family, is_dealt=is_dealt):
                yield costs.under(family.layout(zero, order))


def _leanest(family: Family, *, is_dealt: bool) -> list[Order]:
    """Orders of searched stage maps; or the dealt ones that recompute most, and whose order is known."""
    if not is_dealt:
        return [order for order in family.orders if not order.is_dealt]
    plain = [
        order
        for order in family.orders
        if order.recompute in _MOST_KEPT and order.schedule != SYNTHESIZED
    ]
    most = max((_MOST_KEPT.index(order.recompute) for order in plain), default=0)
    return [order for order in plain if order.recompute == _MOST_KEPT[most]]


def least_need(costs: LayoutCosts, wish: Sequence[str]) -> LeastMemory:
    """What a layout needs at least of devices and hosts: under any stage map, or as its layers are dealt."""
    if costs.layout.schedule in BOUNDED:
        return least_memory(costs, choices(costs, wish))
    layers, own = (
        uniform(costs, uniform_modes(costs, costs.layout.recompute)),
        costs.of_replica,
    )
    rows = stage_memory(
        own, choose(own, layers.stage_map(layers.dealt(ranks_of(costs)))), holding(own)
    )
    over = max(rows, key=lambda row: row.peak_bytes - row.capacity_bytes)
    hosted = [
        (row.host_bytes - row.host_capacity_bytes, row)
        for row in rows
        if row.host_capacity_bytes is not None
    ]
    lacking, there = max(hosted, key=itemgetter(0), default=(0, over))
    if lacking > over.peak_bytes - over.capacity_bytes:
        return LeastMemory(
            there.pipeline_rank, there.host_bytes, there.host_bytes - lacking, "host"
        )
    return LeastMemory(over.pipeline_rank, over.peak_bytes, over.capacity_bytes)


def _alike(work: Workload, layout: Layout) -> LayoutCosts:
    """As if all ranks were alike: where replicas have unequal shares, bytes are the same and priced far sooner."""
    if work.groups or len(set(layout.micro_batch_shares or ())) < 2:
        return layout_costs(work, layout)
    return priced(work, layout, groups_of(layout, work.domain_devices))


def _even_share(costs: LayoutCosts) -> float:
    """Bytes per device if everything were spread evenly: a cheap order of how near layouts come."""
    ogp = sum(
        min(cost.ogp_bytes for cost in options.values()) for options in costs.layers
    )
    activations = max(
        min(cost.activation_bytes for cost in options.values())
        for options in costs.layers
    )
    return ogp / costs.layout.pipeline_parallel_degree + activations


def misses(found: Found) -> tuple[Miss, ...]:
    """The layouts that come nearest to fitting, and by how much each misses."""
    near = [
        miss for miss in map(_miss, found.unfit) if miss.missing_bytes > 0
    ]  # a stopped search may have missed a plan
    return tuple(sorted(near, key=lambda miss: miss.missing_bytes)[:MOST_MISSES])


def _miss(costs: LayoutCosts) -> Miss:
    wish = recompute_wish(costs.work.job.constraints.get("recompute"))
    least = least_need(costs, wish)
    return Miss(
        layout=costs.layout,
        pipeline_rank=least.pipeline_rank,
        needed_bytes=least.needed_bytes,
        capacity_bytes=least.capacity_bytes,
        missing_bytes=least.needed_bytes - least.capacity_bytes,
        memory=least.memory,
    )
