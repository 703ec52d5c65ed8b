"""Thousands of malformed bodies to one service, in a process of its own.

``python -m tests.api.malformed FOLDER BODIES`` prints what came back as one JSON object.
The process is fresh, so that its memory is the service's and not an earlier test's.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from planner.api.examples import LONG_PLAN, LONG_PREDICTION, SHORT_PLAN, SWEEP
from planner.api.settings import Settings
from tests.api.documents import four_equal_layers, plan_body
from tests.api.fakes import InstantPlans
from tests.api.live import Live, running
from tests.api.test_plans import measured_run

WARM_UP_BODIES = 500
SEED = 31


class Outcome(NamedTuple):
    """Answers by status, the first 5xx, the slowest answer and the memory left behind."""

    counts: dict[str, int]
    first_failure: str
    slowest_seconds: float
    growth_bytes: int
    status_afterwards: int


def settings(folder: Path) -> Settings:
    """A service that keeps its database in the folder and accepts any number of jobs."""
    return Settings(
        port=0,
        database=folder / "planner.db",
        spare_solvers=0,
        default_wait_seconds=0,
        max_wait_seconds=0.1,
        max_jobs_per_client=0,
    )


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
    """Memory of this process, which has the service in a thread, without garbage."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def send(live: Live, bodies: int) -> Outcome:
    """Send that many bodies, then a valid request."""
    chance = random.Random(SEED)
    plan_id = str(live.plan(plan_body()).json()["id"])
    requests = targets(plan_id)
    counts: dict[str, int] = {}
    first_failure, slowest, start_bytes = "", 0.0, 0
    for number in range(bodies):
        if number == WARM_UP_BODIES:
            start_bytes = resident_bytes()
        path, body = requests[number % len(requests)]
        content = mutated(body, chance)
        begin = time.perf_counter()
        answer = live.client.post(
            path, content=content, headers={"Content-Type": "application/json"}
        )
        slowest = max(slowest, time.perf_counter() - begin)
        status = str(answer.status_code)
        counts[status] = counts.get(status, 0) + 1
        if answer.status_code >= 500 and not first_failure:
            first_failure = f"{path} {content[:2000]!r}: {answer.text}"
    growth_bytes = resident_bytes() - start_bytes
    afterwards = live.plan(plan_body()).status_code
    return Outcome(counts, first_failure, slowest, growth_bytes, afterwards)


def main() -> None:
    """Run the service and print the outcome."""
    folder, bodies = Path(sys.argv[1]), int(sys.argv[2])
    with running(settings(folder), InstantPlans(folder / "journal")) as live:
        sys.stdout.write(json.dumps(send(live, bodies)._asdict()) + "\n")


if __name__ == "__main__":
    main()
