"""Profiles, calibrations, plans, jobs, events and measured runs in a database.

The status of a job changes by compare-and-set: the first of solver, client and shutdown
to finish a job decides its status. Every attempt has a random id, so that a process that
has lost its job to another one cannot change it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Executable,
    Row,
    Select,
    Table,
    delete,
    exists,
    func,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from planner.api.storage.database import Database
from planner.api.storage.tables import (
    ACTIVE,
    calibrations,
    events,
    jobs,
    measurements,
    plans,
    profiles,
)
from planner.spec.answers import FINISHED, JobStatus

LARGEST_INTEGER = 2**63 - 1
"""Largest integer of both databases."""
CHANNEL = "planner_jobs"
"""PostgreSQL notifies this channel of events: job id, space, name of the event."""


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
class CalibrationRow:
    """A stored calibration, without its document."""

    number: int
    id: str
    name: str
    version: int
    measured_runs: int
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
    """How often the job has started."""
    progress: str | None
    problem: str | None
    created_at: str
    started_at: str | None
    finished_at: str | None
    client: str
    """Who requested the job first."""
    turn: int
    """Queued jobs start in the order of their turns: one of each client per turn."""
    attempt: str | None
    """Random id of the attempt that runs."""
    deaths: int
    """How many processes died while they ran this job alone."""
    company: int | None
    """Most jobs that one process may run at a time with this one, itself included,
    because a process died that ran twice as many; None: any number."""

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
class JobCounts:
    """Numbers of unfinished jobs."""

    queued: int
    running: int
    of_client: int


@dataclass(frozen=True, slots=True)
class Swept:
    """Numbers of deleted rows."""

    plans: int
    profiles: int
    jobs: int


def _columns(table: Table, row: type[Any]) -> list[Column[Any]]:
    """The columns of a table that a row has, in the order of its fields."""
    return [table.c[field.name] for field in fields(row)]


SELECT_CALIBRATIONS = select(*_columns(calibrations, CalibrationRow)).where(
    calibrations.c.document.is_not(None)
)
SELECT_PLANS = select(*_columns(plans, PlanRow))
SELECT_JOBS = select(*_columns(jobs, JobRow))
SELECT_EVENTS = select(*_columns(events, EventRow))
SELECT_MEASUREMENTS = select(*_columns(measurements, MeasurementRow))
ACTIVE_JOB = jobs.c.status.in_(ACTIVE)
FINAL_JOB = jobs.c.status.in_(("succeeded", "infeasible")) & exists().where(
    plans.c.id == jobs.c.plan_id, plans.c.final
)


class Store:
    """The database of the service. Thread-safe: one transaction per method.

    Every method raises `planner.api.storage.database.StoreError` while the database fails.

    Args:
        place: path of a SQLite file, or ``postgresql://`` URL.

    Raises:
        DocumentError: it is not a usable database, or a newer planner wrote it.
        RunError: another service uses the SQLite file.
    """

    def __init__(self, place: Path | str) -> None:
        self._database = Database(place)
        self.on_event: Callable[[str, str], None] = lambda job_id, name: None
        """Called after each event of a job in a SQLite file; PostgreSQL notifies."""
        self.on_delete: Callable[[], None] = lambda: None
        """Called after plans, profiles or calibrations were deleted through this object."""

    def close(self) -> None:
        """Close and unlock the database."""
        self._database.close()

    def check_writable(self) -> None:
        """Raise `StoreError` if the database cannot be written."""
        with self._database.write() as connection:
            connection.execute(
                text("UPDATE alembic_version SET version_num = version_num")
            )

    # Profiles

    def add_profile(self, profile_id: str, document: str) -> bool:
        """Store a profile; False if it is stored already."""
        with self._database.write() as connection:
            row = {"id": profile_id, "document": document, "created_at": now()}
            return _add(connection, profiles, row)

    def touch_profile(self, profile_id: str) -> bool:
        """Whether the profile is stored; renews its age, so that no sweep deletes it now."""
        with self._database.write() as connection:
            touch = update(profiles).where(profiles.c.id == profile_id)
            return _changes(connection, touch.values(created_at=now())) > 0

    def profile(self, profile_id: str) -> str | None:
        """JSON of a profile."""
        found = self._first(
            select(profiles.c.document).where(profiles.c.id == _id(profile_id))
        )
        return found[0] if found else None

    # Calibrations

    def add_calibration(
        self, calibration_id: str, *, name: str, measured_runs: int, document: str
    ) -> bool:
        """Store the next version of a calibration; False if it is stored already.

        A calibration that was deleted becomes the version that it was.
        """
        this = calibrations.c.id == calibration_id
        deleted = calibrations.c.document.is_(None)
        restore = update(calibrations).where(this, deleted).values(document=document)
        last = select(func.coalesce(func.max(calibrations.c.version), 0))
        last = last.where(calibrations.c.name == name)
        row = {
            "id": calibration_id,
            "name": name,
            "version": 1 + last.scalar_subquery(),
            "measured_runs": measured_runs,
            "document": document,
            "created_at": now(),
        }
        while True:
            with self._database.write() as connection:
                if _changes(connection, restore):
                    return True
                if connection.execute(select(calibrations.c.id).where(this)).first():
                    return False
                # Another replica may store the same version at this moment.
                if _add(connection, calibrations, row):
                    return True

    def calibration(self, calibration_id: str) -> tuple[CalibrationRow, str] | None:
        """A calibration and its JSON."""
        query = SELECT_CALIBRATIONS.add_columns(calibrations.c.document)
        found = self._first(query.where(calibrations.c.id == _id(calibration_id)))
        return (CalibrationRow(*found[:-1]), found[-1]) if found else None

    def calibrations(self, *, before: int | None, limit: int) -> list[CalibrationRow]:
        """Calibrations, newest first, older than number `before`."""
        query = _newest(SELECT_CALIBRATIONS, calibrations, before, limit)
        return [CalibrationRow(*row) for row in self._all(query)]

    def delete_calibration(self, calibration_id: str) -> None:
        """Delete the document of a calibration; its version is not used again."""
        this = calibrations.c.id == calibration_id
        with self._database.write() as connection:
            connection.execute(update(calibrations).where(this).values(document=None))
        self.on_delete()

    # Plans

    def plan(self, plan_id: str) -> tuple[PlanRow, str] | None:
        """A result and its JSON."""
        query = SELECT_PLANS.add_columns(plans.c.document)
        found = self._first(query.where(plans.c.id == _id(plan_id)))
        return (PlanRow(*found[:-1]), found[-1]) if found else None

    def plans(self, *, before: int | None, limit: int) -> list[PlanRow]:
        """Results, newest first, older than number `before`."""
        query = _newest(SELECT_PLANS, plans, before, limit)
        return [PlanRow(*row) for row in self._all(query)]

    # Jobs

    def add_job(
        self,
        job_id: str,
        *,
        plan_id: str,
        profile_id: str,
        request: str,
        client: str = "",
        admit: Callable[[JobCounts], None] = lambda counts: None,
        enqueue: Callable[[Connection, JobRow], None] = lambda connection, job: None,
    ) -> JobRow:
        """Queue a job, or return the job that searches for the plan or has found it.

        It may have found it after the caller looked for the plan.

        Args:
            job_id: of the new job.
            plan_id: of its result.
            profile_id: of its profile.
            request: JSON.
            client: who requests it.
            admit: raises an error if there are too many jobs.
            enqueue: adds the job to a queue in the same database and transaction.
        """
        while True:
            with self._change() as change:
                known = change.job(jobs.c.plan_id == plan_id, ACTIVE_JOB | FINAL_JOB)
                if known is not None:
                    return known
                admit(_counts(change.connection, client))
                row = {
                    "id": job_id,
                    "plan_id": plan_id,
                    "profile_id": profile_id,
                    "request": request,
                    "status": "queued",
                    "created_at": now(),
                    "client": client,
                    "turn": _next_turn(change.connection, client),
                }
                # Another replica may queue the same plan at this moment; then join it.
                if _add(change.connection, jobs, row):
                    change.add_event(job_id, "queued", "{}")
                    added = change.job(jobs.c.id == job_id)
                    assert added is not None
                    enqueue(change.connection, added)
                    return added

    def job(self, job_id: str) -> JobRow | None:
        """A job."""
        found = self._first(SELECT_JOBS.where(jobs.c.id == _id(job_id)))
        return JobRow(*found) if found else None

    def active_job(self, plan_id: str) -> JobRow | None:
        """The queued or running job of a plan."""
        query = SELECT_JOBS.where(jobs.c.plan_id == plan_id, ACTIVE_JOB)
        found = self._first(query)
        return JobRow(*found) if found else None

    def last_job(self, plan_id: str) -> JobRow | None:
        """The newest job of a plan."""
        query = SELECT_JOBS.where(jobs.c.plan_id == plan_id)
        found = self._first(query.order_by(jobs.c.created_at.desc()).limit(1))
        return JobRow(*found) if found else None

    def jobs_of_plan(self, plan_id: str) -> list[JobRow]:
        """All jobs of a plan, oldest first."""
        query = SELECT_JOBS.where(jobs.c.plan_id == plan_id)
        return [JobRow(*row) for row in self._all(query.order_by(jobs.c.created_at))]

    def unfinished_jobs(self) -> list[JobRow]:
        """Queued and running jobs, in the order in which they start."""
        query = SELECT_JOBS.where(ACTIVE_JOB)
        query = query.order_by(jobs.c.turn, jobs.c.created_at, jobs.c.id)
        return [JobRow(*row) for row in self._all(query)]

    def job_counts(self, client: str = "") -> JobCounts:
        """Numbers of unfinished jobs, and of those of a client."""
        with self._database.read() as connection:
            return _counts(connection, client)

    def start_job(self, job_id: str, attempt: str) -> JobRow | None:
        """queued -> running; None if the job is not queued.

        May be repeated with the same attempt, because a lost connection leaves open
        whether the database has started it.
        """
        this_job = jobs.c.id == job_id
        start = update(jobs).where(this_job, jobs.c.status == "queued")
        start = start.values(
            status="running",
            attempt=attempt,
            attempts=jobs.c.attempts + 1,
            started_at=now(),
        )
        with self._change() as change:
            if _changes(change.connection, start):
                change.add_event(job_id, "started", "{}")
            runs = (jobs.c.status == "running") & (jobs.c.attempt == attempt)
            return change.job(this_job, runs)

    def progress(self, job: JobRow, event: str, progress: str) -> bool:
        """Store the progress of a job; False if this attempt does not run any more."""
        note = update(jobs).where(_this_attempt(job)).values(progress=progress)
        with self._change() as change:
            if not _changes(change.connection, note):
                return False
            change.add_event(job.id, event, progress)
            return True

    def finish_with_result(self, job: JobRow, plan: PlanRow, document: str) -> bool:
        """running -> succeeded or infeasible, with the result.

        False if this attempt does not run any more.
        """
        row = asdict(plan) | {"document": document}
        del row["number"]  # numbered by the database
        with self._change() as change:
            if not change.finish(plan.status, None, _this_attempt(job)):
                return False
            insert = _insert(change.connection, plans).values(row)
            change.connection.execute(
                insert.on_conflict_do_update(
                    index_elements=["id"],
                    set_={name: insert.excluded[name] for name in row},
                    where=~plans.c.final,
                )
            )
            return True

    def fail(self, job: JobRow, problem: str) -> bool:
        """Fail a job; False if its status or attempt is another one by now."""
        with self._change() as change:
            return bool(change.finish("failed", problem, _this_attempt(job)))

    def finish(
        self,
        job_id: str,
        status: Literal["failed", "cancelled"],
        problem: str | None = None,
    ) -> bool:
        """queued or running -> failed or cancelled; False if the job has ended."""
        unfinished = (jobs.c.id == job_id) & ACTIVE_JOB
        with self._change() as change:
            return bool(change.finish(status, problem, unfinished))

    def requeue(self, job: JobRow) -> None:
        """running -> queued, because its process stops."""
        with self._change() as change:
            change.requeue(_this_attempt(job))

    def take_back(self, job_ids: Sequence[str] | None = None) -> list[JobRow]:
        """running -> queued, because the process that ran these jobs has died.

        A job that ran alone counts the death. Otherwise one of several may be the
        reason: at most half of them run together from now on, until one is alone. They
        start after all others, which else might never start.

        Args:
            job_ids: of all jobs of the process; None: all jobs.

        Returns:
            The jobs that were running.
        """
        running = jobs.c.status == "running"
        if job_ids is not None:
            running &= jobs.c.id.in_(job_ids)
        with self._change() as change:
            query = SELECT_JOBS.where(running).with_for_update()
            found = [JobRow(*row) for row in change.connection.execute(query)]
            last_turn = select(func.max(jobs.c.turn)).where(ACTIVE_JOB)
            after_others = (change.connection.scalar(last_turn) or 0) + 1
            half = max(1, len(found) // 2)
            alone = len(found) == 1
            for job in found:
                change.requeue(
                    jobs.c.id == job.id,
                    company=min(half, job.company or half),
                    deaths=job.deaths + alone,
                    turn=after_others,
                )
        return found

    def others_that_died(self, job: JobRow) -> int:
        """Number of other jobs, in the time of this one, that died alone too.

        With many of them it is not the job that kills processes.
        """
        in_its_time = jobs.c.finished_at.is_(None) | (
            jobs.c.finished_at > job.created_at
        )
        query = select(func.count()).where(
            jobs.c.id != job.id, jobs.c.deaths > 0, in_its_time
        )
        found = self._first(query)
        return int(found[0]) if found else 0

    def events(self, job_id: str, *, after: int) -> list[EventRow]:
        """Events of a job after number `after`."""
        query = SELECT_EVENTS.where(events.c.job_id == job_id, events.c.number > after)
        return [EventRow(*row) for row in self._all(query.order_by(events.c.number))]

    # Measured runs

    def add_measurement(self, plan_id: str, document: str) -> MeasurementRow:
        """Store a measured run."""
        row = {"plan_id": plan_id, "document": document, "created_at": now()}
        with self._database.write() as connection:
            insert = _insert(connection, measurements).values(row)
            number = connection.scalar(insert.returning(measurements.c.id))
        return MeasurementRow(number, **row)

    def measurement(self, plan_id: str, number: int) -> MeasurementRow | None:
        """A measured run of a plan."""
        found = self._first(
            SELECT_MEASUREMENTS.where(
                measurements.c.plan_id == plan_id, measurements.c.id == number
            )
        )
        return MeasurementRow(*found) if found else None

    def measurements(self, plan_id: str) -> list[MeasurementRow]:
        """Measured runs of a plan, newest first."""
        query = SELECT_MEASUREMENTS.where(measurements.c.plan_id == plan_id)
        rows = self._all(query.order_by(measurements.c.id.desc()))
        return [MeasurementRow(*row) for row in rows]

    def measured_plans(self) -> Iterator[tuple[int, str, str]]:
        """Number, plan document and run document of every measured run, oldest first."""
        query = select(measurements.c.id, plans.c.document, measurements.c.document)
        query = query.join_from(measurements, plans).order_by(measurements.c.id)
        for row in self._all(query):
            number, plan, run = row
            yield number, plan, run

    # Deletion

    def delete_plan(self, plan_id: str) -> bool:
        """Delete a plan with its measured runs and finished jobs; False if there is none."""
        with self._database.write() as connection:
            connection.execute(
                delete(measurements).where(measurements.c.plan_id == plan_id)
            )
            deleted = _delete_plans(connection, plans.c.id == plan_id)
        self.on_delete()
        return deleted > 0

    def sweep(self, *, plans_before: str | None, jobs_before: str | None) -> Swept:
        """Delete old rows.

        Args:
            plans_before: time before which plans without measured runs, and profiles
                without plans and active jobs, are deleted; None: never.
            jobs_before: time before which finished jobs are deleted; None: never.
        """
        deleted = Swept(0, 0, 0)
        with self._database.write() as connection:
            if plans_before is not None:
                unmeasured = plans.c.id.not_in(select(measurements.c.plan_id))
                old_plans = (plans.c.created_at < plans_before) & unmeasured
                of_plans = _delete_plans(connection, old_plans)
                old_profiles = delete(profiles).where(
                    profiles.c.created_at < plans_before,
                    profiles.c.id.not_in(select(plans.c.profile_id)),
                    profiles.c.id.not_in(select(jobs.c.profile_id).where(ACTIVE_JOB)),
                )
                deleted = Swept(of_plans, _changes(connection, old_profiles), 0)
            if jobs_before is not None:
                old_jobs = _delete_jobs(connection, jobs.c.finished_at < jobs_before)
                deleted = Swept(deleted.plans, deleted.profiles, old_jobs)
        self.on_delete()
        return deleted

    # Private

    def _first(self, query: Select[*tuple[Any, ...]]) -> Row[*tuple[Any, ...]] | None:
        with self._database.read() as connection:
            return connection.execute(query).first()

    def _all(self, query: Select[*tuple[Any, ...]]) -> Sequence[Row[*tuple[Any, ...]]]:
        with self._database.read() as connection:
            return connection.execute(query).all()

    @contextmanager
    def _change(self) -> Iterator[_Change]:
        """A transaction that changes jobs, and wakes who waits for their events."""
        with self._database.write() as connection:
            change = _Change(connection)
            yield change
            if self._database.shared:
                change.notify()
        if not self._database.shared:
            for job_id, name in change.events:
                self.on_event(job_id, name)


class _Change:
    """Changes of jobs in one transaction."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.events: list[tuple[str, str]] = []

    def job(self, *conditions: ColumnElement[bool]) -> JobRow | None:
        """The job that meets the conditions."""
        found = self.connection.execute(SELECT_JOBS.where(*conditions)).first()
        return JobRow(*found) if found else None

    def finish(
        self, status: str, problem: str | None, condition: ColumnElement[bool]
    ) -> int:
        """Finish the job that meets the condition; the number of changed rows."""
        finish = update(jobs).where(condition).returning(jobs.c.id)
        finish = finish.values(status=status, problem=problem, finished_at=now())
        ids = self.connection.scalars(finish).all()
        for job_id in ids:
            self.add_event(job_id, "done", f'{{"status":"{status}"}}')
        return len(ids)

    def requeue(self, condition: ColumnElement[bool], **values: Any) -> None:
        """Queue the job that meets the condition again."""
        again = update(jobs).where(condition).returning(jobs.c.id)
        again = again.values(
            status="queued", attempt=None, started_at=None, progress=None, **values
        )
        for job_id in self.connection.scalars(again).all():
            self.add_event(job_id, "queued", "{}")

    def add_event(self, job_id: str, name: str, data: str) -> None:
        """Number an event; its job's row is locked, so that no other gets the number."""
        number = select(
            literal(job_id),
            1 + func.coalesce(func.max(events.c.number), 0),
            literal(name),
            literal(data),
        ).where(events.c.job_id == job_id)
        columns = ["job_id", "number", "name", "data"]
        insert = _insert(self.connection, events)
        self.connection.execute(insert.from_select(columns, number))
        self.events.append((job_id, name))

    def notify(self) -> None:
        """Let PostgreSQL notify all processes at the end of the transaction."""
        for job_id, name in self.events:
            self.connection.execute(select(func.pg_notify(CHANNEL, f"{job_id} {name}")))


def _newest(
    query: Select[*tuple[Any, ...]], table: Table, before: int | None, limit: int
) -> Select[*tuple[Any, ...]]:
    """The query for rows below a number, the newest first."""
    if before is not None:
        query = query.where(table.c.number < before)
    return query.order_by(table.c.number.desc()).limit(limit)


def now() -> str:
    """The current time, RFC 3339, UTC."""
    return days_ago(0)


def days_ago(days: float) -> str:
    """A time in the past in the format of `now`, which sorts by time."""
    moment = datetime.now(UTC) - timedelta(days=days)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _id(value: str) -> str:
    """An id from a client; PostgreSQL refuses the character that no id has."""
    return value.replace("\0", " ")


def _insert(connection: Connection, table: Table) -> Any:
    """An INSERT that may say ON CONFLICT, which is not part of standard SQL."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    return dialect.insert(table)


def _add(connection: Connection, table: Table, row: dict[str, Any]) -> bool:
    """Insert a row; False if it would break a unique index."""
    insert = _insert(connection, table).values(row).on_conflict_do_nothing()
    return connection.scalar(insert.returning(table.c.id)) is not None


def _changes(connection: Connection, statement: Executable) -> int:
    """Number of rows that a statement changes."""
    return connection.execute(statement).rowcount


def _this_attempt(job: JobRow) -> ColumnElement[bool]:
    """The job has the same status, and nobody has started it again."""
    return (
        (jobs.c.id == job.id)
        & (jobs.c.status == job.status)
        & (jobs.c.attempt.is_not_distinct_from(job.attempt))
    )


def _counts(connection: Connection, client: str) -> JobCounts:
    def number(condition: ColumnElement[bool]) -> Any:
        return func.count().filter(condition)

    query = select(
        number(jobs.c.status == "queued"),
        number(jobs.c.status == "running"),
        number(jobs.c.client == client),
    ).where(ACTIVE_JOB)
    return JobCounts(*connection.execute(query).one())


def _next_turn(connection: Connection, client: str) -> int:
    """The turn after the client's last one, but none that has passed.

    Clients take turns: with ten jobs of one client in the queue, the first job of
    another client is the second to start.
    """
    queued, running = jobs.c.status == "queued", jobs.c.status == "running"
    query = select(
        func.min(jobs.c.turn).filter(queued),
        func.max(jobs.c.turn).filter(running),
        func.max(jobs.c.turn).filter(jobs.c.client == client),
    ).where(ACTIVE_JOB)
    first_queued, last_running, last_own = connection.execute(query).one()
    present = last_running if first_queued is None else first_queued
    after_own = 0 if last_own is None else last_own + 1
    return max(present or 0, after_own)


def _delete_plans(connection: Connection, condition: ColumnElement[bool]) -> int:
    """Delete plans with their finished jobs; an active job stores its plan again."""
    of_plans = jobs.c.plan_id.in_(select(plans.c.id).where(condition))
    _delete_jobs(connection, of_plans & jobs.c.finished_at.is_not(None))
    return _changes(connection, delete(plans).where(condition))


def _delete_jobs(connection: Connection, condition: ColumnElement[bool]) -> int:
    """Delete jobs with their events."""
    ids = select(jobs.c.id).where(condition)
    connection.execute(delete(events).where(events.c.job_id.in_(ids)))
    return _changes(connection, delete(jobs).where(condition))
