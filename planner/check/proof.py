"""The search's report, and the other plans that a plan names.

That no faster plan exists is proven by the search; here its figures are checked against
each other: a lower bound below the step, the gap, counts of layouts, and alternatives,
Pareto points and relaxations that are valid layouts of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import inf

from planner.check.context import Context
from planner.check.report import Findings
from planner.check.structure import check_degrees, check_division
from planner.spec.plan import Alternative, ParetoPoint, Plan

OPTIMAL_GAP = 1e-6
ROUNDING = 1e-9


def check_search(plan: Plan, findings: Findings) -> None:
    """Check the bound, the gap, and that only a closed gap is called optimal."""
    search, step = plan.search, plan.prediction.step_seconds
    bound = search.lower_bound_seconds
    holds = bound <= step * (1 + ROUNDING)
    rule = f"a bound is not above the step of {step!r}"
    findings.rule("search.lower_bound_seconds", bound, holds, rule)
    findings.close("search.gap", search.gap, (step - bound) / step)
    holds = search.gap <= OPTIMAL_GAP or not search.optimal
    rule = f"its gap is {search.gap}"
    findings.rule("search.optimal", search.optimal, holds, rule)
    done = search.layouts_pruned + search.layouts_solved
    considered = search.layouts_considered
    least = done if search.optimal else considered
    rule = f"{done} were pruned or solved"
    holds = done <= considered <= least
    findings.rule("search.layouts_considered", considered, holds, rule)
    job, groups = plan.request.job, plan.request.cluster.node_groups
    if job.objective == "step_time" and len(groups) == 1:
        findings.equal("search.clusters_considered", search.clusters_considered, 1)
    findings.checked.append(
        "the search's bound, gap and counts agree with each other and with the step"
    )


def check_alternatives(plan: Plan, context: Context, findings: Findings) -> None:
    """Check that alternatives are valid and in order.

    Only an unsupported one may be faster than the plan; it comes after the others.
    """
    step = fastest = plan.prediction.step_seconds
    for position, other in enumerate(plan.alternatives):
        where, seconds = f"alternatives[{position}]", other.step_seconds
        if other.supported:
            holds = seconds >= fastest * (1 - ROUNDING)
            rule = f"it comes after {fastest!r}"
            findings.rule(f"{where}.step_seconds", seconds, holds, rule)
            fastest = max(fastest, seconds)
        is_last = position == len(plan.alternatives) - 1
        rule = "an unsupported alternative comes last"
        holds = other.supported or is_last
        findings.rule(f"{where}.supported", other.supported, holds, rule)
        findings.close(f"{where}.slowdown", other.slowdown, seconds / step - 1)
        _check_other(where, other, context.possible_devices, context, findings)
    findings.checked.append(
        "alternatives are valid layouts, in order, no supported one faster than the plan"
    )


def _check_other(
    where: str,
    other: Alternative | ParetoPoint,
    devices: set[int],
    context: Context,
    findings: Findings,
) -> None:
    """Check that another plan has the batch and the layers of the model, and fits."""
    layout, counts = other.layout, other.layers_per_stage
    count = other.micro_batches
    check_degrees(where, layout, count, devices, context, findings)
    stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
    findings.equal(f"{where}.layers_per_stage: stages", len(counts), stages)
    check_division(f"{where}.layers_per_stage", counts, context, findings)
    peak, capacity = other.peak_bytes, context.largest_capacity_bytes
    rule = f"{capacity} bytes are free"
    findings.rule(f"{where}.peak_bytes", peak, peak <= capacity, rule)


def check_answers(plan: Plan, context: Context, findings: Findings) -> None:
    """Check deadline, price, Pareto front, relaxed limits and sensitivity."""
    step, deadline = plan.prediction.step_seconds, context.job.deadline_seconds
    holds = step <= (deadline or inf) * (1 + ROUNDING)
    rule = f"it is after the deadline of {deadline!r}"
    findings.rule("prediction.step_seconds", step, holds, rule)
    hourly = 0.0
    is_known = True
    for group in context.groups.values():
        each = group.whole.device_price_per_hour
        hourly += group.devices * (each or 0.0)
        is_known = is_known and each is not None
    where, stated = "cost_per_token", plan.cost_per_token
    prices = [hourly if is_known else None]
    _check_price(where, stated, step, prices, context, findings)
    _check_pareto(plan, context, findings)
    _check_relaxations(plan, context, findings)
    _check_sensitivity(plan, findings)
    findings.checked.append(
        "price, deadline, Pareto front, relaxed limits and sensitivity agree with the "
        "plan"
    )


def _check_price(
    where: str,
    stated: float | None,
    step: float,
    hourly: Sequence[float | None],
    context: Context,
    findings: Findings,
) -> None:
    """Check that the price of a token is one of the devices' prices, or in between.

    Args:
        where: field of the price.
        stated: price of a token; None: some device has no price.
        step: seconds.
        hourly: prices of all devices, for every kind that they may be of.
        context: of the plan.
        findings: problems are added here.
    """
    per_token = step / 3600 / context.tokens
    known = [price * per_token for price in hourly if price is not None]
    nearest = None
    if stated is not None and known:
        nearest = min(max(stated, min(known)), max(known))
    if stated is not None or len(known) == len(hourly):
        findings.close(where, stated, nearest, ROUNDING, 0.0)
    if stated is None and len(known) == len(hourly):
        findings.rule(where, stated, False, "the devices have a price")


def _check_pareto(plan: Plan, context: Context, findings: Findings) -> None:
    """Check that points are valid plans, of which none is as good as another."""
    prices = [group.device_price_per_hour for group in context.cluster.node_groups]
    for position, point in enumerate(plan.pareto):
        where, devices = f"pareto[{position}]", point.devices
        holds = devices <= context.cluster.devices
        rule = f"the cluster has {context.cluster.devices}"
        findings.rule(f"{where}.devices", devices, holds, rule)
        _check_other(where, point, {devices}, context, findings)
        hourly = [None if price is None else price * devices for price in prices]
        where, stated = f"{where}.cost_per_token", point.cost_per_token
        _check_price(where, stated, point.step_seconds, hourly, context, findings)
    for (place, one), (worse, other) in permutations(enumerate(plan.pareto), 2):
        is_slower = other.step_seconds < one.step_seconds
        is_smaller = other.devices < one.devices or other.peak_bytes < one.peak_bytes
        rule = f"pareto[{place}] is as good or better in everything"
        where = f"pareto[{worse}]"
        findings.rule(where, other.step_seconds, is_slower or is_smaller, rule)


def _check_relaxations(plan: Plan, context: Context, findings: Findings) -> None:
    """Check that relaxed limits gain what the step says, unless the batch changes."""
    for position, one in enumerate(plan.relaxations):
        where = f"relaxations[{position}].gain"
        gain = 1 - one.step_seconds / plan.prediction.step_seconds
        if one.constraint != "global_batch_size":
            findings.close(where, one.gain, gain)
        holds = one.gain is not None and one.gain > 0
        findings.rule(where, one.gain, holds, "a relaxation gains something")
        where = f"relaxations[{position}].layout: product of the degrees"
        devices = one.layout.devices
        possible = {one.devices} if one.devices else context.possible_devices
        findings.rule(where, devices, devices in possible, f"use {possible} devices")


def _check_sensitivity(plan: Plan, findings: Findings) -> None:
    """Check that changes are in order, of alternatives, and match the verdict."""
    for position, one in enumerate(plan.sensitivity):
        where = f"sensitivity[{position}]"
        changes = [abs(each.change) for each in one.overtakes]
        others = [each.alternative for each in one.overtakes]
        is_known = all(other < len(plan.alternatives) for other in others)
        holds = is_known and changes == sorted(changes)
        rule = "they are alternatives in the order of their changes"
        findings.rule(f"{where}.overtakes", others, holds, rule)
        holds = all(change > one.uncertainty for change in changes)
        findings.equal(f"{where}.holds", one.holds, holds)
