"""Bodies of requests, and events of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.errors import LayoutError
from planner.spec import Document, Options, PlanRequest, PredictionLayout, ShortForm
from planner.spec.constraint_words import full_name

PlanBody = ShortForm | PlanRequest | Mapping[str, Any]
"""A planning request: in the short form, as a canonical request, or as the plain body."""


class JobEvent(Document):
    """An event of a job: queued, started, incumbent, progress or done."""

    number: int
    """From 1; the stream resumes after it."""
    name: str
    """Kind of event."""
    data: dict[str, Any]
    """What has changed."""


def plan_body(
    request: PlanBody,
    options: Options | None = None,
    calibration_id: str | None = None,
) -> dict[str, Any]:
    """Return the body of POST /v1/plans.

    Args:
        request: what to plan.
        options: replace those of the request; None: keep them.
        calibration_id: of a stored calibration; None: that of the request.
    """
    body = _documents(request, calibration_id)
    if options is not None:
        body["options"] = plain(options)
    return body


def prediction_body(
    request: PlanBody,
    layout: PredictionLayout | Mapping[str, Any],
    calibration_id: str | None = None,
) -> dict[str, Any]:
    """Return the body of POST /v1/predictions: the request's documents and a layout.

    Args:
        request: model, cluster and job; its options are not sent.
        layout: a document, or its fields by long or short name.
        calibration_id: of a stored calibration; None: that of the request.
    """
    body = _documents(request, calibration_id)
    body.pop("options", None)
    if isinstance(layout, PredictionLayout):
        body["layout"] = plain(layout)
    else:
        body["layout"] = _full_names(layout)
    return body


def _documents(request: PlanBody, calibration_id: str | None) -> dict[str, Any]:
    if isinstance(request, PlanRequest):
        body = _documents_of(request)
    elif isinstance(request, ShortForm):
        body = plain(request)
    else:
        body = dict(request)
    if calibration_id is not None:
        body["calibration_id"] = calibration_id
    return body


def _documents_of(request: PlanRequest) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if request.model is not None:
        body["model"] = request.model
    elif request.profile is not None:
        body["profile"] = plain(request.profile)
    else:
        body["profile_id"] = request.profile_id
    for name in ("cluster", "job", "options", "calibration"):
        document = getattr(request, name)
        if document is not None:
            body[name] = plain(document)
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


def plain(document: Document) -> dict[str, Any]:
    """Return a document as JSON data, without fields that are null."""
    return document.model_dump(mode="json", by_alias=True, exclude_none=True)
