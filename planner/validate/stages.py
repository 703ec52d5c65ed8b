"""Do the layout's numbers fit together, and does every layer stand on exactly one stage, in order?"""

from __future__ import annotations

from collections import Counter
from typing import Any

from planner.spec.job import allows
from planner.spec.plan import Plan
from planner.validate.facts import Facts
from planner.validate.findings import Findings

_PRICED_WITH = {
    "context_parallel_degree": 1,
    "expert_parallel_degree": 1,
    "virtual_stages_per_rank": 1,
    "sequence_parallel": False,
    "sequence_chunks": 1,
}
"""Layout fields for which there are equations with one value only."""


def check_layout(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Degrees multiply to the devices, the batch divides, and the job's constraints hold."""
    layout, job = plan.layout, facts.job
    for field, known in _PRICED_WITH.items():
        if getattr(layout, field) != known:
            findings.wrong(f"layout.{field}", f"{getattr(layout, field)} cannot be recomputed, only {known}.")
    findings.equal("layout: product of the degrees", layout.devices, facts.devices)
    findings.equal("placement: number of ranks", len(plan.placement), facts.devices)
    samples = plan.micro_batches * layout.micro_batch_size * layout.data_parallel_degree
    findings.equal("micro_batches * micro_batch_size * data_parallel_degree", samples, job.global_batch_size)
    for field, constraint in job.constraints.items():
        value: Any = getattr(layout, field)
        if field not in ("recompute", "schedule") and not allows(constraint, value):
            findings.wrong(f"layout.{field}", f"the plan says {value}, the job's constraint does not allow it.")
    findings.checked.append("degrees multiply to the devices, micro-batches to the global batch, constraints hold")


def check_stages(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Every layer stands once, in order, on one stage per pipeline rank, in a recompute mode that the profile has."""
    findings.equal("stages: number", len(plan.stages), plan.layout.pipeline_parallel_degree)
    for position, stage in enumerate(plan.stages):
        findings.equal(f"stages[{position}].index", stage.index, position)
        findings.equal(f"stages[{position}].pipeline_rank", stage.pipeline_rank, position)
        placed = tuple(row.rank for row in plan.placement if row.pipeline == position)
        findings.equal(f"stages[{position}].ranks", stage.ranks, placed)
    _check_layers(plan, facts, findings)
    _check_recompute(plan, facts, findings)
    findings.checked.append("every layer stands on one stage, in the model's order, one stage per pipeline rank")
    findings.checked.append("every recompute mode is one that the profile offers and the job permits")


def _check_layers(plan: Plan, facts: Facts, findings: Findings) -> None:
    planned = [layer for stage in plan.stages for layer in stage.layers]
    wanted = [layer.name for layer in facts.profile.layers]
    found = Counter(layer.name for layer in planned)
    for name in wanted:
        if found[name] != 1:
            findings.wrong("stages", f"layer {name!r} stands {found[name]} times.")
    for name in found.keys() - set(wanted):
        findings.wrong("stages", f"layer {name!r} is not in the profile.")
    if found == Counter(wanted):
        for place, (layer, name) in enumerate(zip(planned, wanted, strict=True)):
            findings.equal(f"stages: layer {place} in order", layer.name, name)
    modules = {layer.name: layer.modules for layer in facts.profile.layers}
    for layer in planned:
        if layer.name in modules:
            findings.equal(f"stages: modules of {layer.name!r}", layer.modules, modules[layer.name])


def _check_recompute(plan: Plan, facts: Facts, findings: Findings) -> None:
    profiled = {layer.name: layer for layer in facts.profile.layers}
    word, constraint = plan.layout.recompute, facts.job.constraints.get("recompute")
    for stage in plan.stages:
        for layer in stage.layers:
            offered = facts.rows(profiled[layer.name]) if layer.name in profiled else {}
            where = f"stages[{stage.index}]: recompute of {layer.name!r}"
            if layer.recompute not in offered:
                findings.wrong(
                    where, f"the plan says {layer.recompute}, the profile has {', '.join(offered) or 'none'}."
                )
            if word != "per-layer" and word in offered:
                findings.equal(f"{where} against layout.recompute", layer.recompute, word)
            permitted = [mode for mode in offered if allows(constraint, mode)]
            if permitted and not allows(constraint, "per-layer") and layer.recompute not in permitted:
                findings.wrong(where, f"the plan says {layer.recompute}, the job permits {', '.join(permitted)}.")
