"""Alembic's entry: migrate over the connection of `planner.api.storage.database`."""

from __future__ import annotations

from alembic import context

# Both databases change their schema inside the caller's transaction.
context.configure(
    connection=context.config.attributes["connection"], transactional_ddl=True
)
context.run_migrations()
