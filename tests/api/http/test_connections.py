"""Clients that stall, flood or do not read: others are served, and nothing grows."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import pytest

from planner.api.http.connections import SparseLog
from planner.api.settings import Settings
from tests.api.documents import plan_body
from tests.api.fakes import Gated, Instant
from tests.api.live import PATIENCE_SECONDS, Live, running, until

CONNECTIONS = "planner.api.http.connections."


@contextmanager
def stalled(live: Live, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Connections that sent some bytes and wait."""
    address = ("127.0.0.1", live.client.base_url.port)
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(address))
            client.settimeout(10)
            client.sendall(sent)
            found.append(client)
        yield found


def wait_until_closed(client: socket.socket) -> None:
    """Read until the service closes the connection; `TimeoutError` if it does not."""
    with suppress(ConnectionResetError):
        while client.recv(1 << 16):
            pass


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: lo",
        b"POST /v1/plans HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    ],
    ids=["nothing", "headers", "body"],
)
def test_health_is_answered_while_connections_stall(
    settings: Settings, journal: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Far more stalled connections than the limit: the service has no more than that,
    also before the first deadline."""
    monkeypatch.setattr(CONNECTIONS + "MOST_CONNECTIONS", 50)
    monkeypatch.setattr(CONNECTIONS + "HEADER_SECONDS", 10 * PATIENCE_SECONDS)
    monkeypatch.setattr(
        "planner.api.http.middleware.BODY_SECONDS", 10 * PATIENCE_SECONDS
    )
    with running(settings, Instant(journal)) as live, stalled(live, 300, sent):
        for _ in range(5):
            answer = httpx2.get(f"{live.client.base_url}/healthz", timeout=10)
            assert answer.status_code == 200
        until(lambda: len(live.server.server_state.connections) <= 50)


def answering(live: Live) -> int:
    """Connections whose request is complete and not yet answered."""
    connections = list(live.server.server_state.connections)
    return sum(not each.waits_for_client for each in connections)  # type: ignore[union-attr]


def trickle(client: socket.socket, seconds: float) -> None:
    """Send a byte every now and then."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        client.sendall(b"a")
        time.sleep(0.05)


def test_headers_have_a_deadline_that_bytes_do_not_extend(
    settings: Settings, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends a byte now and then is closed at the deadline."""
    monkeypatch.setattr(CONNECTIONS + "HEADER_SECONDS", 0.5)
    with (
        running(settings, Instant(journal)) as live,
        stalled(live, 1, b"GET /") as [client],
    ):
        begin = time.perf_counter()
        with pytest.raises(ConnectionError):
            trickle(client, seconds=5)
        assert time.perf_counter() - begin < 2


def test_a_connection_that_sends_nothing_has_a_deadline(
    settings: Settings, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with the connection, and not with the first byte."""
    monkeypatch.setattr(CONNECTIONS + "HEADER_SECONDS", 0.3)
    with running(settings, Instant(journal)) as live, stalled(live, 1, b"") as [silent]:
        wait_until_closed(silent)


def test_headers_of_a_second_request_have_a_deadline(
    settings: Settings, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial headers after an answer do not keep a connection for ever."""
    monkeypatch.setattr(CONNECTIONS + "HEADER_SECONDS", 0.3)
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running(settings, Instant(journal)) as live, stalled(live, 1, request) as [c]:
        assert c.recv(1 << 16).startswith(b"HTTP/1.1 200")
        c.sendall(b"GET /")
        wait_until_closed(c)


def test_a_client_that_does_not_read_is_closed(
    settings: Settings, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipelined requests whose answers nobody reads end at the deadline."""
    monkeypatch.setattr(CONNECTIONS + "WRITE_SECONDS", 0.3)
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running(settings, Instant(journal)) as live, stalled(live, 1, request * 300):
        until(lambda: live.server.server_state.connections)
        until(lambda: not live.server.server_state.connections)


def test_503_with_retry_after_if_every_connection_is_being_answered(
    settings: Settings, journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that wait for a plan are not disturbed; the next one is told to wait."""
    monkeypatch.setattr(CONNECTIONS + "MOST_CONNECTIONS", 3)
    body = json.dumps(plan_body()).encode()
    head = (
        "POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nPrefer: wait=30\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    request = b"GET /v1/plans HTTP/1.1\r\nHost: localhost\r\n\r\n"
    gate = tmp_path / "gate"
    with (
        running(settings, Gated(journal, gate)) as live,
        stalled(live, 3, head.encode() + body) as waiting,
    ):
        until(lambda: answering(live) == 3)
        with stalled(live, 1, request) as [refused]:
            answer = refused.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 5\r\n" in answer
        assert b'"limits":{"max_connections":3' in answer
        assert httpx2.get(f"{live.client.base_url}/healthz").status_code == 200
        gate.touch()
        for client in waiting:
            assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_repeated_messages_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A flood of bad requests leaves a few lines a minute."""
    logger = logging.getLogger("tests.flood")
    sparse = SparseLog()
    logger.addFilter(sparse)
    try:
        for number in range(10_000):
            logger.warning("Invalid HTTP request received.")
            logger.warning("request %d failed", number)
    finally:
        logger.removeFilter(sparse)
    assert 20 <= len(caplog.records) <= 80
    assert "not logged" in caplog.text
