"""The guide says of every target what it is and what it can carry, as the targets themselves answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.export.table import GUIDE, abilities, shown, targets


@pytest.mark.parametrize("make", [targets, abilities])
def test_the_tables_are_what_the_targets_answer(make: Callable[[], str]) -> None:
    """Run `python -m tests.export.table` when a target has learned something."""
    assert shown(GUIDE.read_text(encoding="utf-8"), make()) == make()
