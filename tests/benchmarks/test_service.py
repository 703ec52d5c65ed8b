"""The load of `benchmarks.service`, and what it reports."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import service
from benchmarks.service import HUGE, Row
from benchmarks.service_load import Load, Route, one_by_one, steady, top_rate
from planner.api.settings import Settings
from planner.spec import ModelProfile
from tests.api.live import running
from tests.ports import free_port

SLOW_SECONDS = 0.05


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A service that nobody asks for plans."""
    settings = Settings(port=0, database=tmp_path / "planner.db", spare_solvers=0)
    with running(settings) as live:
        yield str(live.client.base_url)


def test_every_response_is_counted(address: str) -> None:
    """As many as fit, at a fixed rate, and one after another; without an error."""
    route = Route(address, "GET", "/healthz")
    most = top_rate(route, 0.5)
    assert most.errors == 0
    assert most.rate > 20
    fixed = steady(route, 1.0, rate=20)
    assert (len(fixed.latencies_seconds), fixed.errors) == (20, 0)
    single = one_by_one(route, 0.3)
    assert single.errors == 0
    assert sum(single.latencies_seconds) <= single.seconds


def test_errors_are_counted(address: str) -> None:
    """Other statuses than 200, of requests with and without a body."""
    for route in (
        Route(address, "GET", "/v1/plans/none"),
        Route(address, "POST", "/v1/plans", {"model": 1}),
    ):
        load = steady(route, 0.5, rate=10)
        assert load.errors == len(load.latencies_seconds) == 5


def test_latency_begins_when_a_request_is_due() -> None:
    """A server that is slower than the rate has latencies that grow, not a lower rate."""
    with slow_server() as address:
        load = steady(Route(address, "GET", "/"), 0.5, rate=60)
    assert len(load.latencies_seconds) >= 16
    assert load.quantile_ms(1.0) > 1000 * 10 * SLOW_SECONDS


@contextmanager
def slow_server() -> Iterator[str]:
    """A server that answers one request at a time."""
    port = free_port()
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        turn = asyncio.Lock()

        async def answer(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            while await reader.readline():
                await reader.readuntil(b"\r\n\r\n")
                async with turn:
                    await asyncio.sleep(SLOW_SECONDS)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            writer.close()
            await writer.wait_closed()

        loops.append(asyncio.get_running_loop())
        async with await asyncio.start_server(answer, "127.0.0.1", port):
            started.set()
            await stop.wait()
            await asyncio.sleep(SLOW_SECONDS)  # connections close

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join()


def test_quantiles() -> None:
    """The smallest latency that so many do not exceed."""
    load = Load(tuple(index / 1000 for index in range(1, 101)), 0, 1.0)
    assert (load.quantile_ms(0.5), load.quantile_ms(0.99)) == (50.0, 99.0)
    assert load.rate == 100.0


def test_huge_requests_are_legal() -> None:
    """What the service refuses among them, it refuses for their size alone."""
    layers = HUGE["100,000 layers"]()["profile"]
    assert len(layers["layers"]) == 100_000
    small = layers | {"layers": layers["layers"][:2]}
    assert len(ModelProfile.model_validate(small).layers) == 2


@pytest.mark.parametrize(
    ("errors", "value", "code", "result"),
    [(0, 1.0, 0, "met"), (0, 3.0, 0, "missed"), (2, 1.0, 1, "2 errors")],
)
def test_errors_decide_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    errors: int,
    value: float,
    code: int,
    result: str,
) -> None:
    """A target that is missed is printed; only a wrong response is a failure."""

    def starts(seconds: float) -> list[Row]:
        return [Row("start", "until ready", value, "s", 1.5, errors)]

    monkeypatch.setattr(service, "starts", starts)
    assert service.main(["--case", "starts"]) == code
    assert result in capsys.readouterr().out
    assert service.main(["--case", "starts", "--json"]) == code
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["value"], row["errors"]) == (value, errors)
