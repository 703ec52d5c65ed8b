"""RFC 9457 problem documents: every error leaves the service through this file.

PlannerError, ServiceError          -> its own code, title and status
wrong body, parameter or header     -> DocumentError (422), one entry per mistake, each with field, pointer and mend
unknown path, wrong method          -> 404, 405
anything else                       -> 500 with the request's id; the traceback goes to the log only (`api.middleware`)
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from api.documents import ErrorItem, ProblemDocument
from api.errors import InternalError, MediaTypeError, MethodError, NotFoundError, ServiceError, status_of
from api.links import path_within
from planner.errors import DocumentError, PlannerError, Problem
from planner.spec.document import Location, located_problems, path_of

MEDIA_TYPE = "application/problem+json"

RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "An error: what is wrong, where it stands, and how to mend it (RFC 9457).",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
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


def document_of(error: PlannerError, *, request_id: str | None = None) -> ProblemDocument:
    """The problem document of an error."""
    pointers = error.pointers if isinstance(error, LocatedError) else (None,) * len(error.problems)
    limits = error.limits if isinstance(error, ServiceError) else None
    return ProblemDocument(
        type=f"/problems/{error.code}",
        title=error.title,
        status=status_of(error),
        detail=str(error),
        code=error.code,
        errors=tuple(
            ErrorItem(field=problem.field, pointer=pointer, message=problem.message, mend=problem.mend)
            for problem, pointer in zip(error.problems, pointers, strict=True)
        ),
        limits=dict(limits) if limits else None,
        request_id=request_id,
    )


def response_of(document: ProblemDocument) -> JSONResponse:
    """The HTTP response that carries a problem document."""
    body = document.model_dump(mode="json", exclude_none=True)
    return JSONResponse(body, status_code=document.status, media_type=MEDIA_TYPE)


def problem_response(request: Request, error: PlannerError) -> Response:
    """Answer a request with an error, and count it: with a page where a browser asked for one."""
    request.app.state.metrics.problems.add(code=error.code)
    document = document_of(error, request_id=request.scope.get("request_id"))
    response = request.app.state.problem_page(request, document) if _wants_page(request) else response_of(document)
    if isinstance(error, ServiceError) and error.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(error.retry_after_seconds)
    return response


def install(app: FastAPI, page: ProblemPage) -> None:
    """Make `app` answer every error with a problem document, or with a page that says the same."""
    app.state.problem_page = page
    app.add_exception_handler(PlannerError, _on_planner_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)


def _wants_page(request: Request) -> bool:
    """Documents are never answered with a page, whoever asks for them."""
    return "text/html" in request.headers.get("accept", "") and not path_within(request.scope).startswith("/v1/")


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
        translated = NotFoundError(f"there is no {request.url.path}.", mend="see /openapi.json for all paths.")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        translated = MethodError(f"{request.url.path} does not take {request.method}.", mend=f"use {allowed}.")
    elif error.status_code == 400:
        translated = DocumentError("the body is not valid JSON.", mend="send one JSON document in UTF-8.")
    else:
        translated = InternalError(error.detail)
    response = problem_response(request, translated)
    response.headers.update(error.headers or {})
    return response


def _error_of_request(request: Request, error: RequestValidationError) -> PlannerError:
    details = error.errors()
    broken = next((each for each in details if each["type"] == "json_invalid"), None)
    if broken is not None:
        return DocumentError(
            f"the body is not valid JSON: {broken['ctx']['error']} (character {broken['loc'][-1]}).",
            mend="send one JSON document.",
        )
    if isinstance(error.body, bytes):
        return MediaTypeError(
            f"the body was sent as {request.headers.get('content-type', 'no type')!r}.",
            field="Content-Type",
            mend="send the header Content-Type: application/json.",
        )
    located: list[tuple[Problem, str | None]] = [
        (_parameter_problem(each), None) for each in details if each["loc"][0] != "body"
    ]
    if any(each["loc"][0] == "body" for each in details):
        located += _body_problems(_body_kind(request), error.body)
    return LocatedError(located)


def _parameter_problem(details: Any) -> Problem:
    context = details.get("ctx", {})
    bounds = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    mends = [f"{words} {context[key]}" for key, words in bounds.items() if key in context]
    mend = f"give a value of {' and '.join(mends)}." if mends else ""
    return Problem(path_of(details["loc"][1:]), f"{details['msg']}, got {details.get('input')!r}.", mend)


def _body_kind(request: Request) -> type[BaseModel]:
    """The type of the endpoint's body: its one parameter that is a pydantic model."""
    hints = typing.get_type_hints(request.scope["endpoint"])
    hints.pop("return", None)
    return next(hint for hint in hints.values() if isinstance(hint, type) and issubclass(hint, BaseModel))


def _body_problems(kind: type[BaseModel], data: Any) -> list[tuple[Problem, str | None]]:
    if data is None:
        return [(Problem("", "the request has no body.", "send a JSON document."), None)]
    choose = getattr(kind, "kind_of", None)
    kind = choose(data) if choose else kind
    try:
        kind.model_validate(data)
    except ValidationError as error:
        return [(problem, json_pointer(location)) for location, problem in located_problems(error, kind, data)]
    raise AssertionError(f"{kind.__name__} accepts a body that its endpoint refused")


def json_pointer(location: Location) -> str:
    """``("stages", 0, "a/b")`` -> ``/stages/0/a~1b`` (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in location)
