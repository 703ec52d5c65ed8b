"""Do the layout's numbers fit together, and does every layer stand on exactly one stage, in order?"""

from __future__ import annotations

from collections import Counter
from typing import Any

from planner.spec.job import DIVISION, Job, allows
from planner.spec.layout import Layout
from planner.spec.plan import Plan
from planner.spec.profile import ModelProfile
from planner.validate.cells import Cells
from planner.validate.division import check_division
from planner.validate.facts import Facts
from planner.validate.findings import Findings
from planner.validate.schedules import RULES, Rules, Shape, permits_schedule

_SPLITS = (
    "micro_batch_size",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
    "sequence_parallel",
)
"""Layout fields that say what one rank computes of a layer."""


def check_layout(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Degrees multiply to the devices, batch, sequence and experts divide, and the job's constraints hold."""
    layout, job = plan.layout, facts.job
    findings.equal("layout: product of the degrees", layout.devices, facts.devices)
    findings.equal("placement: number of ranks", len(plan.placement), facts.devices)
    check_batch(
        "micro_batches * micro_batch_size * data_parallel_degree",
        layout,
        plan.micro_batches,
        facts,
        findings,
    )
    replicas = layout.data_parallel_degree * layout.context_parallel_degree
    ranks = replicas * layout.tensor_parallel_degree
    if ranks % layout.expert_ranks:
        message = f"{layout.expert_ranks} ranks of all experts do not divide the {ranks} of a pipeline rank."
        findings.wrong("layout.expert_parallel_degree", message)
    _check_shards(layout, replicas, findings)
    _check_schedule(layout, job, findings)
    _check_whole_sequences(layout, facts.profile, findings)
    _check_rows(layout, facts, findings)
    for field, constraint in job.constraints.items():
        if field in ("recompute", DIVISION):
            continue
        value: Any = layout.constrained(field)
        if not (
            permits_schedule(constraint, value)
            if field == "schedule"
            else allows(constraint, value)
        ):
            findings.wrong(
                f"layout.{field}",
                f"the plan says {value}, the job's constraint does not allow it.",
            )
    findings.checked.append(
        "degrees multiply to the devices, micro-batches to the global batch, constraints hold"
    )


def check_batch(
    where: str, layout: Layout, micro_batches: int, facts: Facts, findings: Findings
) -> None:
    """The data-parallel ranks' micro-batches, equally many or each its share, are the global batch."""
    shares = layout.micro_batch_shares
    if shares is not None:
        findings.equal(
            "layout.micro_batch_shares: number",
            len(shares),
            layout.data_parallel_degree,
        )
        findings.equal(
            f"{where}: the largest share", micro_batches, max(shares, default=0)
        )
        if min(shares, default=0) < 1:
            findings.wrong(
                "layout.micro_batch_shares",
                f"{list(shares)} leave a data-parallel rank without work.",
            )
    samples = layout.micro_batch_size * sum(
        shares or (micro_batches,) * layout.data_parallel_degree
    )
    findings.equal(where, samples, facts.job.global_batch_size)


def check_differences(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Replicas that differ run simple schedules, and exchange nothing for every micro-batch; devices that differ run an
    order that follows from its name, of whole sequences."""
    if findings.problems:
        return
    layout, columns = plan.layout, len(Cells(facts).columns)
    if len(facts.groups) > 1 or columns > 1:
        where = f"{len(facts.groups)} node group(s), {columns} kind(s) of replicas"
        if columns > 1 and layout.schedule not in ("gpipe", "1f1b"):
            findings.wrong(
                "layout.schedule",
                f"{layout.schedule} does not run on {where}, only gpipe and 1f1b.",
            )
        if layout.schedule == "synthesized":
            findings.wrong(
                "layout.schedule", f"an order is not made for stages on {where}."
            )
        findings.equal(f"layout.sequence_chunks on {where}", layout.sequence_chunks, 1)
        _check_near_shards(plan, facts, findings)
    if columns > 1:
        findings.equal(
            f"layout.virtual_stages_per_rank on {where}",
            layout.virtual_stages_per_rank,
            1,
        )
        if layout.zero_stage > 1:
            findings.wrong(
                "layout.zero_stage",
                f"ZeRO {layout.zero_stage} does not run on {where}, only 0 and 1.",
            )
        findings.equal(
            f"layout.expert_parallel_degree on {where}",
            layout.expert_parallel_degree,
            1,
        )
    findings.checked.append(
        "schedule, ZeRO stage and experts are such as replicas and devices that differ can run"
    )


def _check_near_shards(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Neighbours that share out ZeRO's states stand on one kind of device."""
    degree, homes = plan.layout.zero_shard_degree, dict[tuple[int, int], set[int]]()
    for row in plan.placement if degree else ():
        neighbours = (row.data * plan.layout.context_parallel_degree + row.context) // (
            degree or 1
        )
        homes.setdefault((row.pipeline, neighbours), set()).add(
            facts.group_of(row.node)
        )
    for (pipeline, neighbours), groups in homes.items():
        if len(groups) > 1:
            message = f"group {neighbours} of {degree} on pipeline rank {pipeline} is in {len(groups)} node groups."
            findings.wrong("layout.zero_shard_degree", message)


def _check_shards(layout: Layout, replicas: int, findings: Findings) -> None:
    """Groups that share out ZeRO's states are of one size, smaller than all replicas, and hold all experts."""
    degree, experts = layout.zero_shard_degree, layout.expert_ranks
    if degree is None:
        return
    if (
        not layout.zero_stage
        or not 1 < degree < replicas
        or replicas % degree
        or degree * layout.tensor_parallel_degree % experts
    ):
        message = f"ZeRO {layout.zero_stage} is not shared out by {degree} of {replicas} ranks, with experts on {experts}."
        findings.wrong("layout.zero_shard_degree", message)


def _check_schedule(layout: Layout, job: Job, findings: Findings) -> None:
    """The schedule is one that plans are made of, and takes the layout's stages per rank and sequence chunks."""
    rules, each, chunks = (
        RULES.get(layout.schedule),
        layout.virtual_stages_per_rank,
        layout.sequence_chunks,
    )
    if rules is None:
        findings.wrong(
            "layout.schedule", f"{layout.schedule!r} is none of {', '.join(RULES)}."
        )
        return
    if rules.refused:
        findings.wrong(
            "layout.schedule",
            f"{layout.schedule} cannot be recomputed: it {rules.refused}.",
        )
    if each < rules.least_stages or (
        rules.most_stages is not None and each > rules.most_stages
    ):
        message = f"{layout.schedule} does not put {each} stages on a rank."
        findings.wrong("layout.virtual_stages_per_rank", message)
    sharing = layout.tensor_parallel_degree if layout.sequence_parallel else 1
    pieces = chunks * layout.context_parallel_degree * sharing
    if chunks > 1 and (
        not rules.cuts_sequence
        or job.sequence_length % pieces
        or job.sequence_length < pieces
    ):
        message = f"{layout.schedule} does not cut {job.sequence_length} tokens into {chunks} equal chunks"
        message += f", shared by {pieces // chunks} ranks." if pieces > chunks else "."
        findings.wrong("layout.sequence_chunks", message)


def _check_whole_sequences(
    layout: Layout, profile: ModelProfile, findings: Findings
) -> None:
    """What the profile says cannot be cut is not."""
    for field in (
        ("sequence_chunks", "context_parallel_degree")
        if profile.whole_sequences
        else ()
    ):
        pieces = getattr(layout, field)
        if pieces != 1:
            findings.wrong(
                f"layout.{field}",
                f"{pieces} pieces, of a model that {profile.whole_sequences}.",
            )


def _check_rows(layout: Layout, facts: Facts, findings: Findings) -> None:
    """The profile has layers measured so: no row of another split stands in."""
    missing = [layer.name for layer in facts.profile.layers if not facts.rows(layer)]
    if missing:
        split = ", ".join(f"{field}({getattr(layout, field)})" for field in _SPLITS)
        findings.wrong(
            "layout", f"the profile has no measurements of {missing[0]!r} with {split}."
        )


def check_stages(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Every layer stands once, in order, on one stage, every stage on its pipeline rank, in a recompute mode that the
    profile has."""
    layout = plan.layout
    found = tuple(stage.pipeline_rank for stage in plan.stages)
    findings.equal(
        "stages: number",
        len(found),
        layout.pipeline_parallel_degree * layout.virtual_stages_per_rank,
    )
    owners = _owners(plan, found)
    for position, stage in enumerate(plan.stages):
        findings.equal(f"stages[{position}].index", stage.index, position)
        if position < len(owners):
            findings.equal(
                f"stages[{position}].pipeline_rank",
                stage.pipeline_rank,
                owners[position],
            )
        placed = tuple(
            row.rank for row in plan.placement if row.pipeline == stage.pipeline_rank
        )
        findings.equal(f"stages[{position}].ranks", stage.ranks, placed)
    _check_layers(plan, facts, findings)
    check_division(
        "stages: layers", [len(stage.layers) for stage in plan.stages], facts, findings
    )
    _check_recompute(plan, facts, findings)
    findings.checked.append(
        "every layer is on one stage, in the model's order, every stage on its pipeline rank"
    )
    findings.checked.append(
        "every recompute mode is one that the profile offers and the job permits"
    )


def _owners(plan: Plan, found: tuple[int, ...]) -> tuple[int, ...]:
    """Where the schedule puts the stages: as the plan says, if the schedule leaves the choice."""
    layout = plan.layout
    shape = Shape(
        layout.pipeline_parallel_degree,
        plan.micro_batches,
        layout.virtual_stages_per_rank,
    )
    possible = [
        place(shape) for place in RULES.get(layout.schedule, Rules()).placements
    ]
    return found if found in possible else possible[0]


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
            findings.equal(
                f"stages: modules of {layer.name!r}", layer.modules, modules[layer.name]
            )


def _check_recompute(plan: Plan, facts: Facts, findings: Findings) -> None:
    profiled = {layer.name: layer for layer in facts.profile.layers}
    word, constraint = plan.layout.recompute, facts.job.constraints.get("recompute")
    is_ahead = RULES.get(plan.layout.schedule, Rules()).recomputes_ahead
    for stage in plan.stages:
        for layer in stage.layers:
            offered = facts.rows(profiled[layer.name]) if layer.name in profiled else {}
            where = f"stages[{stage.index}]: recompute of {layer.name!r}"
            if layer.recompute not in offered:
                findings.wrong(
                    where,
                    f"the plan says {layer.recompute}, the profile has {', '.join(offered) or 'none'}.",
                )
            if is_ahead and layer.recompute != "none":
                findings.wrong(
                    where,
                    f"under {plan.layout.schedule} {layer.recompute} cannot be recomputed, only none.",
                )
            if word != "per-layer" and word in offered:
                findings.equal(
                    f"{where} against layout.recompute", layer.recompute, word
                )
            permitted = [mode for mode in offered if allows(constraint, mode)]
            if (
                permitted
                and not allows(constraint, "per-layer")
                and layer.recompute not in permitted
            ):
                findings.wrong(
                    where,
                    f"the plan says {layer.recompute}, the job permits {', '.join(permitted)}.",
                )
