"""Is the search's report consistent with the plan, and is every alternative a slower, valid layout?

That no faster plan exists is the search's own proof; here only its numbers are held against each other.
"""

from __future__ import annotations

from planner.spec.plan import Alternative, Plan
from planner.validate.facts import Facts
from planner.validate.findings import Findings
from planner.validate.memory import capacity_bytes

_OPTIMAL_GAP = 1e-6
_ROUNDING = 1e-9


def check_search(plan: Plan, findings: Findings) -> None:
    """The bound is below the step, the gap is theirs, and only a closed gap is called optimal."""
    search, step = plan.search, plan.prediction.step_seconds
    if search.lower_bound_seconds > step * (1 + _ROUNDING):
        findings.wrong("search.lower_bound_seconds", f"{search.lower_bound_seconds!r} is above the step of {step!r}.")
    gap = (step - search.lower_bound_seconds) / step
    findings.close("search.gap", search.gap, gap, relative=_OPTIMAL_GAP, absolute=_ROUNDING)
    if search.optimal and search.gap > _OPTIMAL_GAP:
        findings.wrong("search.optimal", f"the plan says proven, its gap is {search.gap}.")
    told = search.layouts_pruned + search.layouts_solved
    if told > search.layouts_considered or (search.optimal and told < search.layouts_considered):
        findings.equal("search.layouts_considered", search.layouts_considered, told)
    if plan.request.job.objective == "step_time":  # which leaves no device out
        findings.equal("search.clusters_considered", search.clusters_considered, 1)
    findings.checked.append("the search's bound, gap and counts agree with each other and with the step")


def check_alternatives(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Alternatives come in order, none faster than the plan, each a layout of this cluster, batch and model."""
    step = plan.prediction.step_seconds
    fastest = step
    for position, alternative in enumerate(plan.alternatives):
        where = f"alternatives[{position}]"
        if alternative.step_seconds < fastest * (1 - _ROUNDING):
            findings.wrong(f"{where}.step_seconds", f"{alternative.step_seconds!r} comes after {fastest!r}.")
        fastest = max(fastest, alternative.step_seconds)
        slowdown = alternative.step_seconds / step - 1
        findings.close(f"{where}.slowdown", alternative.slowdown, slowdown, relative=_OPTIMAL_GAP, absolute=_ROUNDING)
        _check_alternative(where, alternative, facts, findings)
    findings.checked.append("alternatives are valid layouts, in order, none faster than the plan")


def _check_alternative(where: str, alternative: Alternative, facts: Facts, findings: Findings) -> None:
    layout, counts = alternative.layout, alternative.layers_per_stage
    stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
    findings.equal(f"{where}.layout: product of the degrees", layout.devices, facts.devices)
    samples = alternative.micro_batches * layout.micro_batch_size * layout.data_parallel_degree
    findings.equal(f"{where}.micro_batches: samples per step", samples, facts.job.global_batch_size)
    findings.equal(f"{where}.layers_per_stage: stages", len(counts), stages)
    findings.equal(f"{where}.layers_per_stage: layers", sum(counts), len(facts.profile.layers))
    if alternative.peak_bytes > capacity_bytes(facts):
        findings.wrong(f"{where}.peak_bytes", f"{alternative.peak_bytes} of {capacity_bytes(facts)} do not fit.")
