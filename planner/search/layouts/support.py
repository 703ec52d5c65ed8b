"""Limits of the job's runtime on the space of layouts: equation (D16)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from planner.cost import Workload
from planner.errors import UnsupportedError
from planner.search.layouts.orders import Order
from planner.spec.layout import RecomputeWord, ZeroStage

if TYPE_CHECKING:
    from planner.search.layouts.space import Family, Zero

_JOB_FIELDS = ("precision", "optimizer")


def check_job(work: Workload) -> None:
    """Refuse a job that no export for its runtime expresses.

    Raises:
        UnsupportedError: names the field, and the values that the runtime supports.
    """
    supports = work.framework.supports
    for field in _JOB_FIELDS:
        values = supports.planned.get(field)
        value = getattr(work.job, field)
        if values is not None and value not in values:
            raise UnsupportedError(
                f"plans for the runtime {work.framework.name} do not support {field} {value}.",
                field=f"job.{field}",
                hint=f"use {' or '.join(map(str, values))}, or another runtime.",
            )


def recomputing(
    orders: tuple[Order, ...],
    words: Collection[RecomputeWord],
    supported_words: Collection[object],
) -> tuple[Order, ...]:
    """Return the orders with modes of recomputation that the runtime supports.

    Without ``per-layer``, an order whose modes are searched layer by layer becomes one
    order for each mode of all layers.
    """
    if "per-layer" in supported_words:
        return tuple(one for one in orders if one.recompute in supported_words)
    modes = [word for word in words if word in supported_words]
    found = []
    for order in orders:
        if order.is_dealt:
            found += [order] if order.recompute in modes else []
        else:
            found += [replace(order, recompute=mode) for mode in modes]
    return tuple(dict.fromkeys(found))


def supported(family: Family, work: Workload) -> Family:
    """Return the family without ZeRO stages and orders that the runtime lacks.

    No rule of a runtime combines fields of the two.
    """
    supports = work.framework.supports

    @cache
    def runs(stage: ZeroStage, has_groups: bool, schedule: str, virtual: int) -> bool:
        zero = next(
            each
            for each in family.zeros
            if (each.stage, each.shards is not None) == (stage, has_groups)
        )
        order = Order(schedule, virtual, "none")
        layout = family.layout(zero, order)
        return supports.violation(layout, work.job) is None

    def runs_together(zero: Zero, order: Order) -> bool:
        has_groups = zero.shards is not None
        return runs(zero.stage, has_groups, order.schedule, order.virtual_stages)

    zeros = [
        zero
        for zero in family.zeros
        if any(runs_together(zero, order) for order in family.orders)
    ]
    orders = [
        order
        for order in family.orders
        if any(runs_together(zero, order) for zero in zeros)
    ]
    return replace(family, zeros=tuple(zeros), orders=tuple(orders))
