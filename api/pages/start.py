"""The start page: running jobs, recent plans, and how to send a request."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from planner.api.cursors import cursor_of, number_of
from planner.api.dependencies import Services, ServicesDependency
from planner.api.documents import JobView
from planner.api.examples import SHORT_PLAN
from planner.api.jobs import view_of
from planner.api.pages.html import (
    Element,
    Node,
    link,
    moment,
    page,
    section,
    table,
    tag,
)
from planner.api.pages.job import subject
from planner.api.pages.timeline import timeline_picture
from planner.api.store import JobRow, PlanRow
from planner.spec import Plan
from planner.spec.units import seconds
from planner.version import __version__

router = APIRouter()

RECENT_PLANS = 20


@router.get("/")
def start(
    request: Request,
    parts: ServicesDependency,
    cursor: Annotated[str | None, Query()] = None,
) -> HTMLResponse:
    """Recent plans, or the plans before a cursor."""
    rows = parts.store.plans(before=number_of(cursor), limit=RECENT_PLANS + 1)
    recent = rows[:RECENT_PLANS]
    has_more = len(rows) > RECENT_PLANS
    if cursor is not None:
        return page(request, "planner", _list("Older plans", recent, has_more))
    return page(
        request,
        "planner",
        _introduction(),
        *_running(parts),
        *_newest_picture(parts, recent),
        _list("Recent plans", recent, has_more),
        _first_request(request, parts),
    )


def _introduction() -> Element:
    return tag(
        "p",
        "Finds the fastest layout of a PyTorch model on a cluster that fits in memory. ",
        f"Version {__version__}, ",
        link("/openapi.json", "OpenAPI"),
        ", ",
        link("/metrics", "metrics"),
    )


def _list(title: str, rows: list[PlanRow], has_more: bool) -> Element:
    """A page of the list of plans, with a link to the next one."""
    if not rows:
        return section(title, tag("p", "No plans yet. ", link("/plan", "New plan")))
    older: Node = ""
    if has_more:
        address = f"/?cursor={cursor_of(rows[-1].number)}"
        older = tag("p", link(address, "Older plans"))
    return section(title, _plans(rows), older)


def _first_request(request: Request, parts: Services) -> Element:
    """The command that requests a plan from this service."""
    has_keys = bool(parts.settings.keys or parts.settings.keys_file)
    command = curl_command(str(request.base_url), has_keys=has_keys)
    return section(
        "Request a plan by HTTP",
        tag("pre", command),
        tag("p", link("/docs", "All requests")),
    )


def curl_command(base_url: str, *, has_keys: bool) -> str:
    """A command that requests a plan.

    Args:
        base_url: address of the service as the client sees it, with a slash at the end.
        has_keys: whether the service requires an API key.
    """
    url = shlex.quote(f"{base_url}v1/plans")
    lines = [f"curl -s {url}", "-H 'Content-Type: application/json'"]
    if has_keys:
        lines.append('-H "Authorization: Bearer $PLANNER_API_KEY"')
    lines.append(f"-d {shlex.quote(json.dumps(SHORT_PLAN))}")
    return " \\\n  ".join(lines)


def _running(parts: Services) -> Iterator[Element]:
    rows = [_job(job, view_of(job)) for job in parts.store.unfinished_jobs()]
    if rows:
        head = ("Plan of", "Status", "Best step so far", "Requested")
        jobs = table("Plans that are being solved", head, rows, numbers=(2,))
        yield section("Running", jobs)


def _job(job: JobRow, view: JobView) -> tuple[Node, ...]:
    best = "none yet" if view.incumbent is None else seconds(view.incumbent)
    return (
        link(f"/jobs/{job.id}", subject(job)),
        job.status,
        best,
        moment(job.created_at),
    )


def _newest_picture(parts: Services, rows: list[PlanRow]) -> Iterator[Node]:
    """The timeline of the newest plan, if there is a plan."""
    newest = next((row for row in rows if row.status == "succeeded"), None)
    found = parts.store.plan(newest.id) if newest else None
    if found:
        row, document = found
        yield timeline_picture(Plan.model_validate_json(document), row)


def _plans(rows: list[PlanRow]) -> Element:
    head = ("Plan", "Model", "Devices", "Step", "Created")
    return table("Plans, newest first", head, map(_plan, rows), numbers=(2, 3))


def _plan(row: PlanRow) -> tuple[Node, ...]:
    step = "no layout fits"
    if row.step_seconds is not None:
        step = seconds(row.step_seconds)
    name = link(f"/plans/{row.id}", tag("code", row.id[:12]))
    return name, row.model, str(row.devices), step, moment(row.created_at)
