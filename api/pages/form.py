"""The form that requests a plan; it leads to the job, or to the plan if that is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from planner.api.dependencies import ServicesDependency, StoredResult
from planner.api.errors import MediaTypeError, ServiceError, status_of
from planner.api.guard import client_of
from planner.api.pages.form_fields import (
    BY_NAME,
    FIELDS,
    LONGEST_ANSWER,
    Answers,
    Field,
    defaults,
    field_of,
    request_of,
)
from planner.api.pages.html import Element, Node, page, tag
from planner.api.pages.job import SEE_OTHER
from planner.api.pages.problem import sentence
from planner.api.planning import find_or_submit
from planner.api.store import JobRow
from planner.errors import DocumentError, PlannerError, Problem

router = APIRouter()

FORM = "application/x-www-form-urlencoded"


@router.get("/plan")
def show_form(request: Request) -> HTMLResponse:
    """The form, filled in with the parameters of the query."""
    answers = defaults()
    for name, value in request.query_params.items():
        if name in BY_NAME:
            answers[name] = value
    return _form(request, answers)


@router.post("/plan", response_class=HTMLResponse)
async def post_form(request: Request, parts: ServicesDependency) -> Response:
    """Request the plan; if a field is wrong, show the form with the mistakes."""
    answers = await _answers(request)
    try:
        found = await find_or_submit(
            parts, request_of(answers), client_of(request.scope)
        )
    except PlannerError as error:
        parts.metrics.problems.add(code=error.code)
        response = _form(request, answers, error.problems, status=status_of(error))
        if isinstance(error, ServiceError):
            response.headers.update(error.headers)
        return response
    return RedirectResponse(_page_of(found), SEE_OTHER)


async def _answers(request: Request) -> dict[str, str]:
    """The text of every field; a field that was not sent has its default.

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
        sent = parse_qsl(text, keep_blank_values=True, max_num_fields=4 * len(FIELDS))
    except ValueError:
        raise DocumentError(
            "the form has too many fields.", hint="send each field once."
        ) from None
    answers = defaults()
    for name, value in sent:
        if name in BY_NAME:
            answers[name] = value[:LONGEST_ANSWER]
    return answers


def _page_of(found: StoredResult | JobRow) -> str:
    if isinstance(found, StoredResult):
        return f"/plans/{found.row.id}"
    return f"/jobs/{found.id}"


def _form(
    request: Request,
    answers: Answers,
    problems: Sequence[Problem] = (),
    *,
    status: int = 200,
) -> HTMLResponse:
    by_field: dict[str, list[Problem]] = {}
    for problem in problems:
        by_field.setdefault(field_of(problem), []).append(problem)
    fields = [
        _field(field, answers.get(field.name, ""), by_field.get(field.name, []))
        for field in FIELDS
    ]
    button = tag("p", tag("button", "Plan", type="submit"), class_="wide")
    form = tag("form", *fields, button, method="post", action="/plan", class_="fields")
    summary = _summary(problems, by_field.get("", []))
    return page(request, "New plan", *summary, form, status=status)


def _summary(
    problems: Sequence[Problem], of_no_field: Sequence[Problem]
) -> Iterator[Node]:
    """Above the form: that there are mistakes, and those that belong to no field."""
    if problems:
        lines = [tag("p", "Some fields are wrong.", class_="wrong")]
        lines += [tag("p", str(problem), class_="wrong") for problem in of_no_field]
        yield tag("div", *lines, role="alert")


def _field(field: Field, answer: str, problems: Sequence[Problem]) -> Element:
    """Label, input, hint, and what is wrong with the answer."""
    mistakes = [f"{each.message} {sentence(each.hint)}".strip() for each in problems]
    wrong = " ".join(mistakes)
    notes = {}
    if field.hint:
        notes["hint"] = field.hint
    if wrong:
        notes["wrong"] = wrong
    control = _control(
        field,
        answer,
        id=field.name,
        name=field.name,
        aria_invalid="true" if wrong else None,
        aria_describedby=" ".join(f"{field.name}-{kind}" for kind in notes) or None,
    )
    spans = [
        tag("span", text, class_=kind, id=f"{field.name}-{kind}")
        for kind, text in notes.items()
    ]
    label = tag("label", field.label, for_=field.name)
    width = "wide" if field.kind == "lines" else None
    return tag("div", label, control, *spans, class_=width)


def _control(field: Field, answer: str, **attributes: str | None) -> Node:
    if field.choices is not None:
        return _select(list(field.choices()), answer, attributes)
    if field.kind == "lines":
        return tag("textarea", answer, rows="4", **attributes)
    mode = "decimal" if field.kind == "number" else None
    if field.suggestions is None:
        return tag("input", type="text", inputmode=mode, value=answer, **attributes)
    name = f"{field.name}-suggestions"
    options = (tag("option", value=value) for value in field.suggestions())
    control = tag("input", type="text", value=answer, list=name, **attributes)
    return [control, tag("datalist", *options, id=name)]


def _select(
    choices: Sequence[str], answer: str, attributes: dict[str, str | None]
) -> Element:
    """A list to choose from; an answer that is no choice stays selected."""
    shown = choices if answer in choices else [answer, *choices]
    options = [
        tag("option", each, value=each, selected=each == answer) for each in shown
    ]
    return tag("select", *options, **attributes)
