"""Results of the search: proof, alternatives, sensitivity, relaxations, near misses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.api.pages.html import Element, Node, bullets, table, tag
from planner.spec import Plan
from planner.spec.layout_words import layout_line
from planner.spec.plan import Miss, ParetoPoint, Relaxation, SearchReport, Sensitivity
from planner.spec.search_words import (
    change_text,
    cuts_text,
    searched_sentence,
    space_rows,
)
from planner.spec.units import gibibytes, percent, seconds
from planner.spec.words import counted


def proof(search: SearchReport) -> str:
    """Whether the plan is proven optimal, and the remaining gap."""
    if search.optimal:
        return f"optimal, proven: {counts(search)}"
    bound = seconds(search.lower_bound_seconds)
    gap = percent(search.gap)
    return f"not proven: lower bound {bound}, gap {gap}; {counts(search)}"


def counts(search: SearchReport) -> str:
    """How many layouts were considered, pruned and solved, and the search time."""
    left = search.layouts_considered - search.layouts_pruned - search.layouts_solved
    considered = counted(search.layouts_considered, "layout")
    if search.clusters_considered > 1:
        considered += f" on {search.clusters_considered} sub-clusters"
    numbers = [
        f"{considered} considered",
        f"{search.layouts_pruned} pruned by a bound",
        f"{search.layouts_solved} solved",
    ]
    if left:
        numbers.append(f"{left} open")
    cuts = cuts_text(search)
    if cuts:
        numbers.append(cuts)
    return f"{', '.join(numbers)}, in {seconds(search.seconds)}"


def space(search: SearchReport) -> tuple[Element, ...]:
    """What was searched and left out: a sentence, and a table by dimension."""
    if not search.space:
        return ()
    head = ("Dimension", "Searched", "Left out")
    caption = "Values that are combined, and values that are left out with the reason"
    sentence = f"Searched: {searched_sentence(search)}."
    return tag("p", sentence), table(caption, head, space_rows(search))


def alternatives(plan: Plan) -> Element:
    """The best plans of other layouts, fastest first."""
    if not plan.alternatives:
        return tag("p", "None requested, or there is no other layout.")
    rows = [
        (
            layout_line(each.layout),
            seconds(each.step_seconds),
            change_text(each),
            gibibytes(each.peak_bytes),
            each.reason,
        )
        for each in plan.alternatives
    ]
    head = ("Layout", "Step", "Change", "Peak memory", "Reason")
    return table("The best plans of other layouts", head, rows, numbers=(1, 2, 3))


def sensitivity(plan: Plan) -> Element | None:
    """How errors of the inputs would change the choice."""
    if not plan.sensitivity:
        return None
    head = (
        "Quantity",
        "Expected error",
        "Source",
        "Choice",
        "Overtaken by",
    )
    rows = [_quantity(each) for each in plan.sensitivity]
    return table(
        "Errors of the inputs at which another layout is as fast",
        head,
        rows,
        numbers=(1,),
    )


def _quantity(each: Sensitivity) -> tuple[Node, ...]:
    winners: Node = (
        bullets(
            f"alternative {one.alternative + 1} at {one.change:+.0%}"
            for one in each.overtakes
        )
        if each.overtakes
        else "none within a factor of four"
    )
    choice = "unchanged" if each.holds else tag("strong", "may change")
    return (
        each.quantity.replace("_", " "),
        percent(each.uncertainty),
        each.reason,
        choice,
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
        "Peak memory",
        *(("Price per million",) if priced else ()),
        "Layout",
        "",
    )
    caption = "Fastest plans by number of devices and memory"
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
    """The best plans under relaxed limits."""
    if not found:
        return None
    rows = [
        (
            each.change,
            each.constraint.replace("_", " "),
            seconds(each.step_seconds),
            "fits" if each.gain is None else percent(each.gain),
            layout_line(each.layout),
            "proven" if each.optimal else "not proven",
        )
        for each in found
    ]
    head = ("Change", "Limit", "Step", "Gain per sample", "Layout", "Optimal")
    return table("The best plans under relaxed limits", head, rows, numbers=(2, 3))


def fitting(found: Sequence[Relaxation]) -> Iterator[str]:
    """``Fits on 128 GPUs: 185 s``, for every larger cluster on which a layout fits."""
    for each in found:
        if each.devices is not None:
            yield f"Fits on {each.devices} GPUs: {seconds(each.step_seconds)}"


def misses(nearest: Sequence[Miss]) -> Element:
    """The layouts that come closest, and the memory that they lack."""
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
    head = ("Layout", "Pipeline rank", "Memory", "Needed", "Capacity", "Missing")
    return table(
        "Minimum memory of each layout, with any stages and recompute",
        head,
        rows,
        numbers=(1, 3, 4, 5),
    )
