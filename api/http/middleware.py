"""Middleware: request ids, unexpected errors, the size of bodies, and HEAD."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.api.errors import (
    BodyTooLargeError,
    InternalError,
    MediaTypeError,
    RequestTimeoutError,
    ServiceError,
)
from planner.api.http.links import path_within, root_of
from planner.api.http.problems import CarriedError, problem_response
from planner.api.limits import BODY_BYTES_PER_SECOND, BODY_SECONDS, body_bytes

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
        except ClientDisconnect:
            logger.debug("request %s: the client has gone", request_id)
        except Exception:
            logger.exception(
                "request %s: %s %r failed", request_id, scope["method"], scope["path"]
            )
            if started:  # too late for another response: the connection is closed
                raise
            error = InternalError(
                f"an unexpected error; see {request_id} in the service's log.",
                hint="try again; if it fails again, report it with this request_id.",
            )
            await problem_response(Request(scope), error)(scope, receive, send_with_id)


class BodyLimit:
    """Answer 413 to bodies above the limit of their path, and 408 to slow ones.

    The declared length counts, and the received one. Compressed bodies get 415, because
    their size is not known before decompression.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._most_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = min(self._most_bytes, body_bytes(path_within(scope)))
        refusal = _refusal_by_headers(Headers(scope=scope), limit)
        if refusal is not None:
            await problem_response(Request(scope), refusal)(scope, receive, send)
            return
        body = _Body(receive, limit)
        try:
            await self._app(scope, body.receive, send)
        except CarriedError as carried:  # a middleware, not a route, has read the body
            await problem_response(Request(scope), carried.error)(scope, receive, send)


class _Body:
    """A body that is being received."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._received = 0
        self._is_complete = False
        self._start: float | None = None

    async def receive(self) -> Message:
        """Return the next part of the body, or the disconnect (ASGI).

        Raises:
            CarriedError: the body is too large, or too slow.
        """
        if self._is_complete:
            return await self._receive()
        loop = asyncio.get_running_loop()
        if self._start is None:
            self._start = loop.time()
        seconds = BODY_SECONDS + self._received / BODY_BYTES_PER_SECOND
        try:
            async with asyncio.timeout_at(self._start + seconds):
                message = await self._receive()
        except TimeoutError:
            raise CarriedError(_too_slow(self._received)) from None
        self._received += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if self._received > self._limit:
            raise CarriedError(_too_large(self._limit))
        return message


def _refusal_by_headers(headers: Headers, limit: int) -> ServiceError | None:
    coding = headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        return _compressed(coding)
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        return _too_large(limit)
    return None


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body is larger than {limit} bytes.",
        hint="send a smaller document; store a large profile by POST /v1/profiles.",
        limits={"max_body_bytes": limit},
        headers={"Connection": "close"},
    )


def _too_slow(received: int) -> RequestTimeoutError:
    return RequestTimeoutError(
        f"only {received} bytes of the body arrived in time.",
        hint="send the body without pauses.",
        limits={
            "body_seconds": BODY_SECONDS,
            "body_bytes_per_second": BODY_BYTES_PER_SECOND,
        },
        headers={"Connection": "close"},
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
