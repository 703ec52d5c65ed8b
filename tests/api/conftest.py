"""Settings in the test's own directory, and both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.postgres import Cluster
from planner.api.settings import Settings
from planner.api.storage.store import Store
from tests.api.postgres import new_cluster


@pytest.fixture
def settings_of(tmp_path: Path) -> Callable[..., Settings]:
    """Makes settings: any free port, a database in the test's directory, and no process that the test does not need."""

    def make(**changes: Any) -> Settings:
        defaults = {
            "port": 0,
            "database": tmp_path / "planner.db",
            "concurrency": 1,
            "spare_solvers": 0,
        }
        return Settings.model_validate(defaults | changes)

    return make


@pytest.fixture
def settings(settings_of: Callable[..., Settings]) -> Settings:
    """Settings with one solver at a time."""
    return settings_of()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Where fake solvers note their process ids."""
    path = tmp_path / "journal"
    path.touch()
    return path


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL server."""
    cluster = new_cluster()
    yield cluster
    cluster.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """A new database of each kind."""
    if request.param == "sqlite":
        return tmp_path / "planner.db"
    cluster: Cluster = request.getfixturevalue("cluster")
    return cluster.new_database()


@pytest.fixture
def store(place: Path | str) -> Iterator[Store]:
    """An empty store, on each database."""
    store = Store(place)
    yield store
    store.close()
