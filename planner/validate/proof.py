"""Is the search's report consistent with the plan, and is every alternative a slower, valid layout?

That no faster plan exists is the search's own proof; here only its numbers are held against each other.
"""

from __future__ import annotations

from planner.spec.layout import Layout
from planner.spec.plan import Alternative, Plan
from planner.validate.division import check_division
from planner.validate.facts import Facts
from planner.validate.findings import Findings
from planner.validate.memory import largest_capacity_bytes
from planner.validate.offload import check_offload_of
from planner.validate.stages import check_batch

_OPTIMAL_GAP = 1e-6
_ROUNDING = 1e-9


def check_search(plan: Plan, findings: Findings) -> None:
    """The bound is below the step, the gap is theirs, and only a closed gap is called optimal."""
    search, step = plan.search, plan.prediction.step_seconds
    if search.lower_bound_seconds > step * (1 + _ROUNDING):
        findings.wrong(
            "search.lower_bound_seconds",
            f"{search.lower_bound_seconds!r} is above the step of {step!r}.",
        )
    gap = (step - search.lower_bound_seconds) / step
    findings.close(
        "search.gap", search.gap, gap, relative=_OPTIMAL_GAP, absolute=_ROUNDING
    )
    if search.optimal and search.gap > _OPTIMAL_GAP:
        findings.wrong(
            "search.optimal", f"the plan says proven, its gap is {search.gap}."
        )
    told = search.layouts_pruned + search.layouts_solved
    if told > search.layouts_considered or (
        search.optimal and told < search.layouts_considered
    ):
        findings.equal("search.layouts_considered", search.layouts_considered, told)
    if (
        plan.request.job.objective == "step_time"
        and len(plan.request.cluster.node_groups) == 1
    ):  # no device is left out
        findings.equal("search.clusters_considered", search.clusters_considered, 1)
    findings.checked.append(
        "the search's bound, gap and counts agree with each other and with the step"
    )


def check_alternatives(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Alternatives come in order, none faster than the plan, each a layout of this cluster, batch and model."""
    step = plan.prediction.step_seconds
    fastest = step
    for position, alternative in enumerate(plan.alternatives):
        where = f"alternatives[{position}]"
        if alternative.step_seconds < fastest * (1 - _ROUNDING):
            findings.wrong(
                f"{where}.step_seconds",
                f"{alternative.step_seconds!r} comes after {fastest!r}.",
            )
        fastest = max(fastest, alternative.step_seconds)
        slowdown = alternative.step_seconds / step - 1
        findings.close(
            f"{where}.slowdown",
            alternative.slowdown,
            slowdown,
            relative=_OPTIMAL_GAP,
            absolute=_ROUNDING,
        )
        _check_alternative(where, alternative, facts, findings)
    findings.checked.append(
        "alternatives are valid layouts, in order, none faster than the plan"
    )


def check_devices(where: str, layout: Layout, facts: Facts, findings: Findings) -> None:
    """Another layout of the request uses as many devices as it may."""
    if layout.devices not in facts.possible_devices:
        wanted = " or ".join(map(str, sorted(facts.possible_devices)))
        findings.equal(
            f"{where}.layout: product of the degrees", layout.devices, wanted
        )


def _check_alternative(
    where: str, alternative: Alternative, facts: Facts, findings: Findings
) -> None:
    layout, counts = alternative.layout, alternative.layers_per_stage
    stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
    check_devices(where, layout, facts, findings)
    check_offload_of(layout, f"{where}.layout", findings)
    check_batch(
        f"{where}.micro_batches: samples per step",
        layout,
        alternative.micro_batches,
        facts,
        findings,
    )
    findings.equal(f"{where}.layers_per_stage: stages", len(counts), stages)
    findings.equal(
        f"{where}.layers_per_stage: layers", sum(counts), len(facts.profile.layers)
    )
    check_division(f"{where}.layers_per_stage", counts, facts, findings)
    capacity = largest_capacity_bytes(facts)
    if alternative.peak_bytes > capacity:
        findings.wrong(
            f"{where}.peak_bytes", f"{alternative.peak_bytes} of {capacity} do not fit."
        )
