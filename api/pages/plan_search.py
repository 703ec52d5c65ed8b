"""What the search says about a plan: the proof, the next best, how sure the choice is, and how near a miss was."""

from __future__ import annotations

from collections.abc import Sequence

from planner.api.pages.html import Element, Node, bullets, table, tag
from planner.spec import Plan
from planner.spec.layout_words import layout_line
from planner.spec.plan import Miss, ParetoPoint, Relaxation, SearchReport, Sensitivity
from planner.spec.units import gibibytes, percent, seconds
from planner.spec.words import counted


def proof(search: SearchReport) -> str:
    """Proven, or how far from it."""
    if search.optimal:
        return f"optimal, proven: {counts(search)}"
    bound = seconds(search.lower_bound_seconds)
    return f"not proven: no plan is faster than {bound}, gap {percent(search.gap)}; {counts(search)}"


def counts(search: SearchReport) -> str:
    """What became of the layouts."""
    left = search.layouts_considered - search.layouts_pruned - search.layouts_solved
    parts = (
        f" of {search.clusters_considered} parts of the cluster"
        if search.clusters_considered > 1
        else ""
    )
    return (
        f"{counted(search.layouts_considered, 'layout')}{parts} considered, {search.layouts_pruned} pruned by their "
        f"bound, {search.layouts_solved} solved{f', {left} left open' if left else ''}, in {seconds(search.seconds)}"
    )


def alternatives(plan: Plan) -> Element:
    """Layouts in the order of their steps, each with where it loses."""
    if not plan.alternatives:
        return tag("p", "None was asked for, or there is no other.")
    rows = [
        (
            layout_line(each.layout),
            seconds(each.step_seconds),
            f"+{percent(each.slowdown)}",
            gibibytes(each.peak_bytes),
            each.reason,
        )
        for each in plan.alternatives
    ]
    head = ("Layout", "Step", "Slower by", "Fullest device", "Where it loses")
    return table("The best plans of other layouts", head, rows, numbers=(1, 2, 3))


def sensitivity(plan: Plan) -> Element | None:
    """What errors of the inputs mean for the choice."""
    if not plan.sensitivity:
        return None
    head = (
        "Quantity",
        "Expected error",
        "Where that comes from",
        "The choice",
        "Who would win",
    )
    rows = [_quantity(each) for each in plan.sensitivity]
    return table(
        "How wrong an input may be before another layout is as fast",
        head,
        rows,
        numbers=(1,),
    )


def _quantity(each: Sensitivity) -> tuple[Node, ...]:
    winners: Node = (
        bullets(
            f"alternative {one.alternative + 1} from {one.change:+.0%} on"
            for one in each.overtakes
        )
        if each.overtakes
        else "none within a factor of four"
    )
    holds = "holds" if each.holds else tag("strong", "may change")
    return (
        each.quantity.replace("_", " "),
        percent(each.uncertainty),
        each.reason,
        holds,
        winners,
    )


def pareto(plan: Plan) -> Element | None:
    """Step time against devices, memory and price."""
    if not plan.pareto:
        return None
    priced = any(point.cost_per_token is not None for point in plan.pareto)
    head = (
        "Devices",
        "Step",
        "Fullest device",
        *(("Price of 1M",) if priced else ()),
        "Layout",
        "",
    )
    caption = "Nothing is faster on as few devices with as little memory"
    rows = [_point(point, plan, priced=priced) for point in plan.pareto]
    return table(caption, head, rows, numbers=range(4 if priced else 3))


def _point(point: ParetoPoint, plan: Plan, *, priced: bool) -> tuple[Node, ...]:
    is_plan = (point.layout, point.step_seconds) == (
        plan.layout,
        plan.prediction.step_seconds,
    )
    price = "" if point.cost_per_token is None else f"{point.cost_per_token * 1e6:.4g}"
    return (
        str(point.devices),
        seconds(point.step_seconds),
        gibibytes(point.peak_bytes),
        *((price,) if priced else ()),
        layout_line(point.layout),
        tag("strong", "this plan") if is_plan else "",
    )


def relaxations(found: Sequence[Relaxation]) -> Element | None:
    """What would be gained by other limits."""
    if not found:
        return None
    rows = [
        (
            each.change,
            each.constraint.replace("_", " "),
            seconds(each.step_seconds),
            "a plan at all" if each.gain is None else percent(each.gain),
            layout_line(each.layout),
            "proven" if each.optimal else "found, not proven",
        )
        for each in found
    ]
    head = ("Change", "Limit", "Step", "Gain per sample", "Layout", "Best with it")
    return table("The best plans under other limits", head, rows, numbers=(2, 3))


def misses(nearest: Sequence[Miss]) -> Element:
    """Layouts that nearly fit, and by how much they miss."""
    rows = [
        (
            layout_line(miss.layout),
            str(miss.pipeline_rank),
            miss.memory,
            gibibytes(miss.needed_bytes),
            gibibytes(miss.capacity_bytes),
            gibibytes(miss.missing_bytes),
        )
        for miss in nearest
    ]
    head = ("Layout", "Pipeline rank", "Memory of", "Needed", "Capacity", "Too much")
    return table(
        "The least that each layout needs, whatever its stages and recompute",
        head,
        rows,
        numbers=(1, 3, 4, 5),
    )
