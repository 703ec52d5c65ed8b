"""A real server on a free port, in a thread of the test's process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from planner.api.app import create_app
from planner.api.serve import PlannerServer, server_of
from planner.api.settings import Settings
from planner.api.solving.solver import Work

PATIENCE_SECONDS = 180.0
"""Only a test that fails waits so long."""


@dataclass(frozen=True)
class Live:
    """A running service and a client of it."""

    server: PlannerServer
    client: httpx2.Client
    settings: Settings

    def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        """POST a JSON document."""
        return self.client.post(path, json=body, headers=headers)

    def plan(self, body: Any, wait: float = PATIENCE_SECONDS) -> httpx2.Response:
        """Ask for a plan, and again until there is one or `wait` seconds have passed."""
        deadline = time.monotonic() + wait
        while True:
            answer = self.post("/v1/plans", body, Prefer=f"wait={wait}")
            if answer.status_code != 202 or time.monotonic() >= deadline:
                return answer

    def get(self, path: str, **headers: str) -> httpx2.Response:
        """GET."""
        return self.client.get(path, headers=headers)

    def metric(self, row: str) -> float:
        """Value of a row of /metrics; 0 when it is not there."""
        rows = (line.rpartition(" ") for line in self.get("/metrics").text.splitlines())
        return next((float(value) for name, _, value in rows if name == row), 0.0)

    def events(self, job_id: str, **headers: str) -> list[dict[str, Any]]:
        """All events of a job until its stream ends."""
        events: list[dict[str, Any]] = []
        with self.client.stream(
            "GET", f"/v1/jobs/{job_id}/events", headers=headers
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            fields: dict[str, Any] = {}
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if line:
                    fields[name] = value
                elif "data" in fields:
                    events.append(fields | {"data": json.loads(fields["data"])})
                    fields = {}
        return events


@contextmanager
def running(settings: Settings, work: Work | None = None) -> Iterator[Live]:
    """Serve until the block ends."""
    server = server_of(settings, create_app(settings, work=work))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx2.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=2 * PATIENCE_SECONDS
        ) as client:
            yield Live(server, client, settings)
    finally:
        server.should_exit = True
        thread.join()


def until(condition: Callable[[], Any]) -> Any:
    """What `condition` returns, once that is true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
    return found
