"""Who waits for whom: clients take turns, predictions pass plans, and nothing blocks the event loop."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from planner.api.settings import Settings
from planner.api.storage.store import JobRow, Store
from planner.errors import RunError
from tests.api.documents import job, plan_body
from tests.api.fakes import Gated, Predicting, Stuck
from tests.api.live import running, until
from tests.api.solving.test_jobs import is_alive, pids, status

SettingsOf = Callable[..., Settings]
PREDICTION = plan_body(layout={"data_parallel_degree": 2})


def add(store: Store, job_id: str, client: str = "") -> JobRow:
    """A queued job."""
    return store.add_job(
        job_id, plan_id=f"plan of {job_id}", profile_id="q", request="{}", client=client
    )


def names(jobs: list[JobRow]) -> list[str]:
    """Ids of jobs."""
    return [job.id for job in jobs]


def test_clients_take_turns(store: Store) -> None:
    """The first job of another client is the second to start, not the fifth."""
    for index in range(4):
        add(store, f"ann{index}", "ann")
    add(store, "ben0", "ben")
    add(store, "ben1", "ben")
    assert names(store.unfinished_jobs()) == [
        *("ann0", "ben0", "ann1", "ben1", "ann2", "ann3")
    ]


def test_who_waits_long_is_not_passed_for_ever(store: Store) -> None:
    """A client whose jobs come one at a time gets every second turn, not every turn."""
    for index in range(3):
        add(store, f"ann{index}", "ann")
    order = []
    for index in range(3):
        add(store, f"ben{index}", "ben")
        for _ in range(2):
            first = next(
                job for job in store.unfinished_jobs() if job.status == "queued"
            )
            order.append(first.id)
            store.start_job(first.id, first.id)
            store.finish(first.id, "cancelled")
    assert order == ["ann0", "ben0", "ann1", "ben1", "ann2", "ben2"]


def test_only_a_job_that_ran_alone_counts_a_death(store: Store) -> None:
    """After the death of a process with four jobs two run together, then one, and only then deaths count."""
    for index in range(4):
        add(store, f"j{index}")
    seen = []
    for together in (4, 2, 1, 1):
        for index in range(together):
            store.start_job(f"j{index}", f"{together}")
        store.take_back()
        first = store.job("j0")
        assert first is not None
        seen.append((first.company, first.deaths))
    assert seen == [(2, 0), (1, 0), (1, 1), (1, 2)]
    last = store.job("j3")
    assert last is not None
    assert (last.company, last.deaths) == (2, 0)


def test_kills_of_many_jobs_are_nobodys_fault(
    settings_of: SettingsOf, journal: Path, tmp_path: Path
) -> None:
    """Three jobs that died alone three times each are not given up: somebody kills processes."""
    settings = settings_of()
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        ids = [
            live.plan(plan_body(job=job(global_batch_size=size)), wait=0).json()["id"]
            for size in (8, 16, 24)
        ]
    with closing(Store(settings.database)) as left:
        for death in range(3):
            for each in ids:
                left.start_job(each, f"{death}")
                left.take_back()
        assert names(left.unfinished_jobs()) == ids
    (tmp_path / "gate").touch()
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        for each in ids:
            until(lambda each=each: status(live, each) == "succeeded")


def test_a_job_that_died_starts_after_the_others(store: Store) -> None:
    """Otherwise a job that kills every process would hold all others back."""
    for job_id in ("bad", "next", "last"):
        add(store, job_id, job_id)
    store.start_job("bad", "first")
    store.take_back()
    assert names(store.unfinished_jobs()) == ["next", "last", "bad"]


def test_innocent_jobs_survive_three_kills(
    settings_of: SettingsOf, journal: Path, tmp_path: Path
) -> None:
    """Two jobs whose service dies three times: they ran together once, so neither is given up."""
    settings = settings_of(concurrency=2)
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        both = [
            live.plan(plan_body(job=job(global_batch_size=size)), wait=0).json()["id"]
            for size in (8, 16)
        ]
        until(lambda: [status(live, each) for each in both] == ["running"] * 2)
    with closing(Store(settings.database)) as left:
        for death in range(3):
            for index, each in enumerate(both):
                if death == 0 or index == death % 2:  # after the first death alone
                    left.start_job(each, f"{death} {index}")
            left.take_back()
    (tmp_path / "gate").touch()
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        for each in both:
            until(lambda each=each: status(live, each) == "succeeded")


def test_suspects_run_alone(
    settings_of: SettingsOf, journal: Path, tmp_path: Path
) -> None:
    """A job that may be the reason of a death shares its process with no other."""
    settings = settings_of(concurrency=2)
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        both = [
            live.plan(plan_body(job=job(global_batch_size=size)), wait=0).json()["id"]
            for size in (8, 16)
        ]
        until(lambda: len(pids(journal)) == 2)
    with closing(Store(settings.database)) as left:
        for each in both:
            left.start_job(each, each)
        left.take_back()
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        until(lambda: len(pids(journal)) == 3)
        time.sleep(0.5)
        assert [status(live, each) for each in both] == ["running", "queued"]
        (tmp_path / "gate").touch()
        until(lambda: status(live, both[1]) == "succeeded")


def test_a_database_behind_a_link_has_one_owner(tmp_path: Path) -> None:
    """A symbolic link is another name of the same file."""
    path = tmp_path / "planner.db"
    (tmp_path / "link.db").symlink_to(path)
    with closing(Store(path)), pytest.raises(RunError, match="another service"):
        Store(tmp_path / "link.db")


def test_a_prediction_passes_plans(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """With all solvers of plans at work, a prediction is answered."""
    with running(settings, Predicting(journal, tmp_path / "gate")) as live:
        live.plan(plan_body(), wait=0)
        until(lambda: pids(journal))
        assert live.post("/v1/predictions", PREDICTION).status_code == 200


def test_a_prediction_ends_when_its_client_goes(
    settings: Settings, journal: Path
) -> None:
    """Its process is killed, and the next prediction does not wait for it."""
    with running(settings, Stuck(journal)) as live:
        url = live.client.base_url
        connection = HTTPConnection(url.host, url.port)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/predictions", json.dumps(PREDICTION), headers)
        (pid,) = until(lambda: pids(journal))
        assert is_alive(pid)
        connection.close()
        until(lambda: not is_alive(pid))


def test_a_writer_does_not_block_the_event_loop(
    settings: Settings, journal: Path, tmp_path: Path
) -> None:
    """While another process writes to the database, everything that only reads is answered."""
    with running(settings, Gated(journal, tmp_path / "gate")) as live:
        job_id = live.plan(plan_body(), wait=0).json()["id"]
        until(lambda: status(live, job_id) == "running")
        with closing(sqlite3.connect(settings.database)) as other:
            other.execute("BEGIN IMMEDIATE")
            cancel = threading.Thread(
                target=lambda: live.client.delete(f"/v1/jobs/{job_id}")
            )
            cancel.start()
            time.sleep(0.2)  # it now waits for the other process
            started = time.monotonic()
            for path in ("/healthz", f"/v1/jobs/{job_id}", "/v1/plans"):
                assert live.get(path).status_code == 200
            assert time.monotonic() - started < 2
            assert cancel.is_alive()
            other.rollback()
        cancel.join()
        assert status(live, job_id) == "cancelled"
