"""Answers of the service that are no documents of `planner.spec`, and request bodies.

Unknown fields are ignored, so that this client also reads a newer service. A test compares
the fields with the service's OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from planner.errors import LayoutError
from planner.spec import Options, PlanRequest, PredictionLayout, ShortForm
from planner.spec.constraint_words import full_name

PlanBody = ShortForm | PlanRequest | Mapping[str, Any]
"""A planning request: in the short form, as a canonical request, or as the plain body."""


class Answer(BaseModel):
    """Base class: immutable, and open for fields of newer services."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, use_attribute_docstrings=True
    )


class JobProgress(Answer):
    """Progress of a search."""

    layouts_considered: int
    layouts_done: int
    elapsed_seconds: float


class JobState(Answer):
    """A search of the service."""

    id: str
    status: Literal[
        "queued", "running", "succeeded", "infeasible", "failed", "cancelled"
    ]
    plan_id: str
    """Id of the plan, known before it is found."""
    progress: JobProgress | None = None
    incumbent: float | None = None
    """Step time of the best plan so far, in seconds."""
    bound: float | None = None
    """Lower bound of the step time of every plan, in seconds."""
    gap: float | None = None
    """(incumbent - bound) / incumbent."""
    problem: dict[str, Any] | None = None
    """Problem document of a job that failed."""
    created_at: str
    """RFC 3339, UTC."""
    started_at: str | None = None
    finished_at: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the search has ended, in whatever way."""
        return self.status not in ("queued", "running")


class JobEvent(Answer):
    """An event of a job: queued, started, incumbent, progress or done."""

    number: int
    """From 1; the stream resumes after it."""
    name: str
    data: dict[str, Any]


class PlanSummary(Answer):
    """A plan in the list of plans."""

    id: str
    status: Literal["succeeded", "infeasible"]
    model: str
    devices: int
    step_seconds: float | None
    """None: no layout fits in memory."""
    created_at: str
    """RFC 3339, UTC."""


class PlanList(Answer):
    """A page of the list of plans, newest first."""

    plans: tuple[PlanSummary, ...]
    next: str | None = None
    """Cursor of the next page; None on the last one."""


class StoredProfile(Answer):
    """A profile that the service has stored."""

    id: str
    """Its sha256: the `profile_id` of a request."""
    model: str
    device: str
    layers: int
    parameters: int
    """Elements, shared parameters counted once."""


class StoredMeasurement(Answer):
    """A measured run that the service has stored beside its plan."""

    id: int
    plan_id: str
    median_step_seconds: float
    predicted_step_seconds: float
    error: float
    """Measured step time / predicted step time - 1."""
    url: str


def plan_body(request: PlanBody, options: Options | None = None) -> dict[str, Any]:
    """Return the body of POST /v1/plans.

    Args:
        request: what to plan.
        options: replace those of the request; None: keep them.
    """
    body = _documents(request)
    if options is not None:
        body["options"] = _plain(options)
    return body


def prediction_body(
    request: PlanBody, layout: PredictionLayout | Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of POST /v1/predictions: the request's documents and a layout.

    Args:
        request: model, cluster and job; its options are not sent.
        layout: a document, or its fields by long or short name.
    """
    body = _documents(request)
    body.pop("options", None)
    if isinstance(layout, PredictionLayout):
        body["layout"] = _plain(layout)
    else:
        body["layout"] = _full_names(layout)
    return body


def _documents(request: PlanBody) -> dict[str, Any]:
    if not isinstance(request, PlanRequest):
        return _plain(request) if isinstance(request, ShortForm) else dict(request)
    body: dict[str, Any] = {}
    if request.model is not None:
        body["model"] = request.model
    elif request.profile is not None:
        body["profile"] = _plain(request.profile)
    else:
        body["profile_id"] = request.profile_id
    for name in ("cluster", "job", "options", "calibration"):
        document = getattr(request, name)
        if document is not None:
            body[name] = _plain(document)
    return body


def _full_names(layout: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a layout by their long names.

    Raises:
        LayoutError: a field is present by both of its names.
    """
    named: dict[str, Any] = {}
    for name, value in layout.items():
        full = full_name(name)
        if full in named:
            raise LayoutError(
                f"{full} is given twice.", field=f"layout.{name}", hint="give it once."
            )
        named[full] = value
    return named


def _plain(document: BaseModel) -> dict[str, Any]:
    return document.model_dump(mode="json", by_alias=True, exclude_none=True)
