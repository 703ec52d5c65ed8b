"""The documentation's table of schedules is what the benchmark prints."""

from pathlib import Path

from benchmarks.schedule import SHAPES, comparison, comparison_table
from planner.schedule import names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "schedules.md"


def test_the_table_in_the_docs_is_true() -> None:
    """Line by line."""
    assert "\n".join(comparison_table(comparison())) in PAGE.read_text(encoding="utf-8")


def test_the_table_has_every_schedule() -> None:
    """A new schedule has to stand in the comparison too."""
    assert [name for name, _, _ in SHAPES] == list(names(fixed_only=True))
