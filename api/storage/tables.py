"""Tables of profiles, calibrations, plans, jobs, events and measured runs, for SQLite and PostgreSQL.

`planner.api.storage.migrations` creates them; a test compares the two.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

ACTIVE = ("queued", "running")
"""Statuses of jobs that have not finished."""
IS_ACTIVE = text("status IN ('queued', 'running')")
# SQLite numbers rows only in columns of this very type.
NUMBER = BigInteger().with_variant(Integer(), "sqlite")

metadata = MetaData()

profiles = Table(
    "profiles",
    metadata,
    Column("id", Text, primary_key=True),
    Column("document", Text, nullable=False),
    Column("created_at", Text, nullable=False),
)

calibrations = Table(
    "calibrations",
    metadata,
    Column("number", NUMBER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("measured_runs", Integer, nullable=False),
    Column("document", Text),  # null: deleted, but its version is not used again
    Column("created_at", Text, nullable=False),
    UniqueConstraint("name", "version", name="one_calibration_per_version"),
    sqlite_autoincrement=True,
)

plans = Table(
    "plans",
    metadata,
    Column("number", NUMBER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("profile_id", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("devices", Integer, nullable=False),
    Column("step_seconds", Float),
    Column("final", Boolean, nullable=False),
    Column("document", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    sqlite_autoincrement=True,
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("plan_id", Text, nullable=False),
    Column("profile_id", Text, nullable=False),
    Column("request", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("progress", Text),
    Column("problem", Text),
    Column("created_at", Text, nullable=False),
    Column("started_at", Text),
    Column("finished_at", Text),
    Column("client", Text, nullable=False, server_default=""),
    Column("turn", NUMBER, nullable=False, server_default="0"),
    Column("attempt", Text),
    Column("deaths", Integer, nullable=False, server_default="0"),
    Column("company", Integer),
    Index(
        "one_active_job_per_plan",
        "plan_id",
        unique=True,
        sqlite_where=IS_ACTIVE,
        postgresql_where=IS_ACTIVE,
    ),
)

events = Table(
    "events",
    metadata,
    Column("job_id", Text, ForeignKey("jobs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("data", Text, nullable=False),
    sqlite_with_rowid=False,
)

measurements = Table(
    "measurements",
    metadata,
    Column("id", NUMBER, primary_key=True),
    Column("plan_id", Text, ForeignKey("plans.id"), nullable=False),
    Column("document", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    Index("measurements_of_plan", "plan_id"),
    sqlite_autoincrement=True,
)
