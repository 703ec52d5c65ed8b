"""Pages for people, rendered here: no script, no external resource, every value escaped."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

import planner
from api import errors as service_errors
from api.dependencies import ServicesDependency
from api.errors import NotFoundError, ServiceError
from api.store import PlanRow
from planner import errors as planner_errors
from planner.errors import PlannerError
from planner.spec import Plan

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

RECENT_PLANS = 20
MAX_PICTURED_ACTIONS = 4000
"""A longer schedule makes a picture of many megabytes; the page links to it instead."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
}
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #8884; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
img { width: 100%; background: #fff; border: 1px solid #8884; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { background: #8881; padding: .8rem; overflow-x: auto; }
nav a { margin-right: 1rem; }
"""
FIRST_REQUEST = """curl -s http://localhost:8000/v1/plans -H 'Content-Type: application/json' -d '{
  "model": "gpt2",
  "cluster": {"node_groups": [{"device": "a100-sxm4-80gb", "nodes": 1, "devices_per_node": 8}]},
  "job": {"global_batch_size": 64, "sequence_length": 1024}
}'"""


@router.get("/")
def index(parts: ServicesDependency) -> HTMLResponse:
    """Recent plans, and one step of the newest as a picture."""
    rows = parts.store.plans(before=None, limit=RECENT_PLANS)
    newest = next((row for row in rows if row.status == "succeeded"), None)
    found = parts.store.plan(newest.id) if newest else None
    picture = _picture(*found) if found else ""
    return _page("planner", "".join(_index_body(picture, rows)))


@router.get("/problems/{code}")
def problem(code: str) -> HTMLResponse:
    """What an error's `type` points to."""
    kind = _problem_kinds().get(code)
    if kind is None:
        raise NotFoundError(f"there is no problem {code!r}.", mend=f"known: {', '.join(sorted(_problem_kinds()))}.")
    text = escape((kind.__doc__ or "").strip())
    return _page(kind.title, f"<h1>{escape(kind.title)}</h1><p><code>{escape(code)}</code>: {text}</p>")


def _index_body(picture: str, rows: list[PlanRow]) -> Iterator[str]:
    yield f"<h1>planner <small>{escape(planner.__version__)}</small></h1>"
    yield "<nav><a href='/openapi.json'>API</a><a href='/v1/models'>Models</a><a href='/v1/devices'>Devices</a>"
    yield "<a href='/metrics'>Metrics</a></nav>"
    yield picture
    yield "<h2>Recent plans</h2>"
    yield _table(rows) if rows else f"<p>None yet. Ask for one:</p><pre>{escape(FIRST_REQUEST)}</pre>"


def _picture(row: PlanRow, document: str) -> str:
    """As an image, so that the page does not wait for it; hovering works in the picture's own tab."""
    url = f"/v1/plans/{escape(row.id)}/timeline.svg"
    words = f"One training step of {escape(row.model)} on {row.devices} devices, as predicted"
    actions = sum(map(len, Plan.model_validate_json(document).actions))
    if actions > MAX_PICTURED_ACTIONS:
        return f"<p><a href='{url}'>{words}</a> ({actions} actions: a large picture)</p>"
    return f"<figure><a href='{url}'><img src='{url}' alt='{words}'></a><figcaption>{words}</figcaption></figure>"


def _table(rows: list[PlanRow]) -> str:
    head = "<tr><th>Plan</th><th>Model</th><th>Devices</th><th>Step</th><th>Made</th><th></th></tr>"
    return f"<table>{head}{''.join(map(_table_row, rows))}</table>"


def _table_row(row: PlanRow) -> str:
    url = f"/v1/plans/{escape(row.id)}"
    step = "no plan fits" if row.step_seconds is None else f"{row.step_seconds:.4g} s"
    parts = ("stage-map", "explanation", "timeline.svg", "timeline.json") if row.status == "succeeded" else ()
    links = " ".join(f"<a href='{url}/{part}'>{part}</a>" for part in parts)
    return (
        f"<tr><td><a href='{url}'><code>{escape(row.id[:12])}</code></a></td><td>{escape(row.model)}</td>"
        f"<td class='number'>{row.devices}</td><td class='number'>{step}</td>"
        f"<td>{escape(row.created_at)}</td><td>{links}</td></tr>"
    )


def _page(title: str, body: str) -> HTMLResponse:
    html = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        "<link rel='icon' href='data:,'>"
        f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style></head><body>{body}</body></html>"
    )
    return HTMLResponse(html, headers=HEADERS)


def _problem_kinds() -> dict[str, type[PlannerError]]:
    found = [*vars(planner_errors).values(), *vars(service_errors).values()]
    return {
        kind.code: kind
        for kind in found
        if isinstance(kind, type) and issubclass(kind, PlannerError) and kind is not ServiceError
    }
