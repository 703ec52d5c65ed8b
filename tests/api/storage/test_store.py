"""The store: what it keeps, who may change a job's status, and what it refuses to open."""

from __future__ import annotations

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.exc import IntegrityError

from planner.api.storage.database import NEWEST_VERSION
from planner.api.storage.store import JobCounts, JobRow, PlanRow, Store, Swept, days_ago
from planner.api.storage.tables import metadata
from planner.errors import DocumentError, RunError


def job_in(store: Store, plan_id: str = "p", job_id: str = "j") -> JobRow:
    """A queued job."""
    return store.add_job(job_id, plan_id=plan_id, profile_id="q", request="{}")


def started(store: Store, job_id: str = "j") -> JobRow:
    """A queued job, started."""
    job = store.start_job(job_id, f"attempt at {job_id}")
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
    job_in(store)
    job = started(store)
    assert store.progress(job, "incumbent", '{"incumbent_seconds": 1.0}')
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
    job_in(store)
    job = started(store)
    assert store.finish("j", "cancelled")
    assert not store.finish_with_result(job, plan_row(), "{}")
    assert not store.finish("j", "failed", "{}")
    assert not store.fail(job, "{}")
    assert not store.start_job("j", "another attempt")
    assert not store.progress(job, "progress", "{}")
    store.requeue(job)
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
    """A second request joins the first job, until that has ended."""
    first = job_in(store)
    assert job_in(store, job_id="k") == first
    store.finish("j", "cancelled")
    assert job_in(store, job_id="k").status == "queued"


@pytest.mark.parametrize("final", [True, False])
def test_a_plan_found_by_now_is_not_searched_again(store: Store, final: bool) -> None:
    """Its job may end after a request looked for the plan, before it adds a job."""
    job_in(store)
    store.finish_with_result(started(store), plan_row(final=final), "{}")
    assert job_in(store, job_id="k").status == ("succeeded" if final else "queued")


def test_a_final_result_stays(store: Store) -> None:
    """Only a result that is not final may be replaced."""
    for index, (row, expected) in enumerate(
        [
            (plan_row(final=False, step_seconds=None), "0"),
            (plan_row(step_seconds=2.0), "1"),
            (plan_row(), "1"),
        ]
    ):
        job_in(store, plan_id=f"q{index}", job_id=str(index))
        job = started(store, str(index))
        store.finish_with_result(job, row, str(index))
        found = store.plan("p")
        assert found is not None
        assert found[1] == expected


def test_unfinished_jobs_come_oldest_first(store: Store) -> None:
    """Queued and running jobs are taken up in the order in which they were asked for."""
    for index in range(4):
        job_in(store, plan_id=f"p{index}", job_id=f"j{index}")
    started(store, "j2")
    store.finish("j1", "failed", "{}")
    assert [job.id for job in store.unfinished_jobs()] == ["j0", "j2", "j3"]


def test_a_failed_change_leaves_nothing(store: Store) -> None:
    """A transaction that fails is undone, and the store goes on."""
    with pytest.raises(IntegrityError):
        store.add_measurement("no such plan", "{}")
    assert store.add_profile("q", "{}")
    assert not store.add_profile("q", "{}")
    assert store.profile("q") == "{}"


def test_everything_is_there_after_reopening(place: Path | str) -> None:
    """What was stored is read by the next service."""
    first = Store(place)
    first.add_profile("q", "{}")
    first.close()
    second = Store(place)
    assert second.profile("q") == "{}"
    second.close()


def test_one_service_owns_a_file(tmp_path: Path) -> None:
    """A second service on the same file is refused, for its jobs would be started twice."""
    path = tmp_path / "planner.db"
    with closing(Store(path)), pytest.raises(RunError, match="another service"):
        Store(path)


def test_a_database_of_a_newer_planner_is_refused(tmp_path: Path) -> None:
    """The version of the schema is checked, and the lock given back."""
    path = tmp_path / "planner.db"
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = 99")
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
        job_in(store, name, f"job of {name}")
        job = started(store, f"job of {name}")
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


def test_a_running_store_is_backed_up(tmp_path: Path) -> None:
    """As the guide says: VACUUM INTO, by another connection, while the service writes; the copy opens as a database."""
    path, copy = tmp_path / "planner.db", tmp_path / "backup.db"
    with closing(Store(path)) as store:
        job_in(store)
        job = started(store)
        store.finish_with_result(job, plan_row(), "{}")
        with closing(sqlite3.connect(path)) as other:
            other.execute(f"VACUUM INTO '{copy}'")
        with closing(Store(copy)) as restored:
            assert restored.plan("p") == store.plan("p")


def add_calibration(store: Store, calibration_id: str, name: str = "own") -> bool:
    """Store a calibration."""
    return store.add_calibration(
        calibration_id, name=name, measured_runs=3, document=f'{{"of": "{name}"}}'
    )


def test_calibrations_are_numbered_within_their_name(store: Store) -> None:
    """An equal one is stored once, and a deleted one leaves its version to no other."""
    assert [add_calibration(store, each) for each in ("a", "a", "b")] == [1, 0, 1]
    assert add_calibration(store, "c", "other")
    rows = store.calibrations(before=None, limit=10)
    assert [(row.id, row.version) for row in rows] == [("c", 1), ("b", 2), ("a", 1)]
    older = store.calibrations(before=rows[0].number, limit=1)
    assert [row.id for row in older] == ["b"]
    store.delete_calibration("b")
    assert store.calibration("b") is None
    assert len(store.calibrations(before=None, limit=10)) == 2
    assert add_calibration(store, "d")
    assert add_calibration(store, "b")
    versions = {row.id: row.version for row in store.calibrations(before=None, limit=9)}
    assert versions == {"a": 1, "b": 2, "c": 1, "d": 3}


def test_versions_are_unique_among_writers(store: Store) -> None:
    """Calibrations of one name that are stored at the same time get a version each."""
    ids = [f"id{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda each: add_calibration(store, each), ids))
    rows = store.calibrations(before=None, limit=100)
    assert sorted(row.version for row in rows) == list(range(1, 25))


SCHEMA_BEFORE_ALEMBIC = """
CREATE TABLE schema_version (version INTEGER NOT NULL);
CREATE TABLE profiles (
    id TEXT PRIMARY KEY, document TEXT NOT NULL, created_at TEXT NOT NULL
);
CREATE TABLE plans (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, profile_id TEXT NOT NULL,
    status TEXT NOT NULL, model TEXT NOT NULL, devices INTEGER NOT NULL, step_seconds REAL,
    final INTEGER NOT NULL, document TEXT NOT NULL, created_at TEXT NOT NULL
);
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, plan_id TEXT NOT NULL, profile_id TEXT NOT NULL, request TEXT NOT NULL,
    status TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, progress TEXT, problem TEXT,
    created_at TEXT NOT NULL, started_at TEXT, finished_at TEXT
);
CREATE UNIQUE INDEX one_active_job_per_plan ON jobs (plan_id) WHERE status IN ('queued', 'running');
CREATE TABLE events (
    job_id TEXT NOT NULL REFERENCES jobs (id), number INTEGER NOT NULL, name TEXT NOT NULL, data TEXT NOT NULL,
    PRIMARY KEY (job_id, number)
) WITHOUT ROWID;
CREATE TABLE measurements (
    id INTEGER PRIMARY KEY AUTOINCREMENT, plan_id TEXT NOT NULL REFERENCES plans (id), document TEXT NOT NULL,
    created_at TEXT NOT NULL
);
CREATE INDEX measurements_of_plan ON measurements (plan_id);
INSERT INTO schema_version VALUES (1);
INSERT INTO profiles VALUES ('q', '{"a": 1}', '2026-01-01T00:00:00.000Z');
INSERT INTO plans VALUES (7, 'p', 'q', 'succeeded', 'gpt2', 8, 1.5, 1, '{"the": "plan"}', '2026-01-01T00:00:00.000Z');
INSERT INTO jobs VALUES ('j', 'r', 'q', '{}', 'running', 2, NULL, NULL, '2026-01-01T00:00:00.000Z', 'now', NULL);
INSERT INTO events VALUES ('j', 1, 'queued', '{}');
INSERT INTO measurements VALUES (3, 'p', '{"run": 1}', '2026-01-01T00:00:00.000Z');
"""
"""What the planner before 0.3 left: every kind of row once."""


def test_a_file_from_before_alembic_is_migrated(tmp_path: Path) -> None:
    """All rows stay, an unfinished job is taken up, and new rows are numbered after the old ones."""
    path = tmp_path / "planner.db"
    with closing(sqlite3.connect(path)) as old:
        old.executescript(SCHEMA_BEFORE_ALEMBIC)
    for _ in range(2):  # the second time there is nothing left to migrate
        with closing(Store(path)) as store:
            found = store.plan("p")
            assert found is not None
            row, document = found
            assert (row.number, row.final, row.step_seconds) == (7, True, 1.5)
            assert document == '{"the": "plan"}'
            assert store.profile("q") == '{"a": 1}'
            assert [run.id for run in store.measurements("p")] == [3]
            assert store.job_counts() == JobCounts(0, 1, 1)
    with closing(Store(path)) as store:
        assert [job.attempts for job in store.take_back()] == [2]
        assert [event.number for event in store.events("j", after=0)] == [1, 2]
        assert store.add_measurement("p", "{}").id == 4


def test_migrations_make_the_tables_that_queries_use(store: Store) -> None:
    """`api/storage/tables.py` and the files in `api/storage/migrations` say the same."""
    with store._database.read() as connection:
        context = MigrationContext.configure(connection, opts={"include_name": is_ours})
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == NEWEST_VERSION


def is_ours(name: str | None, kind: str, parents: object) -> bool:
    """Leave out the tables of procrastinate and Alembic."""
    return kind != "table" or not (name or "").startswith(("procrastinate", "alembic"))
