"""The form that asks for a plan; it leads to the job's page, or to the plan's when that is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from planner.api.dependencies import ServicesDependency, StoredResult
from planner.api.documents import PlanCreate
from planner.api.errors import MediaTypeError, ServiceError, status_of
from planner.api.guard import client_of
from planner.api.pages.html import Element, Node, page, tag
from planner.api.pages.job import SEE_OTHER
from planner.api.pages.problem import sentence
from planner.api.pages.wish_fields import (
    BY_NAME,
    FIELDS,
    LONGEST_ANSWER,
    Answers,
    Field,
    body_of,
    defaults,
    field_of,
)
from planner.api.planning import ask
from planner.api.store import JobRow
from planner.errors import DocumentError, PlannerError, Problem
from planner.spec import parse
from planner.spec.devices import find_device

router = APIRouter()

FORM = "application/x-www-form-urlencoded"


@router.get("/plan")
def show_form(request: Request) -> HTMLResponse:
    """The form; names and values in the query fill it in."""
    given = {
        name: value for name, value in request.query_params.items() if name in BY_NAME
    }
    return _form(request, defaults() | given)


@router.post("/plan", response_class=HTMLResponse)
async def post_form(request: Request, parts: ServicesDependency) -> Response:
    """Ask for the plan; mistakes come back beside their fields."""
    answers = await _answers(request)
    try:
        asked = await ask(parts, _wish(answers), client_of(request.scope))
    except PlannerError as error:
        parts.metrics.problems.add(code=error.code)
        response = _form(request, answers, error.problems, status=status_of(error))
        if isinstance(error, ServiceError):
            response.headers.update(error.headers)
        return response
    return RedirectResponse(_page_of(asked), SEE_OTHER)


def _wish(answers: Answers) -> PlanCreate:
    """What the answers ask for.

    Raises:
        DocumentError: every mistake in them.
        UnknownNameError: there is no such device.
    """
    body, problems = body_of(answers)
    try:
        wish = parse(PlanCreate, body)
    except DocumentError as error:
        raise DocumentError("", problems=(*problems, *error.problems)) from None
    if problems:
        raise DocumentError("", problems=tuple(problems))
    for index, group in enumerate(
        wish.cluster.node_groups
    ):  # else the search would tell, when the job's turn has come
        find_device(group.device, field=f"cluster.node_groups[{index}].device")
    return wish


async def _answers(request: Request) -> dict[str, str]:
    """What was typed; an empty answer counts, a missing one is the default.

    Raises:
        MediaTypeError: the body is no form.
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
        given = parse_qsl(text, keep_blank_values=True, max_num_fields=4 * len(FIELDS))
    except ValueError:
        raise DocumentError(
            "the form has too many fields.", hint="send each once."
        ) from None
    return defaults() | {
        name: value[:LONGEST_ANSWER] for name, value in given if name in BY_NAME
    }


def _page_of(asked: StoredResult | JobRow) -> str:
    return (
        f"/plans/{asked.row.id}"
        if isinstance(asked, StoredResult)
        else f"/jobs/{asked.id}"
    )


def _form(
    request: Request,
    answers: Answers,
    problems: Sequence[Problem] = (),
    *,
    status: int = 200,
) -> HTMLResponse:
    beside: dict[str, list[Problem]] = {}
    for problem in problems:
        beside.setdefault(field_of(problem), []).append(problem)
    fields = [
        _field(field, answers.get(field.name, ""), beside.get(field.name, []))
        for field in FIELDS
    ]
    button = tag("p", tag("button", "Plan", type="submit"), class_="wide")
    form = tag("form", *fields, button, method="post", action="/plan", class_="fields")
    return page(
        request,
        "Ask for a plan",
        *_summary(problems, beside.get("", [])),
        form,
        status=status,
    )


def _summary(
    problems: Sequence[Problem], elsewhere: Sequence[Problem]
) -> Iterator[Node]:
    """Above the form: that something is wrong, and what belongs to no field."""
    if problems:
        said = [tag("p", "This cannot be planned yet.", class_="wrong")]
        said += [tag("p", str(problem), class_="wrong") for problem in elsewhere]
        yield tag("div", *said, role="alert")


def _field(field: Field, answer: str, problems: Sequence[Problem]) -> Element:
    """Label, input, hint and what is wrong with the answer."""
    wrong = " ".join(
        f"{problem.message} {sentence(problem.hint)}".strip() for problem in problems
    )
    told = {
        kind: words for kind, words in (("hint", field.hint), ("wrong", wrong)) if words
    }
    control = _control(
        field,
        answer,
        id=field.name,
        name=field.name,
        aria_invalid="true" if wrong else None,
        aria_describedby=" ".join(f"{field.name}-{kind}" for kind in told) or None,
    )
    notes = (
        tag("span", words, class_=kind, id=f"{field.name}-{kind}")
        for kind, words in told.items()
    )
    label = tag("label", field.label, for_=field.name)
    return tag(
        "div", label, control, *notes, class_="wide" if field.kind == "lines" else None
    )


def _control(field: Field, answer: str, **attributes: str | None) -> Element:
    if field.choices is not None:
        known = list(field.choices())
        shown = known if answer in known else [answer, *known]
        options = (
            tag("option", each, value=each, selected=each == answer) for each in shown
        )
        return tag("select", *options, **attributes)
    if field.kind == "lines":
        return tag("textarea", answer, rows="4", **attributes)
    return tag("input", type="text", inputmode="decimal", value=answer, **attributes)
