"""Answers that never change, in memory: a cache in front of the routes (RFC 9111).

It has answers with status 200 that a route declares immutable: to GET by the path, and to
POST of a plan by the body. Keys, host names and limits of bodies are checked before it.

A deletion clears it, because deletions are rare. With PostgreSQL, other services delete
too: there an answer is used for `SHARED_SECONDS`, and then read from the database again.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachetools import TTLCache
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.api.http.caching import FOREVER, matches
from planner.api.http.links import path_within
from planner.api.limits import MEBIBYTE, SMALL_BODY_BYTES
from planner.api.metrics import Metrics

MOST_BYTES = 64 * MEBIBYTE
"""Memory of all answers; the least recently used ones make place for others."""
LARGEST_ANSWER_BYTES = MEBIBYTE
ENTRY_BYTES = 2048
"""Memory of an answer besides its body, about."""
SHARED_SECONDS = 2.0
"""How long an answer is used if other services can delete what it shows."""
PLANS = "/v1/plans"
HIT = (b"cache-status", b"planner; hit")
"""RFC 9211."""
OF_BODY = frozenset({b"content-length", b"content-type", b"cache-status"})
"""Headers that an answer without its body does not repeat."""

Key = tuple[str, ...]
RawHeaders = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """A response with status 200."""

    headers: RawHeaders
    tag: str
    """Its ETag."""
    body: bytes

    @property
    def size(self) -> int:
        """Memory in bytes, about."""
        return len(self.body) + ENTRY_BYTES

    async def send(self, send: Send, if_none_match: str) -> None:
        """Send the response, or 304 if the client has it (ASGI)."""
        status, headers, body = 200, [*self.headers], self.body
        if matches(if_none_match, self.tag):
            status, body = 304, b""
            headers = [each for each in headers if each[0] not in OF_BODY]
            headers.append(HIT)
        start = {"type": "http.response.start", "status": status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body})


class KnownAnswers:
    """Answers in memory, bounded by their bytes. Thread-safe.

    Args:
        shared: whether other services use the same database.
        clock: in seconds.
    """

    def __init__(
        self, *, shared: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._answers = TTLCache[Key, KnownAnswer](
            MOST_BYTES,
            SHARED_SECONDS if shared else math.inf,
            clock,
            getsizeof=lambda answer: answer.size,
        )
        self._lock = threading.Lock()
        self.deletions = 0
        """How often the answers were cleared."""

    def find(self, key: Key) -> KnownAnswer | None:
        """The answer to a request, if it is known."""
        with self._lock:
            return self._answers.get(key)

    def add(self, key: Key, answer: KnownAnswer, *, deletions: int) -> None:
        """Remember an answer.

        Args:
            key: of the request.
            answer: to it.
            deletions: as it was before the answer was read from the database. A deletion
                since then may be of what it shows.
        """
        with self._lock:
            if deletions == self.deletions:
                self._answers[key] = answer

    def clear(self) -> None:
        """Forget all answers, because something was deleted from the database."""
        with self._lock:
            self.deletions += 1
            self._answers.clear()


class AnswerFromMemory:
    """Middleware that answers known requests, and remembers the answers to others."""

    def __init__(self, app: ASGIApp, answers: KnownAnswers, metrics: Metrics) -> None:
        self._app = app
        self._answers = answers
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http" or not _has_key(scope):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key: Key = (scope["path"],)
        if scope["method"] == "POST":
            body = _Body(receive)
            receive = body.receive_again
            digest = hashlib.sha256(await body.read()).hexdigest()
            key = (scope["path"], headers.get("content-type", ""), digest)
        answer = self._answers.find(key)
        if answer is None:
            recorder = _Recorder(send, key, self._answers)
            await self._app(scope, receive, recorder.send)
            return
        if scope["method"] == "POST":
            self._metrics.count_known_plan()
        await answer.send(send, headers.get("if-none-match", ""))


def _has_key(scope: Scope) -> bool:
    """Whether the answer may be known: no query or If-Match, GET or a small POST."""
    if scope["query_string"]:
        return False
    headers = Headers(scope=scope)
    if "if-match" in headers:
        return False
    if scope["method"] == "GET":
        return True
    length = headers.get("content-length", "")
    is_small = length.isdecimal() and int(length[:9]) <= SMALL_BODY_BYTES
    return scope["method"] == "POST" and is_small and path_within(scope) == PLANS


class _Body:
    """A small body, which is read here first and then once more by the application."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []

    async def read(self) -> bytes:
        """Read the body, or what arrives of it before the client goes."""
        more = True
        while more:
            message = await self._receive()
            self._messages.append(message)
            more = message.get("more_body", False)
        return b"".join(message.get("body", b"") for message in self._messages)

    async def receive_again(self) -> Message:
        """Return what was read, and then what follows (ASGI)."""
        if self._messages:
            return self._messages.pop(0)
        return await self._receive()


class _Recorder:
    """Remembers the response that it sends, if that never changes."""

    def __init__(self, send: Send, key: Key, answers: KnownAnswers) -> None:
        self._send = send
        self._key = key
        self._answers = answers
        self._deletions = answers.deletions
        self._headers: RawHeaders | None = None
        """Those of a response in one part that never changes."""

    async def send(self, message: Message) -> None:
        """Send a part of the response (ASGI)."""
        if message["type"] == "http.response.start":
            self._start(message)
        elif message.get("more_body", False):
            self._headers = None
        elif self._headers is not None:
            self._remember(self._headers, message.get("body", b""))
        await self._send(message)

    def _start(self, message: Message) -> None:
        headers = Headers(raw=message["headers"])
        length = int(headers.get("content-length", LARGEST_ANSWER_BYTES))
        if (
            message["status"] == 200
            and headers.get("cache-control") == FOREVER
            and "vary" not in headers
            and "etag" in headers
            and length < LARGEST_ANSWER_BYTES
        ):
            others = [each for each in headers.raw if each[0] != HIT[0]]
            self._headers = (*others, HIT)

    def _remember(self, headers: RawHeaders, body: bytes) -> None:
        tag = Headers(raw=list(headers))["etag"]
        answer = KnownAnswer(headers, tag, body)
        self._answers.add(self._key, answer, deletions=self._deletions)
