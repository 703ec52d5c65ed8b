"""HTTP connections that no client can exhaust: deadlines, and a limit on their number.

uvicorn has neither: `limit_concurrency` counts open connections, and then answers
everyone 503, the health check too. Here a new connection is always accepted. Above the
limit, the connection that has waited longest for its client is closed for it; clients
that are being answered are not disturbed. Only if all are, the new one gets 503.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any, cast

from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGISendCallable,
    Scope,
)
from uvicorn.protocols.http.h11_impl import H11Protocol

from planner.api.errors import NotReadyError
from planner.api.http.problems import document_of, response_of
from planner.api.limits import HEADER_SECONDS, MOST_CONNECTIONS, WRITE_SECONDS

HEALTH = "/healthz"
RETRY_SECONDS = 5
RECORDS_PER_MINUTE = 20
"""Records of one message that are logged in a minute."""
MINUTE_SECONDS = 60.0


class BoundedProtocol(H11Protocol):
    """An HTTP/1.1 connection with a deadline for everything that its client must do."""

    _deadline: asyncio.TimerHandle | None = None
    _waits_since = 0.0
    """When the client last completed what the service waits for; loop time."""

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Start the deadline of the first request, and limit the connections."""
        super().connection_made(transport)
        self._wait_for_client(HEADER_SECONDS)
        if len(self.connections) > most_connections():
            self._make_place()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle bytes; those of incomplete headers do not extend the deadline."""
        super().data_received(data)
        if not self._awaits_headers:
            self._stop_deadline()
        elif self._deadline is None:
            self._wait_for_client(HEADER_SECONDS)

    def pause_writing(self) -> None:
        """Start the deadline of a client that does not read its answer."""
        super().pause_writing()
        self._wait_for_client(WRITE_SECONDS)

    def resume_writing(self) -> None:
        """Stop the deadline: the client reads."""
        super().resume_writing()
        self._stop_deadline()

    @property
    def waits_for_client(self) -> bool:
        """Whether the client must send headers or a body, or read its answer."""
        if self._awaits_headers or self.flow.write_paused:
            return True
        return self.cycle.more_body and not self.cycle.response_started

    @property
    def _awaits_headers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_client(self, seconds: float) -> None:
        self._stop_deadline()
        self._waits_since = self.loop.time()
        self._deadline = self.loop.call_later(seconds, self._abort)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._waits_since = self.loop.time()

    def _make_place(self) -> None:
        """Close the connection that has waited longest, else answer 503 on this one."""
        others = [cast("BoundedProtocol", each) for each in self.connections - {self}]
        waiting = [each for each in others if each.waits_for_client]
        if waiting:
            min(waiting, key=lambda each: each._waits_since)._abort()
            return
        self.app = _Busy(self.app)

    def _abort(self) -> None:
        """Close the connection, and let go of it at once."""
        self.connections.discard(self)
        self.transport.abort()


def most_connections() -> int:
    """Connections that may be open: at most half of the process's descriptors."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MOST_CONNECTIONS, descriptors // 2)


class _Busy:
    """Answers 503 for the application, except to the health check (ASGI)."""

    def __init__(self, app: ASGI3Application) -> None:
        self._app = app

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Answer one request, and close its connection."""
        if scope["type"] == "http" and scope["path"].endswith(HEALTH):
            await self._app(scope, receive, send)
            return
        limit = most_connections()
        error = NotReadyError(
            f"{limit} requests are being answered.",
            hint="try again later, or use another replica.",
            limits={"max_connections": limit},
            retry_after_seconds=RETRY_SECONDS,
            headers={"Connection": "close"},
        )
        response = response_of(document_of(error))
        response.headers.update(error.headers)
        await response(cast(Any, scope), cast(Any, receive), cast(Any, send))


class SparseLog(logging.Filter):
    """Drop repetitions of a message: clients cause some, and could fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._minute = 0
        self._records: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record; the last of a minute says that more follow."""
        minute = int(record.created // MINUTE_SECONDS)
        if minute != self._minute:
            self._minute = minute
            self._records.clear()
        count = self._records.get(record.msg, 0) + 1
        self._records[record.msg] = count
        if count == RECORDS_PER_MINUTE:
            record.msg = f"{record.msg} (repetitions in this minute are not logged)"
        return count <= RECORDS_PER_MINUTE
