"""Two layers around every request: an id and a last catch for errors, and a limit on the body's size."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import BodyTooLargeError, InternalError
from api.links import root_of
from api.problems import CarriedError, problem_response

logger = logging.getLogger("api")

LOCATIONS = ("Location", "Content-Location")
PLAUSIBLE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestContext:
    """Give every request an id (the caller's ``X-Request-ID`` if it is plain), and turn what nobody caught into a 500.

    The id stands in the response, in problem documents and in the log, so that a user's report finds its traceback.
    Locations in headers get the prefix of the reverse proxy, where there is one.
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
                for name in LOCATIONS:
                    if headers.get(name, "").startswith("/"):
                        headers[name] = root_of(scope) + headers[name]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if started:  # half a response is out: only closing the connection tells the client
                raise
            error = InternalError(
                f"an unexpected error; the service's log has it under {request_id}.",
                mend="try again; if it stays, report it with this request_id.",
            )
            await problem_response(Request(scope), error)(scope, receive, send_with_id)


class BodyLimit:
    """Refuse larger bodies with 413: at once when the length is declared, else as soon as they pass the limit."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limit:
            await problem_response(Request(scope), self._refusal())(scope, receive, send)
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
            mend="send a smaller profile (fewer measurements), or raise max_body_bytes of the service.",
            limits={"max_body_bytes": self._limit},
        )


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if PLAUSIBLE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
