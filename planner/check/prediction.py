"""The plan's prediction against the recomputed one."""

from __future__ import annotations

import math

from planner import runtimes
from planner.check.actions import parse_actions
from planner.check.context import Context
from planner.check.decoder import (
    MARGIN,
    flops_per_token,
    recomputed_flops_per_token,
)
from planner.check.memory import StageMap
from planner.check.price import Pricing
from planner.check.report import Findings
from planner.check.step import Step
from planner.spec.calibration import interval_for, provenance, shipped
from planner.spec.devices import catalogue, find_device
from planner.spec.job import OURS
from planner.spec.plan import Plan, Prediction, RankMemory

RELATIVE = 1e-6
PARTS = (
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "temporary_bytes",
    "reserved_bytes",
)
"""Fields of `RankMemory` that add up to its peak."""


def step_of(plan: Plan, context: Context) -> Step:
    """Return the step of the plan's own stage map and actions."""
    order = {layer.name: index for index, layer in enumerate(context.profile.layers)}
    stage_map: StageMap = [
        [(order[layer.name], layer.recompute) for layer in stage.layers]
        for stage in plan.stages
    ]
    return Step(Pricing(context), stage_map, parse_actions(plan.actions))


def check_prediction(plan: Plan, context: Context, findings: Findings) -> None:
    """Check time, memory and uncertainty of the prediction.

    Seconds and bytes are recomputed for the planner's own executor. Kernels and overlap
    of other runtimes are unknown here: of their predictions the sums, rates and limits
    are checked.
    """
    stated = plan.prediction
    step = step_of(plan, context)
    if context.is_priced:
        recomputed = step.prediction()
        if recomputed is None:
            findings.equal("prediction.step_seconds", stated.step_seconds, 0)
            return
        _check_figures(stated, recomputed, findings)
    else:
        _check_rates(stated, step, findings)
        _check_recomputation(plan, context, findings)
    total = stated.breakdown.total_seconds
    where = "prediction.step_seconds"
    findings.close(where, stated.step_seconds, total, 1e-9)
    for row in stated.memory:
        _check_fits(row, findings)
    _check_uncertainty(plan, findings)
    if not context.is_priced:
        findings.checked += [
            "tokens per second and MFU of the stated step, the breakdown's sum, memory's "
            "sums, and that it fits",
            f"not recomputed: the seconds and bytes of the runtime {context.job.runtime}, "
            "whose operations are not in the profile",
        ]
        return
    findings.checked += [
        "step time by replaying the actions, tokens per second, bubble fraction and MFU",
        "the breakdown part by part, and its sum against the step",
        "memory of every pipeline rank part by part, its sum, and that it fits the "
        "device",
        "intervals and the probability of running out of memory",
    ]


def _check_figures(
    stated: Prediction, recomputed: Prediction, findings: Findings
) -> None:
    """Check that every figure is the recomputed one, bytes exactly."""
    for name in ("step_seconds", "tokens_per_second", "mfu", "bubble_fraction"):
        mine, found = getattr(stated, name), getattr(recomputed, name)
        findings.close(f"prediction.{name}", mine, found)
    absolute = RELATIVE * recomputed.step_seconds
    parts = stated.breakdown.model_dump()
    for name, found in recomputed.breakdown.model_dump().items():
        where = f"prediction.breakdown.{name}"
        findings.close(where, parts[name], found, absolute=absolute)
    rows = len(recomputed.memory)
    findings.equal("prediction.memory: rows", len(stated.memory), rows)
    for rank, (one, other) in enumerate(
        zip(stated.memory, recomputed.memory, strict=False)
    ):
        where = f"prediction.memory[{rank}]"
        later = set() if one.device_bytes else {"device_bytes"}
        findings.same(where, one.model_dump(), other.model_dump(exclude=later))


def _check_rates(stated: Prediction, step: Step, findings: Findings) -> None:
    """Check rates by the step, that no part is negative, and that bytes add up."""
    context, seconds = step.pricing.context, stated.step_seconds
    tokens = context.tokens / seconds
    where = "prediction.tokens_per_second"
    findings.close(where, stated.tokens_per_second, tokens)
    if context.is_derived:
        _check_decoder(stated, context, findings)
    else:
        findings.close("prediction.mfu", stated.mfu, step.mfu(seconds))
    bubble, where = stated.bubble_fraction, "prediction.bubble_fraction"
    findings.rule(where, bubble, 0 <= bubble < 1, "it is a fraction")
    for name, part in stated.breakdown.model_dump().items():
        where, holds = f"prediction.breakdown.{name}", part >= -RELATIVE * seconds
        findings.rule(where, part, holds, "it is not negative")
    devices = [group.device for group in context.groups.values()]
    capacities = {context.capacity_bytes(device) for device in devices}
    ranks = context.layout.pipeline_parallel_degree
    findings.equal("prediction.memory: rows", len(stated.memory), ranks)
    for rank, row in enumerate(stated.memory):
        where, capacity = f"prediction.memory[{rank}]", row.capacity_bytes
        findings.equal(f"{where}.pipeline_rank", row.pipeline_rank, rank)
        parts = sum(getattr(row, name) for name in PARTS)
        findings.equal(f"{where}.peak_bytes", row.peak_bytes, parts)
        rule = f"devices have {capacities}"
        holds = capacity in capacities
        findings.rule(f"{where}.capacity_bytes", capacity, holds, rule)


def _check_decoder(stated: Prediction, context: Context, findings: Findings) -> None:
    """Check MFU by the decoder's sizes, and that compute is no faster than the peak."""
    model, peak = context.profile.transformer, context.peak_flops_per_second
    if model is None or peak is None or stated.mfu is None:
        findings.equal("prediction.mfu", stated.mfu, None)
        return
    tokens_per_second = context.tokens / stated.step_seconds
    bounds = flops_per_token(model, context.job.sequence_length)
    least, most = (flops * tokens_per_second / peak for flops in bounds)
    if (
        context.job.runtime == OURS
    ):  # tensor-parallel ranks repeat norms and output layer
        most *= context.layout.tensor_parallel_degree
    rule = f"a decoder of these sizes has {least:.4g} to {most:.4g}"
    findings.rule("prediction.mfu", stated.mfu, least <= stated.mfu <= most, rule)
    compute, ideal = stated.breakdown.compute_seconds, stated.mfu * stated.step_seconds
    is_uniform = len(context.groups) == 1 and not context.layout.has_uneven_shares
    holds = compute >= ideal or not is_uniform or context.job.precision == "fp8"
    rule = f"the model's FLOPs take {ideal:.4g} s at the peak of the devices"
    findings.rule("prediction.breakdown.compute_seconds", compute, holds, rule)


def _check_recomputation(plan: Plan, context: Context, findings: Findings) -> None:
    """Check that recomputation is no faster than its products at the devices' peak.

    The stated seconds may be those of the rank that runs the fewest products again.
    """
    model, peak = context.profile.transformer, context.peak_flops_per_second
    is_uniform = len(context.groups) == 1 and not context.layout.has_uneven_shares
    is_known = is_uniform and context.job.precision != "fp8"
    if model is None or peak is None or not is_known:
        return
    order = {layer.name: place for place, layer in enumerate(context.profile.layers)}
    ranks = context.layout.pipeline_parallel_degree
    flops = [0.0] * ranks
    for stage in plan.stages:
        for layer in stage.layers:
            block = order[layer.name] - 1
            again = recomputed_flops_per_token(model, block, layer.recompute)
            flops[stage.pipeline_rank] += again
    ideal = min(flops) * context.tokens * ranks / peak
    stated = plan.prediction.breakdown.recompute_seconds
    rule = f"what runs again takes {ideal:.4g} s at the peak of the devices"
    where = "prediction.breakdown.recompute_seconds"
    findings.rule(where, stated, stated >= (1 - MARGIN) * ideal, rule)


def _check_fits(row: RankMemory, findings: Findings) -> None:
    """Check that the rank fits its device and its host."""
    where = f"prediction.memory[{row.pipeline_rank}]"
    if row.peak_bytes > row.capacity_bytes:
        message = f"{row.peak_bytes} bytes of {row.capacity_bytes} do not fit."
        findings.wrong(f"{where}.peak_bytes", message)
    if not row.fits_host:
        message = (
            f"{row.host_bytes} bytes of {row.host_capacity_bytes} do not fit the host."
        )
        findings.wrong(f"{where}.host_bytes", message)


def _check_uncertainty(plan: Plan, findings: Findings) -> None:
    """Check intervals by the least certain architecture in the calibration.

    Bounds are the prediction x exp(10 % and 90 % quantile of log(measured / predicted)).
    The probability is that of a peak above the whole memory of a device.
    """
    stated, known = plan.prediction, catalogue()
    names = ("step_seconds_80", "peak_bytes_80", "out_of_memory_probability")
    if stated.calibration is None:
        absent = dict.fromkeys(names)
        findings.same("prediction", stated.model_dump(include=set(names)), absent)
        return
    calibration = plan.request.calibration or shipped()
    if stated.calibration.name != calibration.name:
        name = stated.calibration.name
        findings.checked.append(f"not recomputed: intervals of the calibration {name}")
        return
    runtime = runtimes.planned(plan.request.job.runtime).calibration_owner
    devices = [find_device(group.device) for group in plan.cluster.node_groups]
    entries = [known.get(device.id) for device in devices]
    owners = [entry.architecture if entry else "" for entry in entries]
    intervals = [
        interval_for(runtime, owner, calibration=calibration) for owner in owners
    ]
    time = max(intervals, key=lambda one: one.time_high - one.time_low)
    memory = max(intervals, key=lambda one: one.headroom)
    step = stated.step_seconds
    peak = max(row.peak_bytes for row in stated.memory)
    risks = [
        memory.out_of_memory_probability(
            row.peak_bytes, row.device_bytes or row.capacity_bytes
        )
        for row in stated.memory
    ]
    expected = (
        (step * math.exp(time.time_low), step * math.exp(time.time_high)),
        (
            int(peak * math.exp(memory.memory_low)),
            int(peak * math.exp(memory.memory_high)),
        ),
        max(risks),
    )
    found = dict(zip(names, expected, strict=True))
    findings.same("prediction", stated.model_dump(include=set(names)), found)
    notes = [provenance(runtime, owner, calibration=calibration) for owner in owners]
    runs = [note.measured_runs for note in notes]
    measured = stated.calibration.measured_runs
    findings.equal("prediction.calibration.measured_runs", measured, min(runs))
