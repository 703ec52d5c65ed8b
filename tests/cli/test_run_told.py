"""A run that is over is told wherever it can be: no dead service and no full disk loses what was measured."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from planner.spec import Plan, read
from tests.cli.support import Command
from tests.cli.test_run import measured_run


class _Answers(BaseHTTPRequestHandler):
    """What stands at an address where no planning service is: the first part of the path says what."""

    def do_POST(self) -> None:
        """Answer, once what was posted is read."""
        self.rfile.read(int(self.headers["Content-Length"]))
        what = self.path.split("/")[1]
        if what == "noise":
            self.wfile.write(b"SSH-2.0-OpenSSH\r\n")
            return
        self.send_response({"moved": 302, "broken": 500}.get(what, 200))
        self.send_header("Location", "/elsewhere")
        self.send_header(
            "Content-Type", "text/html" if what == "page" else "application/json"
        )
        self.end_headers()
        self.wfile.write(b"[1]")

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    """Of a server that is none of ours."""
    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "planner.executor.launch.run_plan",
        lambda plan, *_, **options: measured_run(plan),
    )


ANSWERS = {
    "moved": "redirects to /elsewhere",
    "broken": "answered 500: [1]",
    "page": "does not answer as a planning service",
    "list": "does not answer as a planning service",
    "noise": "does not answer: Server disconnected",
}


@pytest.mark.parametrize("what", ANSWERS)
def test_what_is_no_service_is_named(
    planner: Command, plan_path: Path, address: str, what: str
) -> None:
    """Redirects were followed by a GET; the others ended in tracebacks. The report is printed all the same."""
    ended = planner("run", plan_path, "--model", "m:f", "--report", f"{address}/{what}")
    assert ended.code == 1
    assert f"error: {address}/{what}/v1/plans/" in ended.err
    assert ANSWERS[what] in ended.err
    assert "unexpected" not in ended.err
    assert "2 steps" in ended.out


def test_a_file_that_cannot_be_written_loses_nothing(
    planner: Command, plan_path: Path, tmp_path: Path
) -> None:
    """The report is printed, and every place that did not take it is named: the training itself went well."""
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    nowhere = "http://127.0.0.1:1"
    ended = planner(
        "run", plan_path, "--model", "m:f", "-o", "/dev/full", "--report", nowhere
    )
    assert ended.code == 1
    assert "/dev/full: cannot be written: No space left" in ended.err
    assert (
        f"{nowhere}/v1/plans/{read(Plan, plan_path).id}/measurements: does not answer"
        in ended.err
    )
    assert "2 steps" in ended.out
