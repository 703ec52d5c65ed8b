"""The store: what it keeps, who may change a job's status, and what it refuses to open."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from planner.api.store import JobRow, PlanRow, Store, Swept, days_ago
from planner.errors import DocumentError, RunError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    store = Store(tmp_path / "planner.db")
    yield store
    store.close()


def job_in(store: Store, plan_id: str = "p", job_id: str = "j") -> JobRow:
    """A queued job."""
    store.add_job(job_id, plan_id=plan_id, profile_id="q", request="{}")
    job = store.job(job_id)
    assert job is not None
    return job


def plan_row(
    plan_id: str = "p", *, final: bool = True, step_seconds: float | None = 1.0
) -> PlanRow:
    """A result."""
    status = "infeasible" if step_seconds is None else "succeeded"
    return PlanRow(
        0,
        plan_id,
        "q",
        status,
        "gpt2",
        8,
        step_seconds,
        final,
        "2026-01-01T00:00:00.000Z",
    )


def test_a_job_goes_from_queued_to_succeeded(store: Store) -> None:
    """Each step is stored with its event, and the result with the last."""
    job = job_in(store)
    assert store.start_job("j")
    store.progress("j", "incumbent", '{"incumbent_seconds": 1.0}')
    assert store.finish_with_result(job, plan_row(), '{"the": "plan"}')
    ended = store.job("j")
    assert ended is not None
    assert (ended.status, ended.finished, ended.attempts) == ("succeeded", True, 1)
    assert [event.name for event in store.events("j", after=0)] == [
        "queued",
        "started",
        "incumbent",
        "done",
    ]
    assert [event.number for event in store.events("j", after=2)] == [3, 4]
    found = store.plan("p")
    assert found is not None
    assert found[1] == '{"the": "plan"}'
    assert store.active_job("p") is None


def test_whoever_ends_a_job_first_wins(store: Store) -> None:
    """A cancelled job takes no result, no progress, no failure and no second start."""
    job = job_in(store)
    store.start_job("j")
    assert store.finish("j", "cancelled")
    assert not store.finish_with_result(job, plan_row(), "{}")
    assert not store.finish("j", "failed", "{}")
    assert not store.start_job("j")
    store.progress("j", "progress", "{}")
    store.requeue("j")
    ended = store.job("j")
    assert ended is not None
    assert (ended.status, ended.progress) == ("cancelled", None)
    assert store.plan("p") is None
    assert [event.name for event in store.events("j", after=0)] == [
        "queued",
        "started",
        "done",
    ]


def test_a_plan_has_one_active_job(store: Store) -> None:
    """The database itself refuses a second one, until the first has ended."""
    job_in(store)
    with pytest.raises(sqlite3.IntegrityError):
        job_in(store, job_id="k")
    store.finish("j", "cancelled")
    assert job_in(store, job_id="k").status == "queued"


def test_a_final_result_stays(store: Store) -> None:
    """Only a result that is not final may be replaced."""
    for index, (row, expected) in enumerate(
        [
            (plan_row(final=False, step_seconds=None), "0"),
            (plan_row(step_seconds=2.0), "1"),
            (plan_row(), "1"),
        ]
    ):
        job = job_in(store, job_id=str(index))
        store.start_job(job.id)
        store.finish_with_result(job, row, str(index))
        found = store.plan("p")
        assert found is not None
        assert found[1] == expected


def test_unfinished_jobs_come_oldest_first(store: Store) -> None:
    """Queued and running jobs are taken up in the order in which they were asked for."""
    for index in range(4):
        job_in(store, plan_id=f"p{index}", job_id=f"j{index}")
    store.start_job("j2")
    store.finish("j1", "failed", "{}")
    assert [job.id for job in store.unfinished_jobs()] == ["j0", "j2", "j3"]


def test_a_failed_change_leaves_nothing(store: Store) -> None:
    """A transaction that fails is undone, and the store goes on."""
    with pytest.raises(sqlite3.IntegrityError):
        store.add_measurement("no such plan", "{}")
    assert store.add_profile("q", "{}")
    assert not store.add_profile("q", "{}")
    assert store.profile("q") == "{}"


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    """What was stored is read by the next service."""
    first = Store(tmp_path / "planner.db")
    first.add_profile("q", "{}")
    first.close()
    second = Store(tmp_path / "planner.db")
    assert second.profile("q") == "{}"
    second.close()


def test_one_service_owns_a_database(store: Store, tmp_path: Path) -> None:
    """A second service on the same file is refused, for its jobs would be started twice."""
    with pytest.raises(RunError, match="another service"):
        Store(tmp_path / "planner.db")


def test_a_database_of_a_newer_planner_is_refused(tmp_path: Path) -> None:
    """The version of the schema is checked, and the lock given back."""
    path = tmp_path / "planner.db"
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE schema_version SET version = 99")
    connection.commit()
    connection.close()
    for _ in range(2):
        with pytest.raises(DocumentError, match="schema version 99"):
            Store(path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    """A wrong path does not destroy the file that stands there."""
    path = tmp_path / "notes.txt"
    path.write_text("not a database " * 100)
    with pytest.raises(DocumentError, match="not a usable database"):
        Store(path)
    assert path.read_text().startswith("not a database")


def test_a_directory_is_no_database(tmp_path: Path) -> None:
    """Nor is a path that names a directory."""
    with pytest.raises(DocumentError, match="not a usable database"):
        Store(tmp_path)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """The path is named."""
    (tmp_path / "file").touch()
    with pytest.raises(DocumentError, match="cannot be written"):
        Store(tmp_path / "file" / "planner.db")


def test_an_old_plan_goes_with_its_ended_jobs(store: Store) -> None:
    """Plans, unneeded profiles and ended jobs older than their limits are deleted; what is measured or active stays."""
    for name, created_at in (
        ("old", "2026-01-01"),
        ("measured", "2026-01-01"),
        ("young", "2026-03-01"),
    ):
        job = job_in(store, name, f"job of {name}")
        store.start_job(job.id)
        row = replace(
            plan_row(name),
            profile_id=f"profile of {name}",
            created_at=f"{created_at}T00:00:00.000Z",
        )
        store.finish_with_result(job, row, "{}")
        store.add_profile(row.profile_id, "{}")
    store.add_measurement("measured", "{}")
    store.add_profile("asked for by nobody", "{}")
    active = job_in(store, "active", "job that goes on")
    assert store.sweep(plans_before=None, jobs_before=None) == Swept(0, 0, 0)
    assert store.sweep(plans_before="2026-02-01", jobs_before="2026-02-01") == Swept(
        1, 0, 0
    )
    assert [store.plan(name) is not None for name in ("old", "measured", "young")] == [
        False,
        True,
        True,
    ]
    assert (store.job("job of old"), store.events("job of old", after=0)) == (None, [])
    assert len(store.measurements("measured")) == 1
    swept = store.sweep(plans_before=days_ago(-1), jobs_before=days_ago(-1))
    assert swept == Swept(plans=1, profiles=3, jobs=1)
    assert store.profile("profile of measured") is not None
    assert [job.id for job in store.unfinished_jobs()] == [active.id]


def test_a_profile_of_an_active_job_stays(store: Store) -> None:
    """However old it is; and asking for it again makes it young."""
    store.add_profile("q", "{}")
    job_in(store, "p", "j")
    assert store.sweep(plans_before=days_ago(-1), jobs_before=None) == Swept(0, 0, 0)
    store.finish("j", "cancelled")
    before = days_ago(0)
    time.sleep(0.01)
    assert store.touch_profile("q")
    assert store.sweep(plans_before=before, jobs_before=None) == Swept(0, 0, 0)
    assert store.sweep(plans_before=days_ago(-1), jobs_before=None) == Swept(0, 1, 0)
    assert not store.touch_profile("q")


def test_a_running_store_is_backed_up(store: Store, tmp_path: Path) -> None:
    """As the guide says: VACUUM INTO, by another connection, while the service writes; the copy opens as a database."""
    job = job_in(store)
    store.start_job("j")
    store.finish_with_result(job, plan_row(), "{}")
    copy = tmp_path / "backup.db"
    with closing(sqlite3.connect(tmp_path / "planner.db")) as other:
        other.execute(f"VACUUM INTO '{copy}'")
    with closing(Store(copy)) as restored:
        assert restored.plan("p") == store.plan("p")
