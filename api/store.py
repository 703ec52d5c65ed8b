"""Profiles, plans, jobs, events and measured runs in one SQLite file.

The file is in WAL mode; ``VACUUM INTO`` makes a backup. A service locks the file while it
runs. A job that is `running` when the service starts therefore belongs to a dead process
and is queued again.

The status of a job changes by compare-and-set: the first of solver, client and shutdown
to finish a job decides its status.
"""

from __future__ import annotations

import fcntl
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from planner.api.documents import FINISHED, JobStatus
from planner.errors import DocumentError, RunError

SCHEMA_VERSION = 1
LARGEST_INTEGER = 2**63 - 1
"""Largest integer of SQLite."""
SCHEMA = """
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
"""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A stored result, without its document."""

    number: int
    id: str
    profile_id: str
    status: Literal["succeeded", "infeasible"]
    model: str
    devices: int
    step_seconds: float | None
    final: bool
    """False: the search ended without proof that no layout fits, and is repeated."""
    created_at: str


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job. `request` is the `PlanRequest` without its profile, as JSON; `progress` and
    `problem` are JSON too."""

    id: str
    plan_id: str
    profile_id: str
    request: str
    status: JobStatus
    attempts: int
    progress: str | None
    problem: str | None
    created_at: str
    started_at: str | None
    finished_at: str | None

    @property
    def finished(self) -> bool:
        """Whether the job has its last event."""
        return self.status in FINISHED


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event of a job; `data` is JSON."""

    number: int
    name: str
    data: str


@dataclass(frozen=True, slots=True)
class MeasurementRow:
    """A measured run of a plan; `document` is JSON."""

    id: int
    plan_id: str
    document: str
    created_at: str


@dataclass(frozen=True, slots=True)
class Swept:
    """Numbers of deleted rows."""

    plans: int
    profiles: int
    jobs: int


PLAN_COLUMNS = tuple(field.name for field in fields(PlanRow) if field.name != "number")


Row = TypeVar("Row", PlanRow, JobRow, EventRow, MeasurementRow)


class Store:
    """The database. Thread-safe: one connection, one lock, one transaction per method."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._owner = _own(path)
        try:
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=10
            )
        except sqlite3.Error as error:
            self._owner.close()
            raise _unusable(path, error) from None
        try:
            self._prepare(path)
        except sqlite3.Error as error:
            self.close()
            raise _unusable(path, error) from None

    def close(self) -> None:
        """Close and unlock the file."""
        with self._lock:
            self._connection.close()
            self._owner.close()

    def check_writable(self) -> None:
        """Raise `sqlite3.Error` if the database cannot be written."""
        with self._transaction():
            self._run("UPDATE schema_version SET version = version")

    # Profiles

    def add_profile(self, profile_id: str, document: str) -> bool:
        """Store a profile; False if it is stored already."""
        sql = "INSERT INTO profiles VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
        with self._transaction():
            return self._run(sql, profile_id, document, now()).rowcount > 0

    def touch_profile(self, profile_id: str) -> bool:
        """Whether the profile is stored; renews its age, so that no sweep deletes it now."""
        with self._transaction():
            return (
                self._run(
                    "UPDATE profiles SET created_at = ? WHERE id = ?", now(), profile_id
                ).rowcount
                > 0
            )

    def profile(self, profile_id: str) -> str | None:
        """JSON of a profile."""
        return self._text("SELECT document FROM profiles WHERE id = ?", profile_id)

    # Plans

    def plan(self, plan_id: str) -> tuple[PlanRow, str] | None:
        """A result and its JSON."""
        rows = self._rows(PlanRow, "FROM plans WHERE id = ?", plan_id)
        if not rows:
            return None
        document = self._text("SELECT document FROM plans WHERE id = ?", plan_id)
        assert document is not None
        return rows[0], document

    def plans(self, *, before: int | None, limit: int) -> list[PlanRow]:
        """Results, newest first, older than number `before`."""
        newest = LARGEST_INTEGER if before is None else before
        return self._rows(
            PlanRow,
            "FROM plans WHERE number < ? ORDER BY number DESC LIMIT ?",
            newest,
            limit,
        )

    # Jobs

    def add_job(
        self, job_id: str, *, plan_id: str, profile_id: str, request: str
    ) -> None:
        """Queue a job. The caller has checked that the plan has no active job."""
        sql = "INSERT INTO jobs (id, plan_id, profile_id, request, status, created_at) VALUES (?, ?, ?, ?, 'queued', ?)"
        with self._transaction():
            self._run(sql, job_id, plan_id, profile_id, request, now())
            self._add_event(job_id, "queued", "{}")

    def job(self, job_id: str) -> JobRow | None:
        """A job."""
        rows = self._rows(JobRow, "FROM jobs WHERE id = ?", job_id)
        return rows[0] if rows else None

    def active_job(self, plan_id: str) -> JobRow | None:
        """The queued or running job of a plan."""
        rows = self._rows(
            JobRow,
            "FROM jobs WHERE plan_id = ? AND status IN ('queued', 'running')",
            plan_id,
        )
        return rows[0] if rows else None

    def start_job(self, job_id: str) -> bool:
        """queued -> running; False if the job is not queued."""
        sql = "UPDATE jobs SET status = 'running', attempts = attempts + 1, started_at = ? "
        with self._transaction():
            started = (
                self._run(
                    sql + "WHERE id = ? AND status = 'queued'", now(), job_id
                ).rowcount
                > 0
            )
            if started:
                self._add_event(job_id, "started", "{}")
            return started

    def progress(self, job_id: str, event: str, progress: str) -> None:
        """Store the progress of a running job."""
        sql = "UPDATE jobs SET progress = ? WHERE id = ? AND status = 'running'"
        with self._transaction():
            if self._run(sql, progress, job_id).rowcount:
                self._add_event(job_id, event, progress)

    def finish_with_result(self, job: JobRow, plan: PlanRow, document: str) -> bool:
        """running -> succeeded or infeasible, with the result; False if the job has ended."""
        with self._transaction():
            if not self._finish(job.id, plan.status, None):
                return False
            values = [getattr(plan, name) for name in PLAN_COLUMNS]
            updates = ", ".join(
                f"{name} = excluded.{name}" for name in (*PLAN_COLUMNS, "document")
            )
            self._run(
                f"INSERT INTO plans ({', '.join(PLAN_COLUMNS)}, document) VALUES ({'?, ' * len(values)}?)"
                f" ON CONFLICT (id) DO UPDATE SET {updates} WHERE NOT plans.final",
                *values,
                document,
            )
            return True

    def finish(
        self,
        job_id: str,
        status: Literal["failed", "cancelled"],
        problem: str | None = None,
    ) -> bool:
        """queued or running -> failed or cancelled; False if the job has ended."""
        with self._transaction():
            return self._finish(job_id, status, problem)

    def requeue(self, job_id: str, *, uncounted: bool = False) -> None:
        """running -> queued, because the service stopped.

        Args:
            job_id: of the job.
            uncounted: do not count the attempt, because the stop was orderly.
        """
        sql = (
            "UPDATE jobs SET status = 'queued', started_at = NULL, progress = NULL, attempts = attempts - ? "
            "WHERE id = ? AND status = 'running'"
        )
        with self._transaction():
            if self._run(sql, int(uncounted), job_id).rowcount:
                self._add_event(job_id, "queued", "{}")

    def unfinished_jobs(self) -> list[JobRow]:
        """Queued and running jobs, oldest first."""
        return self._rows(
            JobRow,
            "FROM jobs WHERE status IN ('queued', 'running') ORDER BY created_at, rowid",
        )

    def events(self, job_id: str, *, after: int) -> list[EventRow]:
        """Events of a job after number `after`."""
        return self._rows(
            EventRow,
            "FROM events WHERE job_id = ? AND number > ? ORDER BY number",
            job_id,
            after,
        )

    # Measured runs

    def add_measurement(self, plan_id: str, document: str) -> MeasurementRow:
        """Store a measured run."""
        created_at = now()
        with self._transaction():
            sql = "INSERT INTO measurements (plan_id, document, created_at) VALUES (?, ?, ?)"
            number = self._run(sql, plan_id, document, created_at).lastrowid
        assert number is not None
        return MeasurementRow(number, plan_id, document, created_at)

    def measurement(self, plan_id: str, number: int) -> MeasurementRow | None:
        """A measured run of a plan."""
        rows = self._rows(
            MeasurementRow,
            "FROM measurements WHERE plan_id = ? AND id = ?",
            plan_id,
            number,
        )
        return rows[0] if rows else None

    def measurements(self, plan_id: str) -> list[MeasurementRow]:
        """Measured runs of a plan, newest first."""
        return self._rows(
            MeasurementRow,
            "FROM measurements WHERE plan_id = ? ORDER BY id DESC",
            plan_id,
        )

    def measured_plans(self) -> Iterator[tuple[int, str, str]]:
        """Number, plan document and run document of every measured run, oldest first."""
        columns = "SELECT measurements.id, plans.document, measurements.document FROM measurements"
        yield from self._run(
            f"{columns} JOIN plans ON plans.id = measurements.plan_id ORDER BY measurements.id"
        )

    # Deletion

    def delete_plan(self, plan_id: str) -> bool:
        """Delete a plan with its measured runs and finished jobs; False if there is none."""
        with self._transaction():
            self._run("DELETE FROM measurements WHERE plan_id = ?", plan_id)
            return self._delete_plans("id = ?", plan_id) > 0

    def sweep(self, *, plans_before: str | None, jobs_before: str | None) -> Swept:
        """Delete old rows.

        Args:
            plans_before: time before which plans without measured runs, and profiles
                without plans and active jobs, are deleted; None: never.
            jobs_before: time before which finished jobs are deleted; None: never.
        """
        plans = profiles = jobs = 0
        with self._transaction():
            if plans_before is not None:
                unmeasured = "id NOT IN (SELECT plan_id FROM measurements)"
                plans = self._delete_plans(
                    f"created_at < ? AND {unmeasured}", plans_before
                )
                active = (
                    "SELECT profile_id FROM jobs WHERE status IN ('queued', 'running')"
                )
                needed = f"SELECT profile_id FROM plans UNION {active}"
                sql = f"DELETE FROM profiles WHERE created_at < ? AND id NOT IN ({needed})"
                profiles = self._run(sql, plans_before).rowcount
            if jobs_before is not None:
                jobs = self._delete_jobs("finished_at < ?", jobs_before)
        return Swept(plans, profiles, jobs)

    # Private

    def _delete_plans(self, condition: str, value: str) -> int:
        """Delete plans with their finished jobs; an active job stores its plan again."""
        self._delete_jobs(
            f"finished_at IS NOT NULL AND plan_id IN (SELECT id FROM plans WHERE {condition})",
            value,
        )
        return self._run(f"DELETE FROM plans WHERE {condition}", value).rowcount

    def _delete_jobs(self, condition: str, value: str) -> int:
        """Delete jobs with their events."""
        self._run(
            f"DELETE FROM events WHERE job_id IN (SELECT id FROM jobs WHERE {condition})",
            value,
        )
        return self._run(f"DELETE FROM jobs WHERE {condition}", value).rowcount

    def _prepare(self, path: Path) -> None:
        self._run("PRAGMA journal_mode = WAL")
        self._run("PRAGMA synchronous = NORMAL")
        self._run("PRAGMA foreign_keys = ON")
        if not self._text(
            "SELECT name FROM sqlite_master WHERE name = 'schema_version'"
        ):
            self._connection.executescript(
                f"BEGIN; {SCHEMA} INSERT INTO schema_version VALUES ({SCHEMA_VERSION}); COMMIT;"
            )
        version = self._run("SELECT version FROM schema_version").fetchone()[0]
        if version != SCHEMA_VERSION:
            self.close()
            raise DocumentError(
                f"has schema version {version}, but this planner needs {SCHEMA_VERSION}.",
                field=str(path),
                hint="use the planner that wrote the file, or give another path.",
            )

    def _finish(self, job_id: str, status: str, problem: str | None) -> bool:
        sql = "UPDATE jobs SET status = ?, problem = ?, finished_at = ? WHERE id = ? AND status IN ('queued', 'running')"
        if not self._run(sql, status, problem, now(), job_id).rowcount:
            return False
        self._add_event(job_id, "done", f'{{"status":"{status}"}}')
        return True

    def _add_event(self, job_id: str, name: str, data: str) -> None:
        sql = "INSERT INTO events SELECT ?, 1 + coalesce(max(number), 0), ?, ? FROM events WHERE job_id = ?"
        self._run(sql, job_id, name, data, job_id)

    def _rows(self, kind: type[Row], sql: str, *values: Any) -> list[Row]:
        columns = ", ".join(field.name for field in fields(kind))
        with self._lock:
            return [
                kind(*row)
                for row in self._run(f"SELECT {columns} {sql}", *values).fetchall()
            ]

    def _text(self, sql: str, *values: Any) -> str | None:
        with self._lock:
            row: Sequence[str] | None = self._run(sql, *values).fetchone()
        return row[0] if row else None

    def _run(self, sql: str, *values: Any) -> sqlite3.Cursor:
        with self._lock:
            return self._connection.execute(sql, values)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._run("BEGIN IMMEDIATE")
            try:
                yield
                self._run("COMMIT")
            except BaseException:
                # On a full disk SQLite has rolled back already.
                if self._connection.in_transaction:
                    self._run("ROLLBACK")
                raise


def now() -> str:
    """The current time, RFC 3339, UTC."""
    return days_ago(0)


def days_ago(days: float) -> str:
    """A time in the past in the format of `now`, which sorts by time."""
    moment = datetime.now(UTC) - timedelta(days=days)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _unusable(path: Path, error: sqlite3.Error) -> DocumentError:
    return DocumentError(
        f"is not a usable database: {error}.",
        field=str(path),
        hint="give another path, or restore the file.",
    )


def _own(path: Path) -> Any:
    """Lock ``<path>.lock``; the system unlocks it when the process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise DocumentError(
            f"cannot be written: {error.strerror}.",
            field=str(path),
            hint="give a path in a writable directory.",
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise RunError(
            "another service uses this database.",
            field=str(path),
            hint="stop it, or give another path.",
        ) from None
    return lock
