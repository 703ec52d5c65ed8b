"""RFC 9457 problem documents: the answer to every request that fails.

PlannerError, ServiceError           code, title and status of the error
invalid body, parameter or header    422, one entry per mistake: field, pointer, hint
unknown path, wrong method           404, 405
database disk full or read-only      503
any other exception                  500 with the request's id; the traceback is logged
                                     (`planner.api.http.middleware`)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from planner.api.errors import (
    InternalError,
    MethodError,
    NotFoundError,
    NotReadyError,
    ServiceError,
    status_of,
)
from planner.api.http.body_errors import LocatedError
from planner.api.http.links import path_within
from planner.api.limits import MOST_PROBLEMS
from planner.api.storage.database import StoreError
from planner.errors import DocumentError, PlannerError, Problem
from planner.spec.answers import ErrorItem, ProblemDocument
from planner.spec.document import path_of

logger = logging.getLogger("planner.api")

MEDIA_TYPE = "application/problem+json"
LONGEST_TEXT = 2000
"""Characters of a field, message or hint; longer texts are cut."""
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")

RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "An error (RFC 9457): which field is wrong, why, and a hint.",
        "content": {
            MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}
        },
    }
}
"""For every operation in the OpenAPI document."""

ProblemPage = Callable[[Request, ProblemDocument], Response]


class CarriedError(HTTPException):
    """Carries a `ServiceError` through FastAPI's body parser, which catches all others."""

    def __init__(self, error: ServiceError) -> None:
        super().__init__(status_code=error.status)
        self.error = error


def document_of(
    error: PlannerError, *, request_id: str | None = None
) -> ProblemDocument:
    """The problem document of an error."""
    problems = error.problems
    pointers: Sequence[str | None] = (None,) * len(problems)
    if isinstance(error, LocatedError):
        pointers = error.pointers
    located = list(zip(problems, pointers, strict=True))
    items = tuple(_item(*each) for each in located[:MOST_PROBLEMS])
    lines = [str(Problem(item.field, item.message, item.hint)) for item in items]
    if len(problems) > len(items):
        lines.append(f"{len(problems) - len(items)} more mistakes.")
    limits = error.limits if isinstance(error, ServiceError) else None
    return ProblemDocument(
        type=f"/problems/{error.code}",
        title=error.title,
        status=status_of(error),
        detail="\n".join(lines),
        code=error.code,
        errors=items,
        limits=dict(limits) if limits else None,
        request_id=request_id,
    )


def _item(problem: Problem, pointer: str | None) -> ErrorItem:
    if pointer is not None and len(pointer) > LONGEST_TEXT:
        pointer = None
    return ErrorItem(
        field=_clipped(problem.field),
        pointer=pointer,
        message=_clipped(problem.message),
        hint=_clipped(problem.hint),
    )


def _clipped(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


def response_of(document: ProblemDocument) -> JSONResponse:
    """The HTTP response that carries a problem document."""
    body = document.model_dump(mode="json", exclude_none=True)
    return JSONResponse(body, status_code=document.status, media_type=MEDIA_TYPE)


def problem_response(request: Request, error: PlannerError) -> Response:
    """The response to a request that failed: a page for browsers, else a document."""
    request.app.state.metrics.problems.labels(code=error.code).inc()
    document = document_of(error, request_id=request.scope.get("request_id"))
    response = (
        request.app.state.problem_page(request, document)
        if _wants_page(request)
        else response_of(document)
    )
    if isinstance(error, ServiceError):
        response.headers.update(error.headers)
    return response


def install(app: FastAPI, page: ProblemPage) -> None:
    """Make `app` answer every error with a problem document; browsers get `page`."""
    app.state.problem_page = page
    app.add_exception_handler(PlannerError, _on_planner_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(StoreError, _on_store_error)


def _wants_page(request: Request) -> bool:
    """Whether a browser asked for a page; requests under ``/v1/`` always get documents."""
    return "text/html" in request.headers.get("accept", "") and not path_within(
        request.scope
    ).startswith("/v1/")


def _on_planner_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PlannerError)
    return problem_response(request, error)


def _on_invalid_request(request: Request, error: Exception) -> Response:
    """Answer invalid parameters; `planner.api.http.bodies` refuses invalid bodies."""
    assert isinstance(error, RequestValidationError)
    problems = tuple(map(_parameter_problem, error.errors()))
    return problem_response(request, DocumentError("", problems=problems))


def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer Starlette's errors: unknown path, wrong method, body that cannot be decoded."""
    assert isinstance(error, HTTPException)
    translated: PlannerError
    if isinstance(error, CarriedError):
        translated = error.error
    elif error.status_code == 404:
        translated = NotFoundError(
            f"no such path: {request.url.path}.", hint="see /docs for all paths."
        )
    elif error.status_code == 405:
        allowed = _allowed(request)
        translated = MethodError(
            f"{request.url.path} does not support {request.method}.",
            hint=f"use {allowed}.",
            headers={"Allow": allowed},
        )
    elif error.status_code == 400:
        translated = DocumentError(
            "the body is not valid JSON.", hint="send one JSON document in UTF-8."
        )
    else:
        translated = InternalError(error.detail)
    return problem_response(request, translated)


def _allowed(request: Request) -> str:
    """Methods of all routes of the path; Starlette lists those of the first only."""
    router = request.app.router
    takes = [
        method
        for method in METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in router.routes
        )
    ]
    return ", ".join(["GET", "HEAD", *takes[1:]] if "GET" in takes else takes)


def _on_store_error(request: Request, error: Exception) -> Response:
    """Answer 503 when the database cannot be written; nothing of the request is stored."""
    assert isinstance(error, StoreError)
    request_id = request.scope.get("request_id")
    logger.error("request %s: the database: %s", request_id, error.orig)
    refusal = NotReadyError(
        f"the database cannot be used: {error.orig}.",
        hint="try again later; the operator must check the disk.",
        retry_after_seconds=10,
    )
    return problem_response(request, refusal)


def _parameter_problem(details: Any) -> Problem:
    context = details.get("ctx", {})
    if details["type"] == "extra_forbidden":
        return Problem(
            path_of(details["loc"][1:]),
            "unknown parameter.",
            "remove it, or correct its name.",
        )
    bounds = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    hints = [
        f"{words} {context[key]}" for key, words in bounds.items() if key in context
    ]
    hint = f"give a value of {' and '.join(hints)}." if hints else ""
    return Problem(
        path_of(details["loc"][1:]),
        f"{details['msg']}, got {details.get('input')!r}.",
        hint,
    )
