"""Requests that nobody wrote: from the OpenAPI document, and mutations of valid bodies.

Whatever arrives, the answer is no 5xx, comes in time, and leaves no memory behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from tests.api.fakes import InstantPlans
from tests.api.live import Live, running
from tests.api.malformed import Outcome, settings

BODIES = int(os.environ.get("PLANNER_FUZZ_BODIES", "2000"))
"""10000 take a minute or three; CI runs fewer."""
MOST_GROWTH_BYTES = 16 << 20
LONGEST_SECONDS = 30.0


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service whose searches end at once."""
    directory = tmp_path_factory.mktemp("fuzz")
    with running(settings(directory), InstantPlans(directory / "journal")) as live:
        yield live


@pytest.fixture(scope="module")
def interface(live: Live) -> Any:
    """The OpenAPI document of the service."""
    return schemathesis.openapi.from_url(f"{live.client.base_url}/openapi.json")


@schemathesis.pytest.from_fixture("interface").parametrize()
@hypothesis_settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_requests_of_the_interface(case: schemathesis.Case) -> None:
    """Requests that the document allows, and such that it does not."""
    answer = case.call(timeout=LONGEST_SECONDS)
    assert answer.status_code < 500, answer.text
    assert answer.status_code < 400 or "/problems/" in answer.text


def test_malformed_bodies(tmp_path: Path) -> None:
    """No 5xx, no hang, no growth; afterwards the service plans as before."""
    command = [sys.executable, "-m", "tests.api.malformed", str(tmp_path), str(BODIES)]
    # An arena keeps what was freed: one keeps less than one per thread.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    outcome = Outcome(**json.loads(ended.stdout.splitlines()[-1]))
    assert not outcome.first_failure
    assert outcome.counts["422"] > BODIES / 2
    assert outcome.slowest_seconds < LONGEST_SECONDS
    assert outcome.growth_bytes < MOST_GROWTH_BYTES
    assert outcome.status_afterwards == 200
