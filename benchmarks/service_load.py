"""An open-loop load for one HTTP route, over raw connections.

A client library in Python is slower than the service that it measures. So requests are
bytes that were encoded once, and of a response only status and length are read.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import urlsplit

CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class Route:
    """One request to one server."""

    address: str
    """``http://HOST:PORT``."""
    method: str
    path: str
    body: Any = None
    """A JSON document; None: no body."""

    def encoded(self) -> bytes:
        """The request as it is sent."""
        content = b"" if self.body is None else json.dumps(self.body).encode()
        lines = [f"{self.method} {self.path} HTTP/1.1"]
        lines.append(f"Host: {urlsplit(self.address).netloc}")
        if self.body is not None:
            lines.append("Content-Type: application/json")
            lines.append(f"Content-Length: {len(content)}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@dataclass(frozen=True, slots=True)
class Load:
    """What a load brought."""

    latencies_seconds: tuple[float, ...]
    """From the moment at which a request was due to the end of its response."""
    errors: int
    """Responses with another status than 200, and broken connections."""
    seconds: float

    @property
    def rate(self) -> float:
        """Responses per second."""
        return len(self.latencies_seconds) / self.seconds

    def quantile_ms(self, probability: float) -> float:
        """A quantile of the latencies in milliseconds."""
        ordered = sorted(self.latencies_seconds)
        index = math.ceil(probability * len(ordered)) - 1
        return 1000 * ordered[max(0, index)]


def top_rate(route: Route, seconds: float) -> Load:
    """Send as many requests as the server answers, over all connections."""
    return asyncio.run(_load(route, seconds, rate=None, connections=CONNECTIONS))


def steady(route: Route, seconds: float, rate: float) -> Load:
    """Send requests at a fixed rate, whether or not the server keeps up."""
    return asyncio.run(_load(route, seconds, rate=rate, connections=CONNECTIONS))


def one_by_one(route: Route, seconds: float) -> Load:
    """Send each request after the response to the one before."""
    return asyncio.run(_load(route, seconds, rate=None, connections=1))


async def _load(
    route: Route, seconds: float, *, rate: float | None, connections: int
) -> Load:
    start = time.monotonic()
    senders = _Senders(route, count(), rate, start, start + seconds)
    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(senders.send())
    taken = time.monotonic() - start
    return Load(tuple(senders.latencies_seconds), senders.errors, taken)


class _Senders:
    """Connections that share one sequence of requests."""

    def __init__(
        self,
        route: Route,
        numbers: Iterator[int],
        rate: float | None,
        start: float,
        end: float,
    ) -> None:
        self._request = route.encoded()
        place = urlsplit(route.address)
        self._host, self._port = str(place.hostname), int(place.port or 80)
        self._numbers, self._rate = numbers, rate
        self._start, self._end = start, end
        self.latencies_seconds: list[float] = []
        self.errors = 0

    async def send(self) -> None:
        """Send requests over one connection until the end."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        while True:
            due = self._due()
            if max(due, time.monotonic()) >= self._end:
                break
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            writer.write(self._request)
            try:
                status = await _status(reader)
            except (OSError, EOFError):
                self.errors += 1
                break
            self.errors += status != 200
            self.latencies_seconds.append(time.monotonic() - due)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    def _due(self) -> float:
        """When the next request is due; without a rate: now."""
        if self._rate is None:
            return time.monotonic()
        return self._start + next(self._numbers) / self._rate


async def _status(reader: asyncio.StreamReader) -> int:
    """Read a response, and return its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, _, rest = head.partition(b"content-length: ")
    length = int(rest.partition(b"\r\n")[0]) if rest else 0
    await reader.readexactly(length)
    return int(head.split(b" ", 2)[1])
