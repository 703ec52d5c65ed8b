"""Several workers: whose job it is, its turn, and the deaths of processes that ran it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = "1"


def upgrade() -> None:
    """Extend `jobs`; create procrastinate's queue in PostgreSQL."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    for column in (
        sa.Column("client", sa.Text, nullable=False, server_default=""),
        sa.Column("turn", number, nullable=False, server_default="0"),
        sa.Column("attempt", sa.Text),
        sa.Column("deaths", sa.Integer, nullable=False, server_default="0"),
        sa.Column("company", sa.Integer),
    ):
        op.add_column("jobs", column)
    op.execute("DROP TABLE IF EXISTS schema_version")
    if op.get_bind().dialect.name == "postgresql":
        from procrastinate.schema import SchemaManager

        # The schema of procrastinate 3.4 to 3.10; a release that changes it needs
        # another version here, which runs procrastinate's own migration.
        op.get_bind().exec_driver_sql(SchemaManager.get_schema().replace("%", "%%"))
