"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.support import Command

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def planner(capsys: pytest.CaptureFixture[str]) -> Command:
    """The `planner` command, run in this process: ``planner("devices", "--json")``."""
    return Command(capsys)


@pytest.fixture
def examples() -> Path:
    """The folder of example documents."""
    return EXAMPLES
