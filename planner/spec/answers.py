"""What the service answers besides plans, predictions and runs.

Service and client share these documents; the client ignores fields that it does not
know, so that it also reads a newer service.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from planner.spec.document import Document
from planner.spec.profile import DataType

JobStatus = Literal[
    "queued", "running", "succeeded", "infeasible", "failed", "cancelled"
]
FINISHED: frozenset[JobStatus] = frozenset(
    {"succeeded", "infeasible", "failed", "cancelled"}
)


def _hint_of(fields: dict[str, Any]) -> str:
    """The hint of an error whose other fields are known."""
    return str(fields.get("hint", ""))


class ErrorItem(Document):
    """One thing wrong with the request."""

    field: str
    """Path of the field, header or parameter; empty for the request as a whole."""
    pointer: str | None = None
    """JSON pointer (RFC 6901) to the wrong value in the request body."""
    message: str
    """What is wrong, with the value."""
    hint: str = ""
    """What to send instead."""
    mend: str = Field(default_factory=_hint_of, deprecated=True)
    """Former name of `hint`, with the same value; removed in the next release."""

    @model_validator(mode="before")
    @classmethod
    def _read_former_name(cls, data: Any) -> Any:
        """Read a problem that was stored when `hint` was still called `mend`."""
        if isinstance(data, dict) and "mend" in data and "hint" not in data:
            return {**data, "hint": data["mend"]}
        return data


class ProblemDocument(Document):
    """An error (RFC 9457, application/problem+json)."""

    type: str
    """``/problems/<code>``: stable, and a page of this service."""
    title: str
    """The kind of problem, in words; the same for every problem of a type."""
    status: int
    """HTTP status."""
    detail: str
    """All problems with their hints, one per line."""
    code: str
    """Last segment of `type`."""
    errors: tuple[ErrorItem, ...] = ()
    """One entry per problem, at most 20."""
    limits: dict[str, float] | None = None
    """The limits that the request exceeds."""
    request_id: str | None = None
    """Identifies the request in the service's log."""


class ProfileSummary(Document):
    """A stored profile."""

    id: str
    """sha256 of the profile's canonical JSON."""
    model: str
    """Name of the model."""
    device: str
    """Device of the measured seconds; ``counted`` if there are none."""
    dtype: DataType
    """Data type of activations and matrix products."""
    layers: int
    """Number of layers."""
    parameters: int
    """Elements, shared parameters counted once."""
    url: str
    """Path of the profile."""


class CalibrationSummary(Document):
    """A stored calibration."""

    id: str
    """sha256 of the calibration's canonical JSON: `calibration_id` of a request."""
    name: str
    """Name of the calibration; several versions may share it."""
    version: int
    """Counts the calibrations of this name, from 1. A deleted one keeps its number."""
    measured_runs: int
    """Runs in the fit."""
    created_at: str
    """RFC 3339, UTC."""
    url: str
    """Path of the calibration."""


class CalibrationPage(Document):
    """A page of the list of calibrations, newest first."""

    calibrations: tuple[CalibrationSummary, ...]
    """Calibrations of this page."""
    next: str | None = None
    """Cursor of the next page; None on the last one."""


class JobProgress(Document):
    """Progress of a search."""

    layouts_considered: int
    """Layouts of the search space."""
    layouts_done: int
    """Layouts that are pruned or solved."""
    elapsed_seconds: float
    """Duration of the search so far."""


class JobView(Document):
    """A search for a plan, from its request to its result."""

    id: str
    """Id of the job."""
    status: JobStatus
    """State of the job; the last four are final."""
    plan_id: str
    """sha256 of the canonical request, so it is known from the start."""
    plan_url: str | None = None
    """None until the job has succeeded or is infeasible."""
    events_url: str
    """Path of the event stream."""
    progress: JobProgress | None = None
    """Progress of the search; None before its first report."""
    incumbent: float | None = None
    """Step time of the best plan so far, in seconds."""
    bound: float | None = None
    """Lower bound of the step time of every plan, in seconds."""
    gap: float | None = None
    """(incumbent - bound) / incumbent."""
    problem: ProblemDocument | None = None
    """The error of a failed job."""
    created_at: str
    """RFC 3339, UTC."""
    started_at: str | None = None
    """RFC 3339, UTC; None while the job is queued."""
    finished_at: str | None = None
    """RFC 3339, UTC; None until the job is finished."""

    @property
    def finished(self) -> bool:
        """Whether the search has ended, in whatever way."""
        return self.status in FINISHED


class PlanSummary(Document):
    """A plan in the list of plans."""

    id: str
    """sha256 of the canonical request."""
    status: Literal["succeeded", "infeasible"]
    """``infeasible``: no layout fits in memory."""
    model: str
    """Name of the model."""
    devices: int
    """Devices of the cluster."""
    step_seconds: float | None
    """None: no layout fits in memory."""
    created_at: str
    """RFC 3339, UTC."""
    url: str
    """Path of the plan."""


class PlanPage(Document):
    """A page of the list of plans, newest first."""

    plans: tuple[PlanSummary, ...]
    """Plans of this page."""
    next: str | None = None
    """Cursor of the next page; None on the last one."""


class MeasurementView(Document):
    """A stored measured run."""

    id: int
    """Number of the run, in the order of reports."""
    plan_id: str
    """Id of the plan that was run."""
    created_at: str
    """RFC 3339, UTC."""
    median_step_seconds: float | None
    """Median step time without warm-up; None: the run was stored by a version that
    accepted other values."""
    predicted_step_seconds: float
    """Step time in the plan."""
    error: float | None
    """median_step_seconds / predicted_step_seconds - 1; None if the median is None."""
    url: str
    """Path of the run as it was sent."""
