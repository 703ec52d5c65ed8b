"""What is left of jobs when processes are killed: ``python -m benchmarks.service_kills``.

Requests plans, and meanwhile kills (SIGKILL) at random moments: the service with its
SQLite file; or one of two services, of three workers, or PostgreSQL itself. What was
killed, or ends because it finds no database, starts again at once, as container engines
do it. In the end every job must have succeeded, once. Exit code 1:
jobs are lost, doubled, failed or stuck.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.arguments import positive_int, positive_seconds, whole_number
from benchmarks.postgres import Cluster, find_binaries
from benchmarks.service import free_port
from planner.api.storage.store import Store
from planner.cli.console import note, table
from planner.cli.failures import DONE, FAILED

CLUSTER = "1xh100-sxm5-80gb"
SERVICES, WORKERS = 2, 3
WORKER_TIMEOUT_SECONDS = 5.0
PATIENCE_SECONDS = 120.0
"""Jobs are stuck if none ends for so long after the last kill."""
HEADER = ("database", "jobs", "kills", "lost", "doubled", "failed", "stuck", "minutes")


@dataclass(frozen=True, slots=True)
class Row:
    """What became of the jobs on one database."""

    database: str
    jobs: int
    kills: dict[str, int]
    """By what was killed."""
    lost: int
    """Accepted, but without a job and a plan in the database."""
    doubled: int
    """Plans with two successful jobs, and jobs with two ends."""
    failed: int
    stuck: int
    seconds: float

    @property
    def met(self) -> bool:
        """Whether every job has succeeded, once."""
        return not (self.lost or self.doubled or self.failed or self.stuck)


class Process:
    """A `planner` command that starts again whenever it ends."""

    def __init__(
        self, words: Sequence[str], settings: dict[str, str], log: Any
    ) -> None:
        self._words, self._log = words, log
        self._environment = os.environ | settings
        self._stopping = False
        self._process = self._start()
        self._thread = threading.Thread(target=self._supervise)
        self._thread.start()

    def kill(self) -> None:
        """Kill it; another one starts."""
        self._process.kill()

    def stop(self) -> None:
        """Kill it for good."""
        self._stopping = True
        while self._thread.is_alive():  # it may just have started another one
            self._process.kill()
            self._thread.join(0.1)

    def _supervise(self) -> None:
        while True:
            self._process.wait()
            if self._stopping:
                return
            self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "planner.cli.main", *self._words]
        return subprocess.Popen(
            command, env=self._environment, stdout=self._log, stderr=self._log
        )


@dataclass
class Farm:
    """Services, and what else can be killed."""

    place: Path | str
    addresses: list[str]
    victims: dict[str, Callable[[], None]]
    processes: list[Process] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    arguments = _parser().parse_args(argv)
    rows = []
    for database in ("sqlite", "postgresql"):
        if arguments.database in (None, database):
            note(f"{database} ...")
            rows.append(measure(database, arguments))
    if arguments.json:
        found = [asdict(row) | {"met": row.met} for row in rows]
        print(json.dumps({"cores": os.cpu_count(), "rows": found}, indent=2))
    else:
        print(table(HEADER, [_cells(row) for row in rows], left=(0, 2)))
    return DONE if all(row.met for row in rows) else FAILED


def measure(database: str, arguments: argparse.Namespace) -> Row:
    """Request and kill on one database."""
    chance = random.Random(arguments.seed)
    begun = time.monotonic()
    kills: Counter[str] = Counter()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context(arguments.log.open("ab"))
        farm = _start(database, folder, log, stack)
        try:
            plans: set[str] = set()
            for turn in range(arguments.kills + 1):
                wanted = arguments.jobs * (turn + 1) // (arguments.kills + 1)
                while len(plans) < wanted:
                    plans.add(_request(len(plans), farm.addresses, chance))
                if turn < arguments.kills:
                    time.sleep(chance.uniform(0, 2 * arguments.seconds))
                    victim = chance.choice(sorted(farm.victims))
                    farm.victims[victim]()
                    kills[victim.rstrip("0123456789")] += 1
                    note(f"{len(plans)} jobs, killed {victim}")
            _wait(plans, farm)
        finally:
            for process in farm.processes:
                process.stop()
        return _count(database, farm.place, plans, kills, time.monotonic() - begun)


def _start(database: str, folder: Path, log: Any, stack: ExitStack) -> Farm:
    settings = {
        "PLANNER_QUEUE_LENGTH": "100000",
        "PLANNER_MAX_JOBS_PER_CLIENT": "0",
        "PLANNER_SPARE_SOLVERS": "0",
        "PLANNER_CONCURRENCY": "2",
        "PLANNER_WORKER_TIMEOUT_SECONDS": str(WORKER_TIMEOUT_SECONDS),
    }
    if database == "sqlite":
        place: Path | str = folder / "planner.db"
        settings["PLANNER_DATABASE"] = str(place)
        farm = Farm(place, [], {})
        services = 1
    else:
        binaries = find_binaries()
        if binaries is None:
            raise SystemExit("needs a PostgreSQL server: apt install postgresql")
        cluster = Cluster(binaries)
        stack.callback(cluster.close)
        place = cluster.new_database()
        settings["PLANNER_DATABASE_URL"] = place
        farm = Farm(place, [], {"postgresql": cluster.restart})
        services = SERVICES
        settings["PLANNER_CONCURRENCY"] = "1"
        for number in range(WORKERS):
            worker = Process(["worker"], settings, log)
            farm.processes.append(worker)
            farm.victims[f"worker{number}"] = worker.kill
    for number in range(services):
        port = free_port()
        service = Process(["serve", "--port", str(port)], settings, log)
        farm.processes.append(service)
        farm.addresses.append(f"http://127.0.0.1:{port}")
        farm.victims[f"service{number}"] = service.kill
    return farm


def _request(number: int, addresses: Sequence[str], chance: random.Random) -> str:
    """Request a plan until a service accepts it; the id of the plan."""
    body = {"model": "gpt2", "devices": CLUSTER, "batch": 1 + number}
    body["sequence"] = 128
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        url = f"{chance.choice(addresses)}/v1/plans"
        try:
            answer = httpx2.post(url, json=body, headers={"Prefer": "wait=0"})
        except httpx2.TransportError:
            time.sleep(0.1)
            continue
        if answer.status_code in (200, 202):
            found = answer.json()
            return str(found["plan_id"] if "plan_id" in found else found["id"])
        if answer.status_code != 503:
            raise SystemExit(f"unexpected answer: {answer.text}")
        time.sleep(0.1)
    raise SystemExit("no service accepts requests")


def _wait(plans: set[str], farm: Farm) -> None:
    """Wait until every plan is there, or nothing more may be expected."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    missing = set(plans)
    while missing and time.monotonic() < deadline:
        before = len(missing)
        for plan_id in sorted(missing):
            try:
                answer = httpx2.get(f"{farm.addresses[0]}/v1/plans/{plan_id}")
            except httpx2.TransportError:
                break
            if answer.status_code == 200:
                missing.discard(plan_id)
        if len(missing) < before:
            deadline = time.monotonic() + PATIENCE_SECONDS
        time.sleep(0.5)


def _count(
    database: str,
    place: Path | str,
    plans: set[str],
    kills: Counter[str],
    seconds: float,
) -> Row:
    """Read from the database what became of the jobs."""
    store = Store(place)
    lost = doubled = failed = 0
    try:
        for plan_id in plans:
            jobs = store.jobs_of_plan(plan_id)
            ends = [store.events(job.id, after=0) for job in jobs]
            succeeded = sum(job.status == "succeeded" for job in jobs)
            twice = any(
                sum(event.name == "done" for event in events) > 1 for events in ends
            )
            lost += not jobs or (succeeded > 0 and store.plan(plan_id) is None)
            doubled += succeeded > 1 or twice
            failed += any(job.status == "failed" for job in jobs)
        stuck = len(store.unfinished_jobs())
    finally:
        store.close()
    return Row(
        database, len(plans), dict(kills), lost, doubled, failed, stuck, round(seconds)
    )


def _cells(row: Row) -> tuple[str, ...]:
    kills = ", ".join(f"{number} {name}" for name, number in sorted(row.kills.items()))
    numbers = (row.lost, row.doubled, row.failed, row.stuck)
    minutes = f"{row.seconds / 60:.1f}"
    return (row.database, str(row.jobs), kills, *map(str, numbers), minutes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.service_kills", description=__doc__
    )
    databases = ("sqlite", "postgresql")
    parser.add_argument("--database", choices=databases, help="one database only")
    parser.add_argument(
        "--jobs", type=positive_int, default=200, help="plans to request [default: 200]"
    )
    parser.add_argument(
        "--kills", type=whole_number, default=50, help="kills [default: 50]"
    )
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        default=4.0,
        help="mean time between kills [default: 4]",
    )
    parser.add_argument(
        "--seed", type=whole_number, default=0, help="of the moments [default: 0]"
    )
    parser.add_argument(
        "--log",
        type=Path,
        default=Path(os.devnull),
        help="file for the log of all processes [default: none]",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
