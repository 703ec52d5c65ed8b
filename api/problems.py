"""RFC 9457 problem documents: every error leaves the service through this file.

PlannerError, ServiceError          -> its own code, title and status
wrong body, parameter or header     -> DocumentError (422), one entry per mistake, each with field, pointer and hint
unknown path, wrong method          -> 404, 405
the database's disk is full, read-only -> 503
anything else                       -> 500 with the request's id; the traceback goes to the log only (`planner.api.middleware`)
"""

from __future__ import annotations

import logging
import sqlite3
import typing
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from planner.api.documents import ErrorItem, ProblemDocument
from planner.api.errors import (
    InternalError,
    MediaTypeError,
    MethodError,
    NotFoundError,
    NotReadyError,
    ServiceError,
    status_of,
)
from planner.api.links import path_within
from planner.errors import DocumentError, PlannerError, Problem
from planner.spec.document import Location, located_problems, path_of

logger = logging.getLogger("planner.api")

MEDIA_TYPE = "application/problem+json"
MOST_ERRORS = 50
"""Mistakes that one document tells; a client that made more has made one many times."""
LONGEST_TEXT = 2000
"""Characters of a field, message or hint: what a client sent is not sent back whole."""
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")

RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "An error: what is wrong, where it stands, and how to fix it (RFC 9457).",
        "content": {
            MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}
        },
    }
}
"""For every operation in the OpenAPI document."""

ProblemPage = Callable[[Request, ProblemDocument], Response]


class LocatedError(DocumentError):
    """A `DocumentError` that also knows where in the request body each problem stands."""

    def __init__(self, located: Sequence[tuple[Problem, str | None]]) -> None:
        super().__init__("", problems=tuple(problem for problem, _ in located))
        self.pointers = tuple(pointer for _, pointer in located)


class CarriedError(HTTPException):
    """Carries one of our errors through FastAPI's body parser, which lets only this kind of exception pass."""

    def __init__(self, error: ServiceError) -> None:
        super().__init__(status_code=error.status)
        self.error = error


def document_of(
    error: PlannerError, *, request_id: str | None = None
) -> ProblemDocument:
    """The problem document of an error."""
    pointers = (
        error.pointers
        if isinstance(error, LocatedError)
        else (None,) * len(error.problems)
    )
    told = [
        ErrorItem(
            field=_clipped(problem.field),
            pointer=pointer
            if pointer is None or len(pointer) <= LONGEST_TEXT
            else None,
            message=_clipped(problem.message),
            hint=_clipped(problem.hint),
        )
        for problem, pointer in zip(
            error.problems[:MOST_ERRORS], pointers, strict=False
        )
    ]
    lines = [str(Problem(item.field, item.message, item.hint)) for item in told]
    if len(error.problems) > len(told):
        lines.append(f"And {len(error.problems) - len(told)} mistakes more.")
    limits = error.limits if isinstance(error, ServiceError) else None
    return ProblemDocument(
        type=f"/problems/{error.code}",
        title=error.title,
        status=status_of(error),
        detail="\n".join(lines),
        code=error.code,
        errors=tuple(told),
        limits=dict(limits) if limits else None,
        request_id=request_id,
    )


def _clipped(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


def response_of(document: ProblemDocument) -> JSONResponse:
    """The HTTP response that carries a problem document."""
    body = document.model_dump(mode="json", exclude_none=True)
    return JSONResponse(body, status_code=document.status, media_type=MEDIA_TYPE)


def problem_response(request: Request, error: PlannerError) -> Response:
    """Answer a request with an error, and count it: with a page where a browser asked for one."""
    request.app.state.metrics.problems.add(code=error.code)
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
    """Make `app` answer every error with a problem document, or with a page that says the same."""
    app.state.problem_page = page
    app.add_exception_handler(PlannerError, _on_planner_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(sqlite3.OperationalError, _on_store_error)


def _wants_page(request: Request) -> bool:
    """Documents are never answered with a page, whoever asks for them."""
    return "text/html" in request.headers.get("accept", "") and not path_within(
        request.scope
    ).startswith("/v1/")


def _on_planner_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PlannerError)
    return problem_response(request, error)


def _on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem_response(request, _error_of_request(request, error))


def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no route, no such method, or a body whose JSON cannot even be decoded (FastAPI's 400)."""
    assert isinstance(error, HTTPException)
    translated: PlannerError
    if isinstance(error, CarriedError):
        translated = error.error
    elif error.status_code == 404:
        translated = NotFoundError(
            f"there is no {request.url.path}.", hint="see /openapi.json for all paths."
        )
    elif error.status_code == 405:
        allowed = _allowed(request)
        translated = MethodError(
            f"{request.url.path} does not take {request.method}.",
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
    """Methods that the path takes, of all its routes (Starlette tells those of the first); HEAD goes where GET does."""
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
    """A full or read-only disk is the operator's to fix; nothing of the request was stored."""
    logger.error("request %s: the database: %s", request.scope.get("request_id"), error)
    refusal = NotReadyError(
        f"the database cannot be used: {error}.",
        hint="ask again later; its operator has to look after its disk.",
        retry_after_seconds=10,
    )
    return problem_response(request, refusal)


def _error_of_request(request: Request, error: RequestValidationError) -> PlannerError:
    details = error.errors()
    broken = next((each for each in details if each["type"] == "json_invalid"), None)
    if broken is not None:
        return DocumentError(
            f"the body is not valid JSON: {broken['ctx']['error']} (character {broken['loc'][-1]}).",
            hint="send one JSON document.",
        )
    if isinstance(error.body, bytes):
        return MediaTypeError(
            f"the body was sent as {request.headers.get('content-type', 'no type')!r}.",
            field="Content-Type",
            hint="send the header Content-Type: application/json.",
            headers={"Accept": "application/json"},
        )
    located: list[tuple[Problem, str | None]] = [
        (_parameter_problem(each), None) for each in details if each["loc"][0] != "body"
    ]
    if any(each["loc"][0] == "body" for each in details):
        located += _body_problems(_body_kind(request), error.body)
    return LocatedError(located)


def _parameter_problem(details: Any) -> Problem:
    context = details.get("ctx", {})
    if details["type"] == "extra_forbidden":
        return Problem(
            path_of(details["loc"][1:]),
            "unknown parameter.",
            "leave it out, or correct its name.",
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


def _body_kind(request: Request) -> type[BaseModel]:
    """The type of the endpoint's body: its one parameter that is a pydantic model."""
    hints = typing.get_type_hints(request.scope["endpoint"])
    hints.pop("return", None)
    return next(
        hint
        for hint in hints.values()
        if isinstance(hint, type) and issubclass(hint, BaseModel)
    )


def _body_problems(
    kind: type[BaseModel], data: Any
) -> list[tuple[Problem, str | None]]:
    if data is None:
        return [
            (Problem("", "the request has no body.", "send a JSON document."), None)
        ]
    choose = getattr(kind, "kind_of", None)
    kind = choose(data) if choose else kind
    try:
        kind.model_validate(data)
    except ValidationError as error:
        return [
            (problem, json_pointer(location))
            for location, problem in located_problems(error, kind, data)
        ]
    raise AssertionError(f"{kind.__name__} accepts a body that its endpoint refused")


def json_pointer(location: Location) -> str:
    """``("stages", 0, "a/b")`` -> ``/stages/0/a~1b`` (RFC 6901)."""
    return "".join(
        "/" + str(part).replace("~", "~0").replace("/", "~1") for part in location
    )
