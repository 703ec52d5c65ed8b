"""The database: one SQLite file of this process, or PostgreSQL shared by many.

A SQLite file is in WAL mode, so that readers do not wait for a writer, and is locked by
the process that uses it. Opening a database migrates it to the newest schema.
"""

from __future__ import annotations

import fcntl
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    create_engine,
    event,
    inspect,
    make_url,
    text,
)
from sqlalchemy.exc import DBAPIError, OperationalError

from planner.errors import DocumentError, RunError

NEWEST_VERSION = "3"
"""Revision of the newest file in `planner.api.storage.migrations.versions`."""
BUSY_SECONDS = 10.0
"""A writer of the SQLite file waits this long for another process."""
PRAGMAS = ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON")
MIGRATION_LOCK = 0x706C616E
"""Key of the advisory lock of PostgreSQL under which one process migrates."""

StoreError = OperationalError
"""The database cannot be read or written now: a full disk, or a lost connection."""


class Database:
    """Connections to the database. Thread-safe.

    Args:
        place: path of a SQLite file, or ``postgresql://`` URL.

    Raises:
        DocumentError: it is not a usable database, or a newer planner wrote it.
        RunError: another process uses the SQLite file.
    """

    def __init__(self, place: Path | str) -> None:
        self.shared = isinstance(place, str)
        """Whether other processes may use the database at the same time."""
        self._owner: IO[str] | None = None
        self._writing: AbstractContextManager[Any] = nullcontext()
        if isinstance(place, Path):
            # The file itself, because a symbolic link would be locked by another name.
            place = place.resolve()
            self._owner = _own(place)
            self._writing = threading.Lock()
            self._engine = _sqlite(place)
        else:
            self._engine = _postgresql(place)
        try:
            self._migrate()
        except DBAPIError as error:
            self.close()
            raise _unusable(str(self._engine.url), error) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections and unlock the file."""
        self._engine.dispose()
        if self._owner is not None:
            self._owner.close()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with self._engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes; SQLite has one writer at a time."""
        with self._writing, self._engine.connect() as connection:
            connection = connection.execution_options(writes=True)
            with connection.begin():
                yield connection

    def _migrate(self) -> None:
        with self.write() as connection:
            if self.shared:
                connection.execute(
                    text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK}
                )
            found = _version(connection)
            if found != NEWEST_VERSION:
                _upgrade(connection, found)


def _upgrade(connection: Connection, found: str | None) -> None:
    # Imported here, because an up-to-date database does not need it.
    from alembic import command
    from alembic.config import Config

    if found is not None and int(found) > int(NEWEST_VERSION):
        raise DocumentError(
            f"has schema version {found}, but this planner needs {NEWEST_VERSION}.",
            field=str(connection.engine.url.database),
            hint="use the planner that wrote the database, or give another one.",
        )
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    if found is not None:
        command.stamp(config, found)  # files from before Alembic
    command.upgrade(config, "head")


def _version(connection: Connection) -> str | None:
    """Version of the schema; None for an empty database."""
    names = inspect(connection).get_table_names()
    if "alembic_version" in names:
        column = "version_num FROM alembic_version"
    elif "schema_version" in names:  # a file from before Alembic
        column = "version FROM schema_version"
    else:
        return None
    return str(connection.scalar(text(f"SELECT {column}")))


def _sqlite(path: Path) -> Engine:
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        connect_args={"timeout": BUSY_SECONDS, "isolation_level": None},
        pool_size=8,
        max_overflow=56,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _: object) -> None:
        for pragma in PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")

    # The driver begins no transactions (isolation_level None): a write must lock the
    # file at its beginning, or two of them could block each other.
    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql(f"BEGIN {'IMMEDIATE' if writes else 'DEFERRED'}")

    return engine


def _postgresql(url: str) -> Engine:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise DocumentError(
            "PostgreSQL needs the packages psycopg and procrastinate.",
            field="database_url",
            hint="pip install 'planner[postgresql]'.",
        ) from None
    parsed = make_url(url).set(drivername="postgresql+psycopg")
    return create_engine(parsed, pool_size=8, max_overflow=56, pool_pre_ping=True)


def _unusable(place: str, error: DBAPIError) -> DocumentError:
    return DocumentError(
        f"is not a usable database: {error.orig}.",
        field=place.removeprefix("sqlite:///"),
        hint="give another database, or restore this one.",
    )


def _own(path: Path) -> IO[str]:
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
