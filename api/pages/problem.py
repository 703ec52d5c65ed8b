"""Pages about errors: what each code means, and the error of a request for a page."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner import errors as planner_errors
from planner.api import errors as service_errors
from planner.api.documents import ErrorItem, ProblemDocument
from planner.api.errors import NotFoundError, ServiceError
from planner.api.pages.html import Node, bullets, page, tag
from planner.errors import PlannerError

router = APIRouter()


@router.get("/problems/{code}")
def problem(code: str, request: Request) -> HTMLResponse:
    """What a code means: the page that an error's `type` points to."""
    kind = _kinds().get(code)
    if kind is None:
        raise NotFoundError(
            f"no error has the code {code!r}.",
            hint=f"use one of {', '.join(sorted(_kinds()))}.",
        )
    return page(
        request,
        kind.title,
        tag("p", tag("code", code), ": ", (kind.__doc__ or "").strip()),
    )


def problem_page(request: Request, document: ProblemDocument) -> HTMLResponse:
    """The page of an error."""
    number: Node = (
        tag("p", "Request ", tag("code", document.request_id))
        if document.request_id
        else ""
    )
    return page(
        request, document.title, problem_text(document), number, status=document.status
    )


def problem_text(document: ProblemDocument) -> Node:
    """What is wrong, and the hints."""
    return (
        bullets(map(_error, document.errors))
        if document.errors
        else tag("p", document.detail)
    )


def _error(error: ErrorItem) -> Node:
    field: Node = (tag("code", error.field), ": ") if error.field else ""
    return field, tag("span", error.message, class_="wrong"), " ", sentence(error.hint)


def sentence(hint: str) -> str:
    """A hint as a sentence of its own."""
    return hint[:1].upper() + hint[1:]


def _kinds() -> dict[str, type[PlannerError]]:
    found = [*vars(planner_errors).values(), *vars(service_errors).values()]
    return {
        kind.code: kind
        for kind in found
        if isinstance(kind, type)
        and issubclass(kind, PlannerError)
        and kind is not ServiceError
    }
