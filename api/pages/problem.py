"""Pages about errors: what each code means, and the error of a request for a page."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner import errors as planner_errors
from planner.api import errors as service_errors
from planner.api.errors import NotFoundError, ServiceError
from planner.api.pages.rendering import page
from planner.errors import PlannerError
from planner.spec.answers import ProblemDocument

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
    text = (kind.__doc__ or "").strip()
    return page(request, "problem_kind.html", title=kind.title, code=code, text=text)


def problem_page(request: Request, document: ProblemDocument) -> HTMLResponse:
    """The page of an error."""
    return page(request, "problem.html", status=document.status, problem=document)


def _kinds() -> dict[str, type[PlannerError]]:
    found = [*vars(planner_errors).values(), *vars(service_errors).values()]
    return {
        kind.code: kind
        for kind in found
        if isinstance(kind, type)
        and issubclass(kind, PlannerError)
        and kind is not ServiceError
    }
