"""Clients that generators make from the OpenAPI document: they compile, and one is used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from planner.api.app import create_app
from planner.api.settings import Settings
from tests.api.fakes import Instant
from tests.api.live import running

NPM_PACKAGES = ("openapi-typescript@7.13.0", "typescript@5.9.3")
NPM_OPTIONS = ("--no-audit", "--no-fund", "--fetch-retries=0", "--fetch-timeout=20000")
SECONDS = 300

USE_IN_PYTHON = """
import importlib, pkgutil, sys
import generated
from generated import Client
from generated.api.health import get_health
from generated.api.plans import create_plan, get_plan
from generated.models import LongPlanCreate, ShortPlanCreate

for module in pkgutil.walk_packages(generated.__path__, "generated."):
    importlib.import_module(module.name)
client = Client(base_url=sys.argv[1], raise_on_unexpected_status=True)
assert get_health.sync(client=client).status == "ok"
wanted = ShortPlanCreate(
    model="gpt2", devices="2xh100-sxm5-80gb", batch=8, sequence=128
)
plan = create_plan.sync(client=client, body=wanted, prefer="wait=60")
again = get_plan.sync(plan.id, client=client)
assert again.to_dict() == plan.to_dict()
print(plan.prediction.step_seconds)
"""
USE_IN_TYPESCRIPT = """
import type { components, operations, paths } from "./schema";

type Plan = components["schemas"]["Plan"];
type Wanted = components["schemas"]["ShortPlanCreate"];
type Answer =
  operations["create_plan"]["responses"][200]["content"]["application/json"];

export const wanted: Wanted = {
  model: "gpt2",
  devices: "2xh100-sxm5-80gb",
  batch: 8,
};
export const path: keyof paths = "/v1/plans/{plan_id}";

export function stepSeconds(answer: Answer): number | undefined {
  const isPlan = (found: Answer): found is Plan => "prediction" in found;
  return isPlan(answer) ? answer.prediction.step_seconds : undefined;
}
"""


@pytest.fixture(scope="module")
def openapi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The OpenAPI document as a file."""
    path = tmp_path_factory.mktemp("openapi") / "openapi.json"
    path.write_text(json.dumps(create_app().openapi()), encoding="utf-8")
    return path


def run(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [str(word) for word in words]
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_a_python_client(
    openapi: Path, tmp_path: Path, settings: Settings, journal: Path
) -> None:
    """openapi-python-client's client is complete, imports, and reads a plan."""
    config = tmp_path / "config.yaml"
    config.write_text("post_hooks: []\n", encoding="utf-8")
    program = Path(sys.executable).with_name("openapi-python-client")
    words = ("generate", "--meta", "none", "--path", openapi, "--config", config)
    made = run(program, *words, "--output-path", "generated", folder=tmp_path)
    assert made.returncode == 0, made.stdout + made.stderr
    warnings = [line for line in made.stdout.splitlines() if line.startswith("WARNING")]
    pictures = "WARNING parsing GET /v1/plans/{plan_id}/timeline.svg within plans."
    assert warnings in ([], [pictures])
    script = tmp_path / "use.py"
    script.write_text(USE_IN_PYTHON, encoding="utf-8")
    with running(settings, Instant(journal)) as live:
        address = str(live.client.base_url)
        used = run(sys.executable, "use.py", address, folder=tmp_path)
    assert used.returncode == 0, used.stderr
    assert float(used.stdout) == 0.5


def test_typescript_types(openapi: Path, tmp_path: Path) -> None:
    """openapi-typescript's types compile strictly, with code that uses them."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    installed = run(npm, "install", *NPM_OPTIONS, *NPM_PACKAGES, folder=tmp_path)
    if installed.returncode != 0:
        pytest.skip(f"npm reaches no registry: {installed.stderr.strip()[-200:]}")
    programs = tmp_path / "node_modules" / ".bin"
    words = (openapi, "-o", "schema.d.ts", "--default-non-nullable", "false")
    made = run(programs / "openapi-typescript", *words, folder=tmp_path)
    assert made.returncode == 0, made.stderr
    (tmp_path / "use.ts").write_text(USE_IN_TYPESCRIPT, encoding="utf-8")
    options = ("--noEmit", "--strict", "--target", "es2022", "use.ts", "schema.d.ts")
    compiled = run(programs / "tsc", *options, folder=tmp_path)
    assert compiled.returncode == 0, compiled.stdout
    wrong = USE_IN_TYPESCRIPT.replace("batch: 8", 'batch: "8"')
    (tmp_path / "use.ts").write_text(wrong, encoding="utf-8")
    assert run(programs / "tsc", *options, folder=tmp_path).returncode != 0
