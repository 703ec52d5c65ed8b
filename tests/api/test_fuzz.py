"""Requests that nobody wrote: from the OpenAPI document, and mutations of valid bodies.

Whatever arrives, the answer is no 5xx, comes in time, and leaves no memory behind.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from planner.api.examples import LONG_PLAN, LONG_PREDICTION, SHORT_PLAN, SWEEP
from planner.api.settings import Settings
from tests.api.documents import four_equal_layers, plan_body
from tests.api.fakes import InstantPlans
from tests.api.live import Live, running
from tests.api.test_plans import measured_run

BODIES = int(os.environ.get("PLANNER_FUZZ_BODIES", "2000"))
"""10000 take a minute or three; CI runs fewer."""
WARM_UP_BODIES = 500
MOST_GROWTH_BYTES = 40 << 20
LONGEST_SECONDS = 30.0
SEED = 31


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service whose searches end at once."""
    directory = tmp_path_factory.mktemp("fuzz")
    settings = Settings(
        port=0,
        database=directory / "planner.db",
        spare_solvers=0,
        default_wait_seconds=0,
        max_wait_seconds=0.1,
        max_jobs_per_client=0,
    )
    with running(settings, InstantPlans(directory / "journal")) as live:
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


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 10**18, 10**40, 1e308, -1e308, 5e-324),
    *("", "\u0000", "e\u0301", "\ud800", "x" * 5000, "../../etc", "<script>", "NaN"),
    *([], {}, [[]], [None] * 300, {"a": {"b": {}}}, {"min": 5, "max": 1}, ["even"]),
)
"""What a field is replaced by."""


def targets(plan_id: str) -> list[tuple[str, Any]]:
    """Valid requests to every path that takes a body."""
    layout = {"layout": {"data_parallel_degree": 2}}
    profile = four_equal_layers().model_dump(mode="json", by_alias=True)
    return [
        ("/v1/plans", SHORT_PLAN),
        ("/v1/plans", LONG_PLAN),
        ("/v1/plans", plan_body()),
        ("/v1/predictions", LONG_PREDICTION),
        ("/v1/predictions", plan_body() | layout),
        ("/v1/sweeps", SWEEP),
        ("/v1/profiles", profile),
        ("/v1/profiles", {"model": "gpt2", "sequence_length": 128}),
        (f"/v1/plans/{plan_id}/measurements", measured_run(plan_id)),
    ]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a document."""
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, each in items:
        yield from places(each, (*path, key))


def mutated(body: Any, chance: random.Random) -> bytes:
    """A body with one to three values replaced, removed or added, or with bytes changed."""
    body = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        *path, last = chance.choice(list(places(body))[1:])
        parent = body
        for key in path:
            parent = parent[key]
        change = chance.random()
        if change < 0.7:
            parent[last] = copy.deepcopy(chance.choice(VALUES))
        elif change < 0.85:
            del parent[last]
        elif isinstance(parent, dict):
            parent[chance.choice(["x", "", "__proto__", "\udfff"])] = 1
        if not body:
            break
    raw = bytearray(json.dumps(body).encode())
    if chance.random() < 0.2:
        for _ in range(chance.randint(1, 4)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
    return bytes(raw)


def resident_bytes() -> int:
    """Memory of this process, which has the service in a thread."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_malformed_bodies(live: Live) -> None:
    """No 5xx, no hang, no growth; afterwards the service plans as before."""
    chance = random.Random(SEED)
    plan_id = str(live.plan(plan_body()).json()["id"])
    requests = targets(plan_id)
    counts: dict[int, int] = {}
    slowest, start_bytes = 0.0, 0
    for number in range(BODIES):
        if number == WARM_UP_BODIES:
            start_bytes = resident_bytes()
        path, body = requests[number % len(requests)]
        content = mutated(body, chance)
        begin = time.perf_counter()
        answer = live.client.post(
            path, content=content, headers={"Content-Type": "application/json"}
        )
        slowest = max(slowest, time.perf_counter() - begin)
        counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (path, content[:2000], answer.text)
    growth = resident_bytes() - start_bytes
    assert counts[422] > BODIES / 2
    assert slowest < LONGEST_SECONDS
    assert growth < MOST_GROWTH_BYTES
    assert live.plan(plan_body()).status_code == 200
