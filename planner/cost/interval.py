"""Uncertainty of a prediction: intervals, probability of running out of memory, margin.

(I1)  80 % interval    predicted x exp(low) .. predicted x exp(high), where low and
                       high are quantiles of log(measured / predicted) over held-out
                       runs of the same kind
(I2)  out of memory    P(predicted peak x measured / predicted > device memory), of
                       the rank that fills its device most
(I3)  memory margin    1 - 1 / q, where q is the 80 % quantile of
                       measured / predicted peak memory
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.spec.calibration import (
    CalibrationNote,
    CalibrationTable,
    Interval,
    interval_for,
    provenance,
    shipped,
)
from planner.spec.cluster import Cluster
from planner.spec.devices import catalogue, find_device
from planner.spec.document import digest
from planner.spec.job import Job
from planner.spec.plan import Prediction


@dataclass(frozen=True, slots=True)
class Basis:
    """What the uncertainty of a prediction follows from."""

    runtime: str
    cluster: Cluster
    calibration: CalibrationTable | None = None
    """None: the one of this release."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures of the cluster's devices, once each; "": not in the catalogue."""
        known = catalogue()
        found: list[str] = []
        for group in self.cluster.node_groups:
            entry = known.get(find_device(group.device).id)
            found.append(entry.architecture if entry else "")
        return tuple(dict.fromkeys(found))

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """The interval of every architecture."""
        return tuple(
            interval_for(self.runtime, each, calibration=self.calibration)
            for each in self.architectures
        )

    @property
    def time(self) -> Interval:
        """The interval whose step time is the least certain."""
        return max(self.intervals, key=lambda one: one.time_high - one.time_low)

    @property
    def memory(self) -> Interval:
        """The interval whose memory is the least certain."""
        return max(self.intervals, key=lambda one: one.headroom)

    @property
    def note(self) -> CalibrationNote:
        """The measured runs behind the prediction, of every architecture."""
        notes = [
            provenance(self.runtime, each, calibration=self.calibration)
            for each in self.architectures
        ]
        return CalibrationNote(
            name=notes[0].name,
            id=self._id,
            measured_runs=min(one.measured_runs for one in notes),
            note=" ".join(one.note for one in notes),
        )

    @property
    def _id(self) -> str | None:
        if self.calibration is None or self.calibration == shipped():
            return None
        return digest(self.calibration)


def with_interval(prediction: Prediction, basis: Basis) -> Prediction:
    """Return a prediction that states how certain it is: equations (I1) and (I2).

    Args:
        prediction: of step time and memory.
        basis: runtime, cluster and calibration of the prediction.
    """
    time, sizes = basis.time, basis.memory
    step = prediction.step_seconds
    peak = max(row.peak_bytes for row in prediction.memory)
    risks = []
    for row in prediction.memory:
        limit = row.device_bytes or row.capacity_bytes
        risks.append(sizes.out_of_memory_probability(row.peak_bytes, limit))
    update = {
        "step_seconds_80": (
            step * math.exp(time.time_low),
            step * math.exp(time.time_high),
        ),
        "peak_bytes_80": (
            int(peak * math.exp(sizes.memory_low)),
            int(peak * math.exp(sizes.memory_high)),
        ),
        "out_of_memory_probability": max(risks),
        "calibration": basis.note,
    }
    return prediction.model_copy(update=update)


def usable_bytes(memory_bytes: int, headroom: float) -> int:
    """Return a device's memory less the headroom.

    Args:
        memory_bytes: of the device.
        headroom: a fraction if below 1, else bytes.
    """
    free = headroom * memory_bytes if headroom < 1 else headroom
    return int(memory_bytes - free)


def with_headroom(
    job: Job,
    cluster: Cluster,
    *,
    runtime: str | None = None,
    calibration: CalibrationTable | None = None,
) -> Job:
    """Return the job with a memory margin: its own, or that of equation (I3).

    Args:
        job: unchanged if it has a margin.
        cluster: devices that the job may use.
        runtime: name that the calibration knows the runtime by; None: the job's.
        calibration: None: the one of this release.
    """
    if job.memory_headroom is not None:
        return job
    basis = Basis(runtime or job.runtime, cluster, calibration)
    margin = round(basis.memory.headroom, 4)
    return job.model_copy(update={"memory_headroom": margin})
