"""Several services and workers that share PostgreSQL: every job ends, once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psycopg
import pytest

from benchmarks.postgres import Cluster
from planner.api.http.known_answers import SHARED_SECONDS
from planner.api.settings import Settings
from planner.api.solving.news import News
from planner.api.solving.queues import SharedQueue
from planner.api.storage.store import Store
from planner.cli.main import main
from tests.api.documents import job, plan_body
from tests.api.fakes import Instant
from tests.api.live import Live, running, until
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
TIMEOUT_SECONDS = 2.0
"""After this time the jobs of a dead worker are taken over."""
WORKER = """
import logging, sys
from pathlib import Path
from planner.api.solving.news import News
from planner.api.solving.queues import SharedQueue
from planner.api.settings import load_settings
from planner.api.solving.worker import work
from tests.api.fakes import Timed

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    url, journal, seconds, concurrency, timeout = sys.argv[1:]
    settings = {"database_url": url, "concurrency": int(concurrency), "worker_timeout_seconds": float(timeout)}
    work(load_settings(settings | {"spare_solvers": 0}), Timed(Path(journal), float(seconds)))
"""


@dataclass
class Farm:
    """Services in this process, and workers in others, on one database."""

    url: str
    directory: Path
    services: list[Live]
    stack: ExitStack
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def journal(self) -> Path:
        """Ids of the plans that solvers began."""
        path = self.directory / "solves"
        path.touch()
        return path

    def begun(self) -> list[str]:
        """Ids of the plans that solvers began."""
        return self.journal.read_text().split()

    def add_worker(
        self, *, seconds: float, concurrency: int = 1, metrics_port: int = 0
    ) -> None:
        """Start a worker whose solvers need `seconds`."""
        script = self.directory / "worker.py"
        script.write_text(WORKER)
        command = [
            *(sys.executable, str(script), self.url, str(self.journal)),
            *(str(seconds), str(concurrency), str(TIMEOUT_SECONDS)),
        ]
        log = self.stack.enter_context((self.directory / "log").open("ab"))
        worker = subprocess.Popen(
            command,
            stderr=log,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "PLANNER_METRICS_PORT": str(metrics_port)},
        )
        self.workers.append(worker)

    def ask(self, number: int, service: int = 0) -> str:
        """Id of the job of a plan."""
        body = plan_body(job=job(global_batch_size=8 * (1 + number)))
        answer = self.services[service].plan(body, wait=0)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def status(self, job_id: str, service: int = 0) -> str:
        """Status of a job."""
        return str(self.services[service].get(f"/v1/jobs/{job_id}").json()["status"])

    def events(self, job_id: str, service: int = 0) -> list[str]:
        """Names of all events of a job, until it has ended."""
        return [event["event"] for event in self.services[service].events(job_id)]

    def log(self) -> str:
        """What the workers logged."""
        return (self.directory / "log").read_text()


@contextmanager
def farm_of(cluster: Cluster, directory: Path, services: int = 2) -> Iterator[Farm]:
    """Services that share a new database."""
    url = cluster.new_database()
    settings = Settings(
        port=0,
        database_url=url,
        spare_solvers=0,
        queue_length=1000,
        max_jobs_per_client=0,
    )
    with ExitStack() as stack:
        lives = [
            stack.enter_context(running(settings, Instant(directory / "unused")))
            for _ in range(services)
        ]
        farm = Farm(url, directory, lives, stack)
        try:
            yield farm
        finally:
            for worker in farm.workers:
                worker.kill()
                worker.wait()


@pytest.fixture
def farm(cluster: Cluster, tmp_path: Path) -> Iterator[Farm]:
    """Two services and no worker yet."""
    with farm_of(cluster, tmp_path) as farm:
        yield farm


def test_a_plan_of_another_replica_is_joined(farm: Farm) -> None:
    """The same request to both services is one job, whose events and result both have."""
    jobs = {farm.ask(1, service) for service in (0, 1)}
    assert len(jobs) == 1
    (job_id,) = jobs
    farm.add_worker(seconds=0.5)
    for service in (0, 1):
        names = farm.events(job_id, service)
        assert names == ["queued", "started", "incumbent", "done"]
        answer = farm.services[service].plan(plan_body(job=job(global_batch_size=16)))
        assert answer.status_code == 200
    assert len(farm.begun()) == 1


def test_a_plan_deleted_through_another_replica_is_soon_gone(farm: Farm) -> None:
    """The answer in the memory of one service outlives the plan by two seconds at most."""
    farm.add_worker(seconds=0.1)
    path = f"/v1/plans/{farm.services[0].plan(plan_body()).json()['id']}"
    for service in farm.services:
        assert [service.get(path).status_code for _ in range(2)] == [200, 200]
    assert farm.services[0].client.delete(path).status_code == 204
    begun = time.monotonic()
    assert farm.services[0].get(path).status_code == 404
    until(lambda: farm.services[1].get(path).status_code == 404)
    assert time.monotonic() - begun < 2 * SHARED_SECONDS


def test_a_client_of_another_replica_waits_for_the_plan(farm: Farm) -> None:
    """`Prefer: wait` is answered as soon as a worker has the plan, by PostgreSQL's notification."""
    farm.add_worker(seconds=0.1)
    answer = farm.services[1].plan(plan_body())
    assert answer.status_code == 200
    assert farm.services[0].get("/readyz").json()["queue_length"] == 0


def test_cancelling_works_across_replicas(farm: Farm) -> None:
    """The worker's process ends, and the worker solves the next job."""
    farm.add_worker(seconds=600)
    first = farm.ask(1)
    until(farm.begun)
    assert farm.services[1].client.delete(f"/v1/jobs/{first}").status_code == 204
    second = farm.ask(2, service=1)
    until(lambda: len(farm.begun()) == 2)
    assert farm.status(first) == "cancelled"
    assert farm.status(second) == "running"


def test_a_stopped_worker_gives_its_job_back(farm: Farm) -> None:
    """SIGTERM: another worker starts the job at once, without the timeout of dead workers."""
    farm.add_worker(seconds=600)
    job_id = farm.ask(1)
    until(farm.begun)
    farm.workers[0].send_signal(signal.SIGTERM)
    assert farm.workers[0].wait() == 0, farm.log()
    assert farm.status(job_id) == "queued"
    farm.add_worker(seconds=0.1)
    until(lambda: farm.status(job_id) == "succeeded")
    assert farm.events(job_id).count("started") == 2


def test_every_job_ends_once_although_a_worker_is_killed(farm: Farm) -> None:
    """Two services, three workers, one killed in the middle: nothing is lost, doubled or stuck."""
    for _ in range(3):
        farm.add_worker(seconds=0.3, concurrency=2)
    jobs = [farm.ask(number, service=number % 2) for number in range(24)]
    until(lambda: len(farm.begun()) > 6)
    farm.workers[0].kill()
    for job_id in jobs:
        until(lambda job_id=job_id: farm.status(job_id) == "succeeded")
        assert farm.events(job_id, service=1).count("done") == 1
    solves = Counter(farm.begun())
    assert len(solves) == 24
    # Only jobs of the killed worker began twice.
    assert sum(solves.values()) <= 24 + 2


def test_workers_survive_the_death_of_the_database(
    cluster: Cluster, tmp_path: Path
) -> None:
    """PostgreSQL is killed and started again: services answer 503 and recover, jobs end, once."""
    with farm_of(cluster, tmp_path) as farm:
        farm.add_worker(seconds=2, concurrency=2)
        jobs = [farm.ask(number) for number in range(4)]
        until(lambda: len(farm.begun()) >= 2)
        cluster.kill()
        refused = farm.services[0].get("/readyz")
        assert (refused.status_code, refused.json()["code"]) == (503, "not-ready")
        assert "retry-after" in refused.headers
        cluster.start()
        for job_id in jobs:
            until(lambda job_id=job_id: farm.status(job_id) == "succeeded")
            assert farm.events(job_id).count("done") == 1


def test_clients_take_turns_at_workers(cluster: Cluster) -> None:
    """The queue in PostgreSQL has the order of the store."""
    url = cluster.new_database()
    queue = SharedQueue(News(), url)
    with closing(Store(url)) as store:
        for job_id in ("ann0", "ann1", "ann2", "ben0"):
            store.add_job(
                job_id,
                plan_id=job_id,
                profile_id="q",
                request="{}",
                client=job_id[:3],
                enqueue=queue.enqueue,
            )
    order = "SELECT args->>'job_id' FROM procrastinate_jobs ORDER BY priority DESC, id"
    with psycopg.connect(url) as connection:
        found = [row[0] for row in connection.execute(order)]
    assert found == ["ann0", "ben0", "ann1", "ann2"]


def test_a_job_that_the_queue_has_lost_is_queued_again(farm: Farm) -> None:
    """The table of jobs is the truth: without an entry in the queue, a job still ends."""
    job_id = farm.ask(1)
    with psycopg.connect(farm.url) as connection:
        connection.execute("DELETE FROM procrastinate_jobs")
    farm.add_worker(seconds=0.1)
    until(lambda: farm.status(job_id) == "succeeded")
    assert "was missing in the queue" in farm.log()


def test_a_worker_has_metrics_of_its_own(farm: Farm) -> None:
    """Finished jobs, their seconds and running solvers; nothing that only services count."""
    port = free_port()
    farm.add_worker(seconds=0.1, metrics_port=port)
    assert farm.services[0].plan(plan_body()).status_code == 200
    url = f"http://127.0.0.1:{port}/metrics"
    succeeded = 'planner_solves_total{status="succeeded"} 1.0'
    text = until(lambda: succeeded in (found := httpx2.get(url).text) and found)
    assert "planner_solve_seconds_count 1.0" in text
    assert "planner_running_solves 0.0" in text
    assert "planner_queue_length" not in text


def test_a_port_of_metrics_that_is_in_use(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker does not start, and says which setting to change."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        url = cluster.new_database()
        code = main(["worker", "--database-url", url, "--metrics-port", port])
    assert code == 2
    message = capsys.readouterr().err
    assert f"metrics_port: cannot listen on 127.0.0.1:{port}" in message
    assert "hint: give a free port" in message


def test_a_worker_needs_postgresql(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a URL the command says what to give."""
    assert main(["worker"]) == 2
    assert "--database-url" in capsys.readouterr().err
