"""The start page: the form that requests a plan, examples, searches and recent plans."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from planner.api.dependencies import Services, ServicesDependency, StoredResult
from planner.api.errors import MediaTypeError, ServiceError, status_of
from planner.api.examples import SHORT_PLAN
from planner.api.http.cursors import read_page
from planner.api.http.guard import client_of
from planner.api.pages.fields import (
    FIELDS,
    Answers,
    Field,
    field_of,
    filled,
    request_of,
)
from planner.api.pages.jobs import subject
from planner.api.pages.rendering import page
from planner.api.planning import find_or_submit
from planner.api.solving.jobs import view_of
from planner.api.storage.store import JobRow
from planner.errors import DocumentError, PlannerError, Problem

router = APIRouter()

RECENT_PLANS = 10
LISTED_PLANS = 50
SEE_OTHER = 303
FORM = "application/x-www-form-urlencoded"
EXAMPLES = {
    "8B on 8": {"model": "llama-3.1-8b", "devices": 8, "batch": 64, "sequence": 8192},
    "70B on 64": {
        "model": "llama-3.1-70b",
        "devices": 64,
        "batch": 128,
        "sequence": 8192,
    },
    "405B on 16,384": {
        "model": "llama-3.1-405b",
        "devices": 16384,
        "batch": 2048,
        "sequence": 8192,
    },
}
"""Answers of the form by the text of their link."""


@router.get("/")
@router.get("/plan")
def start(request: Request, parts: ServicesDependency) -> HTMLResponse:
    """The form, filled in with the parameters of the query, and recent plans."""
    return _start(request, parts, filled(request.query_params.multi_items()))


@router.get("/plans")
def list_plans(
    request: Request,
    parts: ServicesDependency,
    cursor: Annotated[str | None, Query()] = None,
) -> HTMLResponse:
    """Plans, newest first, or those before a cursor."""
    plans, older = read_page(parts.store.plans, cursor, LISTED_PLANS)
    return page(request, "plans.html", plans=plans, older=older)


@router.post("/plan", response_class=HTMLResponse)
async def post_form(request: Request, parts: ServicesDependency) -> Response:
    """Request the plan; if a field is wrong, show the form with the mistakes."""
    answers = filled(await sent_fields(request))
    try:
        client = client_of(request.scope)
        found = await find_or_submit(parts, request_of(answers), client)
    except PlannerError as error:
        parts.metrics.problems.labels(code=error.code).inc()
        response = await run_in_threadpool(_start, request, parts, answers, error)
        if isinstance(error, ServiceError):
            response.headers.update(error.headers)
        return response
    return RedirectResponse(page_of(found), SEE_OTHER)


def page_of(found: StoredResult | JobRow) -> str:
    """Path of the page of a plan, or of the job that searches for it."""
    if isinstance(found, StoredResult):
        return f"/plans/{found.row.id}"
    return f"/jobs/{found.id}"


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


async def sent_fields(request: Request) -> list[tuple[str, str]]:
    """The fields of the form as they were sent.

    Raises:
        MediaTypeError: the body is not a form.
        DocumentError: the form has too many fields.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != FORM:
        raise MediaTypeError(
            f"the body was sent as {kind!r}.",
            field="Content-Type",
            hint=f"send {FORM}.",
        )
    text = (await request.body()).decode(errors="replace")
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=4 * len(FIELDS))
    except ValueError:
        raise DocumentError(
            "the form has too many fields.", hint="send each field once."
        ) from None


def _start(
    request: Request,
    parts: Services,
    answers: Answers,
    error: PlannerError | None = None,
) -> HTMLResponse:
    rows = parts.store.plans(before=None, limit=RECENT_PLANS)
    jobs = [
        {"id": job.id, "subject": subject(job), "view": view_of(job)}
        for job in parts.store.unfinished_jobs()
    ]
    has_keys = bool(parts.settings.keys or parts.settings.keys_file)
    problems = _by_field(error.problems if error else (), answers)
    return page(
        request,
        "start.html",
        status=status_of(error) if error else 200,
        fields=[_field(field, answers[field.name], problems) for field in FIELDS],
        problems=problems,
        examples=EXAMPLES,
        jobs=jobs,
        plans=rows,
        command=curl_command(str(request.base_url), has_keys=has_keys),
    )


def _by_field(
    problems: Sequence[Problem], answers: Answers
) -> dict[str, list[Problem]]:
    found: dict[str, list[Problem]] = {}
    for problem in problems:
        found.setdefault(field_of(problem, answers), []).append(problem)
    return found


def _field(field: Field, answer: str, problems: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows of a field; an answer that is no choice stays selected."""
    choices = list(field.choices()) if field.choices else []
    if choices and answer not in choices:
        choices.insert(0, answer)
    return {
        "name": field.name,
        "label": field.label,
        "hint": field.hint,
        "kind": field.kind,
        "folded": field.folded,
        "choices": choices,
        "answer": answer,
        "changed": answer != field.default,
        "wrong": problems.get(field.name, []),
    }
