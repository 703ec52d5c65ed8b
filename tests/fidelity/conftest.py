"""Fixtures of these tests."""

from __future__ import annotations

import pytest

from tests.cli.support import Command


@pytest.fixture
def planner(capsys: pytest.CaptureFixture[str]) -> Command:
    """The `planner` command, run in this process."""
    return Command(capsys)
