"""`planner serve`: settings, start and end."""

from __future__ import annotations

import json
import re
import select
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.cli.support import Command

SERVE = (sys.executable, "-m", "planner.cli.main", "serve")


def test_serves_until_interrupted(tmp_path: Path) -> None:
    """The service prints its settings with --json, answers on the port that it logs, and stops on Ctrl-C."""
    database = tmp_path / "plans.db"
    command = [*SERVE, "--port", "0", "--database", str(database), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = None
        for line in process.stderr:
            found = re.search(r"running on (http://\S+)", line)
            if found:
                address = found[1]
                break
        assert select.select([process.stdout], [], [], 0)[0] == [
            process.stdout
        ]  # printed before the service ends
        with urllib.request.urlopen(f"{address}/healthz", timeout=120) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert json.loads(out)["database"] == str(database)
    assert database.exists()


def test_a_taken_port_is_a_failure(tmp_path: Path) -> None:
    """A port that is in use ends with 1 and names it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [*SERVE, "--port", port, "--database", str(tmp_path / "plans.db")]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 1
    assert f"error: the service could not start on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_settings(planner: Command, tmp_path: Path) -> None:
    """A wrong port, an unknown setting and a missing file are refused before anything starts."""
    config = tmp_path / "planner.toml"
    config.write_text("prot = 8000")
    for words, named in (
        (("--port", "70000"), "--port: '70000' is not below 65536"),
        (("--port", "http"), "--port"),
        (("--make-key", "raed"), "did you mean 'read'"),
        (("--key-name", "grafana"), "--key-name"),
        (("--config", config), "prot"),
        (("--config", tmp_path / "absent.toml"), "absent.toml"),
    ):
        ended = planner("serve", *words)
        assert ended.code == 2
        assert named in ended.err
