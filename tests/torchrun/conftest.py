"""Shared by the tests of several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.torchrun.ranks import Servers


@pytest.fixture(scope="package")
def servers() -> Iterator[Servers]:
    """Of ranks, for all runs."""
    found = Servers()
    yield found
    found.stop()
