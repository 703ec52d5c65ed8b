"""The service as a process of its own: start, stop, and what it must not import."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from planner.api.serve import serve
from planner.api.settings import Settings
from planner.api.storage.store import Store
from planner.errors import DocumentError, RunError
from tests.api.documents import plan_body
from tests.api.live import PATIENCE_SECONDS, until
from tests.api.solving.test_jobs import is_alive

ROOT = Path(__file__).parents[2]
SERVICE = """
import sys
from pathlib import Path
from planner.api import serve
from planner.api.app import create_app
from planner.api.settings import load_settings
from tests.api.fakes import Gated

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    serve.create_app = lambda settings: create_app(settings, work=Gated(directory / "journal", directory / "gate"))
    serve.serve(load_settings({"port": 0, "database": directory / "planner.db"}))
"""
NO_TORCH = """
import json, re, sys
from planner.api.app import create_app
from planner.api.settings import Settings

document = create_app(Settings()).openapi()
operations = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
heavy = [name for name in ("torch", "transformers", "ortools") if name in sys.modules]
schemas = sorted(document["components"]["schemas"])
references = re.findall('"#/components/schemas/(.*?)"', json.dumps(document))
missing = sorted(set(references) - set(schemas))
print(json.dumps({"operations": operations, "heavy": heavy, "schemas": schemas, "missing": missing}))
"""


@contextmanager
def service(directory: Path) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    """A service process, and a client of it."""
    script = directory / "service.py"
    script.write_text(SERVICE)
    with subprocess.Popen(
        [sys.executable, str(script), str(directory)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            assert process.stderr is not None
            address = next(
                found[0]
                for line in process.stderr
                if (found := re.search(r"http://[\d.:]+", line))
            )
            with httpx2.Client(base_url=address, timeout=PATIENCE_SECONDS) as client:
                yield process, client
        finally:
            process.kill()  # harmless when it has ended; a test that fails must not wait for it


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_goes_on_where_the_service_ended(
    tmp_path: Path, ending: signal.Signals
) -> None:
    """However it ends, no solver stays behind, and the next start solves what was asked for."""
    journal = tmp_path / "journal"
    with service(tmp_path) as (process, client):
        accepted = client.post(
            "/v1/plans", json=plan_body(), headers={"Prefer": "wait=0"}
        )
        assert accepted.status_code == 202
        until(journal.exists)
        (solver,) = until(
            lambda: [int(line) for line in journal.read_text().splitlines()]
        )
        process.send_signal(ending)
        assert process.stderr is not None
        log = process.stderr.read()
        process.wait(PATIENCE_SECONDS)
    until(lambda: not is_alive(solver))
    if ending is not signal.SIGKILL:
        assert "Finished server process" in log
    (tmp_path / "gate").touch()
    with service(tmp_path) as (process, client):
        until(
            lambda: (
                client.get(accepted.headers["location"]).json()["status"] == "succeeded"
            )
        )
        process.send_signal(signal.SIGTERM)
        process.communicate()


def test_the_service_needs_no_torch() -> None:
    """The application imports no torch and no OR-Tools; its operations have stable ids, its references schemas."""
    output = subprocess.run(
        [sys.executable, "-c", NO_TORCH],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    found = json.loads(output.stdout)
    assert found["heavy"] == []
    assert len(set(found["operations"])) == len(found["operations"])
    assert set(found["operations"]) >= {
        "cancel_job",
        "create_measurement",
        "create_plan",
        "create_prediction",
        "create_profile",
        "get_explanation",
        "get_export",
        "get_health",
        "get_job",
        "get_job_events",
        "get_metrics",
        "get_plan",
        "get_profile",
        "get_readiness",
        "get_schema",
        "get_stage_map",
        "get_timeline_json",
        "get_timeline_svg",
        "list_devices",
        "list_exports",
        "list_measurements",
        "list_models",
        "list_plans",
    }
    assert found["missing"] == []
    assert {
        "Plan",
        "Infeasible",
        "Forecast",
        "JobView",
        "ProblemDocument",
        "ErrorItem",
    } <= set(found["schemas"])


def test_a_taken_database_is_refused_before_the_start(tmp_path: Path) -> None:
    """A user's mistake is an error with field and hint, not a failed start with a traceback."""
    settings = Settings(port=0, database=tmp_path / "planner.db")
    store = Store(settings.database)
    with pytest.raises(RunError, match="another service uses this database"):
        serve(settings)
    store.close()


def test_a_wrong_database_is_refused_before_the_start(tmp_path: Path) -> None:
    """Likewise a file that is no database."""
    path = tmp_path / "planner.db"
    path.write_text("no database " * 100)
    with pytest.raises(DocumentError, match="not a usable database"):
        serve(Settings(port=0, database=path))
