"""The start page: what is being solved, recent plans, and one step of the newest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from planner.api.cursors import cursor_of, number_of
from planner.api.dependencies import Services, ServicesDependency
from planner.api.documents import JobView
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
FIRST_REQUEST = """curl -s http://localhost:8000/v1/plans -H 'Content-Type: application/json' -d '{
  "model": "gpt2",
  "cluster": {"node_groups": [{"device": "a100-sxm4-80gb", "nodes": 1, "devices_per_node": 8}]},
  "job": {"global_batch_size": 64, "sequence_length": 1024}
}'"""


@router.get("/")
def start(
    request: Request,
    parts: ServicesDependency,
    cursor: Annotated[str | None, Query()] = None,
) -> HTMLResponse:
    """Recent plans, or those before a cursor."""
    rows = parts.store.plans(before=number_of(cursor), limit=RECENT_PLANS + 1)
    return page(
        request,
        "planner",
        *_content(parts, rows[:RECENT_PLANS], len(rows) > RECENT_PLANS, cursor is None),
    )


def _content(
    parts: Services, rows: list[PlanRow], has_more: bool, is_first: bool
) -> Iterator[Node]:
    if is_first:
        yield tag(
            "p",
            "Finds the split of a PyTorch model over a cluster that trains fastest without running out of memory. ",
            f"Version {__version__}, ",
            link("/openapi.json", "OpenAPI"),
            ", ",
            link("/metrics", "metrics"),
        )
        yield from _under_way(parts)
        yield from _newest_picture(parts, rows)
    older = (
        [tag("p", link(f"/?cursor={cursor_of(rows[-1].number)}", "Older plans"))]
        if has_more
        else []
    )
    yield section(
        "Recent plans" if is_first else "Older plans",
        _plans(rows) if rows else _none_yet(),
        *older,
    )


def _none_yet() -> Node:
    ask = tag("p", "None yet. ", link("/plan", "Ask for one"), ", or with a program:")
    return [ask, tag("pre", FIRST_REQUEST)]


def _under_way(parts: Services) -> Iterator[Element]:
    rows = [_job(job, view_of(job)) for job in parts.store.unfinished_jobs()]
    if rows:
        head = ("Plan of", "Status", "Best step so far", "Asked for")
        yield section(
            "Under way", table("Plans that are being solved", head, rows, numbers=(2,))
        )


def _job(job: JobRow, view: JobView) -> tuple[Node, ...]:
    best = "none yet" if view.incumbent is None else seconds(view.incumbent)
    return (
        link(f"/jobs/{job.id}", subject(job)),
        job.status,
        best,
        moment(job.created_at),
    )


def _newest_picture(parts: Services, rows: list[PlanRow]) -> Iterator[Node]:
    """Of the newest plan; rows of results that do not fit have none."""
    newest = next((row for row in rows if row.status == "succeeded"), None)
    found = parts.store.plan(newest.id) if newest else None
    if found:
        row, document = found
        yield timeline_picture(Plan.model_validate_json(document), row)


def _plans(rows: list[PlanRow]) -> Element:
    head = ("Plan", "Model", "Devices", "Step", "Made")
    return table("Plans, newest first", head, map(_plan, rows), numbers=(2, 3))


def _plan(row: PlanRow) -> tuple[Node, ...]:
    step = "no plan fits" if row.step_seconds is None else seconds(row.step_seconds)
    name = link(f"/plans/{row.id}", tag("code", row.id[:12]))
    return name, row.model, str(row.devices), step, moment(row.created_at)
