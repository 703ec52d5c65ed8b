"""Middleware: request ids, unexpected errors, the size of bodies, and HEAD."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.api.errors import BodyTooLargeError, InternalError, MediaTypeError
from planner.api.links import root_of
from planner.api.problems import CarriedError, problem_response

logger = logging.getLogger("planner.api")

LOCATIONS = ("Location", "Content-Location")
DEFAULTS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
}
"""Headers that a response has unless it sets its own: no caching, and no scripts."""
PLAUSIBLE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestContext:
    """Give every request an id, and answer 500 to unexpected exceptions.

    The id is the caller's ``X-Request-ID`` if that is plain text. Response, problem
    document and log have the id, so that a report leads to its traceback. Locations in
    headers get the prefix of a reverse proxy.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["request_id"] = request_id = _request_id(Headers(scope=scope))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                for name, value in DEFAULTS.items():
                    headers.setdefault(name, value)
                for name in LOCATIONS:
                    if headers.get(name, "").startswith("/"):
                        headers[name] = root_of(scope) + headers[name]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception(
                "request %s: %s %s failed", request_id, scope["method"], scope["path"]
            )
            if started:  # too late for another response: the connection is closed
                raise
            error = InternalError(
                f"an unexpected error; see {request_id} in the service's log.",
                hint="try again; if it fails again, report it with this request_id.",
            )
            await problem_response(Request(scope), error)(scope, receive, send_with_id)


class BodyLimit:
    """Answer 413 to bodies above the limit, by their declared or their received length.

    Compressed bodies get 415, because their size is not known before decompression.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if headers.get("content-encoding", "identity").lower() != "identity":
            await problem_response(
                Request(scope), _compressed(headers["content-encoding"])
            )(scope, receive, send)
            return
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limit:
            await problem_response(Request(scope), self._refusal())(
                scope, receive, send
            )
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise CarriedError(self._refusal())
            return message

        await self._app(scope, receive_limited, send)

    def _refusal(self) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the body is larger than {self._limit} bytes.",
            hint="send a smaller profile (fewer measurements), or raise max_body_bytes of the service.",
            limits={"max_body_bytes": self._limit},
        )


class Head:
    """Answer HEAD as GET, without the body (RFC 9110, section 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        answered = asyncio.Event()

        async def receive_nothing() -> Message:
            await answered.wait()  # then event streams end
            return {"type": "http.disconnect"}

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                answered.set()

        await self._app({**scope, "method": "GET"}, receive_nothing, send_head)


def _compressed(coding: str) -> MediaTypeError:
    return MediaTypeError(
        f"the body is compressed: {coding!r}.",
        field="Content-Encoding",
        hint="send it without compression.",
        headers={"Accept-Encoding": "identity"},
    )


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if PLAUSIBLE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
