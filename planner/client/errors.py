"""Exceptions of the client.

    PlannerError
    ├── SpecError and its classes    the service found the request wrong (422)
    └── RunError
        └── ClientError              base class: `url` and `status` of the response
            ├── UnreachableError     no connection, or no response in time
            ├── BusyError            the service is full or not ready (429, 502 to 504)
            ├── RefusedError         wrong key, unknown resource, limit (other 4xx)
            ├── JobError             the search failed, was cancelled, or takes too long
            └── ResponseError        500, a redirect, or no answer of a planner's service

A problem document (RFC 9457) of the service becomes one of these: its `errors` are the
`problems` of the exception, and its `code` is the code of the exception.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2

from planner.errors import (
    DocumentError,
    LayoutError,
    MismatchError,
    PlannerError,
    Problem,
    RunError,
    ScheduleError,
    SpecError,
    UnknownNameError,
    UnsupportedError,
)

BUSY = (429, 502, 503, 504)
"""Statuses of a service, or a proxy before it, that may answer later."""
LONGEST_DETAIL = 500
"""Characters of an unknown response that an error message quotes."""


class ClientError(RunError):
    """The service did not do what was asked.

    Args:
        message: what went wrong.
        url: of the request.
        status: of the response; None: there is none.
        field: None: the URL.
        hint: one action that fixes it.
        problems: all problems at once, in place of `message`, `field` and `hint`.
        code: of the problem document; empty: that of the class.
    """

    code = "service-failed"
    title = "The service did not do what was asked"

    def __init__(
        self,
        message: str,
        *,
        url: str,
        status: int | None = None,
        field: str | None = None,
        hint: str = "",
        problems: tuple[Problem, ...] = (),
        code: str = "",
    ) -> None:
        place = url if field is None else field
        super().__init__(message, field=place, hint=hint, problems=problems)
        self.url = url
        self.status = status
        self.code = code or type(self).code


class UnreachableError(ClientError):
    """The service cannot be reached, or sent no response in time."""

    code = "service-unreachable"
    title = "The service does not answer"


class BusyError(ClientError):
    """The service takes no more work now; all retries were used."""

    code = "service-busy"
    title = "The service is busy"


class RefusedError(ClientError):
    """The service refused the request."""

    code = "request-refused"
    title = "The service refused the request"


class JobError(ClientError):
    """A search failed, was cancelled, or did not end in time."""

    code = "job-failed"
    title = "The search of the service ended without a result"


class ResponseError(ClientError):
    """The response is not one of a planner's service, or reports a defect of it."""

    code = "unusable-response"
    title = "The service's response cannot be used"


SPEC_ERRORS: dict[str, type[PlannerError]] = {
    kind.code: kind
    for kind in (
        SpecError,
        DocumentError,
        UnknownNameError,
        LayoutError,
        MismatchError,
        ScheduleError,
        UnsupportedError,
    )
}
"""Errors of a request, by the code that they have in problem documents."""


def error_of(response: httpx2.Response) -> PlannerError:
    """Return the exception for a response that is no success."""
    url = str(response.request.url)
    status = response.status_code
    if response.is_redirect:
        return ResponseError(
            f"redirects to {response.headers.get('Location')}.",
            url=url,
            status=status,
            hint="pass the address of the service itself.",
        )
    document = _document(response)
    if "code" not in document:
        text = response.text[:LONGEST_DETAIL]
        kind = _kind_of(status)
        return kind(f"answered {status}: {text}", url=url, status=status)
    return error_of_problem(document, url=url, status=status)


def error_of_problem(
    document: dict[str, Any], *, url: str, status: int
) -> PlannerError:
    """Return the exception for a problem document.

    Args:
        document: as the service sent it.
        url: of the request.
        status: of the response, or of the problem in a job.
    """
    code = str(document["code"])
    problems = tuple(map(_problem, document.get("errors", ())))
    if code in SPEC_ERRORS:
        message = str(document.get("detail", "the request is not valid."))
        return SPEC_ERRORS[code](message, problems=problems)
    detail = document.get("detail") or document.get("title", "")
    return _kind_of(status)(
        f"answered {status}: {detail}",
        url=url,
        status=status,
        problems=problems,
        code=code,
    )


def _kind_of(status: int) -> type[ClientError]:
    if status in BUSY:
        return BusyError
    return RefusedError if 400 <= status < 500 else ResponseError


def _document(response: httpx2.Response) -> dict[str, Any]:
    """The JSON object of a response; empty if it is none."""
    try:
        document = json.loads(response.content)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _problem(item: dict[str, Any]) -> Problem:
    field = str(item.get("field", ""))
    message = str(item.get("message", ""))
    hint = str(item.get("hint", ""))
    return Problem(field, message, hint)
