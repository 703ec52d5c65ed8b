"""How certain a plan says that its prediction is, recomputed from the calibration.

    (H9)  interval   step time and fullest rank's peak x exp(10 % and 90 % quantile of
                     log(measured / predicted)), of the least certain architecture
    (H10) risk       the largest P(peak x measured / predicted > device memory)
"""

from __future__ import annotations

import math

from planner import runtimes
from planner.spec.calibration import Interval, interval_for, provenance, shipped
from planner.spec.devices import catalogue, find_device
from planner.spec.plan import Plan, Prediction
from planner.validate.findings import Findings

_RELATIVE = 1e-9


def check_certainty(plan: Plan, findings: Findings) -> None:
    """Check intervals, the risk of running out of memory, and the calibration."""
    stated = plan.prediction
    if stated.calibration is None:
        _check_absent(stated, findings)
        return
    if stated.calibration.name != shipped().name:
        name = stated.calibration.name
        findings.checked.append(f"not recomputed: intervals of the calibration {name}")
        return
    runtime = runtimes.planned(plan.request.job.runtime).calibration_owner
    architectures = _architectures(plan)
    intervals = [interval_for(runtime, each) for each in architectures]
    _check_time(stated, intervals, findings)
    _check_memory(stated, intervals, findings)
    runs = [provenance(runtime, each).measured_runs for each in architectures]
    where = "prediction.calibration.measured_runs"
    findings.equal(where, stated.calibration.measured_runs, min(runs))
    findings.checked.append("intervals and the risk of running out of memory")


def _architectures(plan: Plan) -> list[str]:
    """Architectures of the devices that the plan uses; "": not in the catalogue."""
    known = catalogue()
    found = []
    for group in plan.cluster.node_groups:
        entry = known.get(find_device(group.device).id)
        found.append(entry.architecture if entry else "")
    return found


def _check_absent(stated: Prediction, findings: Findings) -> None:
    for name in ("step_seconds_80", "peak_bytes_80", "out_of_memory_probability"):
        findings.equal(f"prediction.{name}", getattr(stated, name), None)


def _check_time(
    stated: Prediction, intervals: list[Interval], findings: Findings
) -> None:
    time = max(intervals, key=lambda one: one.time_high - one.time_low)
    where = "prediction.step_seconds_80"
    if stated.step_seconds_80 is None:
        findings.wrong(where, "it is missing, but the plan names a calibration.")
        return
    bounds = (time.time_low, time.time_high)
    for said, quantile in zip(stated.step_seconds_80, bounds, strict=True):
        expected = stated.step_seconds * math.exp(quantile)
        findings.close(where, said, expected, relative=_RELATIVE)


def _check_memory(
    stated: Prediction, intervals: list[Interval], findings: Findings
) -> None:
    sizes = max(intervals, key=lambda one: one.headroom)
    peak = max(row.peak_bytes for row in stated.memory)
    low = int(peak * math.exp(sizes.memory_low))
    high = int(peak * math.exp(sizes.memory_high))
    findings.equal("prediction.peak_bytes_80", stated.peak_bytes_80, (low, high))
    risks = []
    for row in stated.memory:
        limit = row.device_bytes or row.capacity_bytes
        risks.append(sizes.out_of_memory_probability(row.peak_bytes, limit))
    where = "prediction.out_of_memory_probability"
    if stated.out_of_memory_probability is None:
        findings.wrong(where, "it is missing, but the plan names a calibration.")
        return
    said = stated.out_of_memory_probability
    findings.close(where, said, max(risks), relative=_RELATIVE)
