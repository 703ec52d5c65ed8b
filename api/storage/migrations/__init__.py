"""Alembic's migrations of the database, for SQLite and PostgreSQL."""
