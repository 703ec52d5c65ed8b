"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.support import (
    Command,
    tiny_cluster,
    tiny_job,
    tiny_profile,
    write_question,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def planner(capsys: pytest.CaptureFixture[str]) -> Command:
    """The `planner` command, run in this process: ``planner("devices", "--json")``."""
    return Command(capsys)


@pytest.fixture
def examples() -> Path:
    """The folder of example documents."""
    return EXAMPLES


@pytest.fixture
def question(tmp_path: Path) -> list[str]:
    """Options that ask about the tiny model on the tiny cluster."""
    return write_question(tmp_path, tiny_profile(), tiny_cluster(), tiny_job())


@pytest.fixture
def plan_path(planner: Command, question: list[str], tmp_path: Path) -> Path:
    """A plan of two pipeline ranks for the tiny model."""
    path = tmp_path / "plan.json"
    fixed = ("--fix", "pipeline_parallel_degree=2", "--fix", "schedule=1f1b")
    assert planner("plan", *question, *fixed, "-o", path).code == 0
    return path
