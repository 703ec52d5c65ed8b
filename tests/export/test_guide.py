"""The guide says of every target what it can carry, as the targets themselves answer."""

from __future__ import annotations

from tests.export.table import GUIDE, shown, table


def test_the_table_is_what_the_targets_answer() -> None:
    """Run `python -m tests.export.table` when a target has learned something."""
    assert shown(GUIDE.read_text(encoding="utf-8")) == table()
