"""The first schema: also that of files from before Alembic, which are stamped with it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None

IS_ACTIVE = sa.text("status IN ('queued', 'running')")


def upgrade() -> None:
    """Create the tables."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "profiles",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
    )
    op.create_table(
        "plans",
        sa.Column("number", number, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("profile_id", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("devices", sa.Integer, nullable=False),
        sa.Column("step_seconds", sa.Float),
        sa.Column("final", sa.Boolean, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("plan_id", sa.Text, nullable=False),
        sa.Column("profile_id", sa.Text, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("progress", sa.Text),
        sa.Column("problem", sa.Text),
        sa.Column("created_at", sa.Text, nullable=False),
        sa.Column("started_at", sa.Text),
        sa.Column("finished_at", sa.Text),
    )
    op.create_index(
        "one_active_job_per_plan",
        "jobs",
        ["plan_id"],
        unique=True,
        sqlite_where=IS_ACTIVE,
        postgresql_where=IS_ACTIVE,
    )
    op.create_table(
        "events",
        sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "measurements",
        sa.Column("id", number, primary_key=True),
        sa.Column("plan_id", sa.Text, sa.ForeignKey("plans.id"), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("measurements_of_plan", "measurements", ["plan_id"])
