"""The journal: what was measured survives, and what is broken is told and measured again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from planner.errors import DocumentError
from planner.profiler.measure_journal import Case, Journal

CONDITION = {"digest": "abc", "sequence_length": 16}
BLOCK = Case("block", "layer", 2)
SECONDS = {"forward": 0.5, "backward": 1.0}


def test_cases_come_back(tmp_path: Path) -> None:
    """A second journal on the same file knows what the first one added, and nothing else."""
    path = tmp_path / "journal.jsonl"
    Journal(path, CONDITION).add(BLOCK, SECONDS)
    again = Journal(path, CONDITION)
    assert again[BLOCK] == SECONDS
    assert Case("block", "layer", 4) not in again


def test_other_conditions_are_not_mixed(tmp_path: Path) -> None:
    """Seconds of another model or sequence length are not taken, but stay in the file."""
    path = tmp_path / "journal.jsonl"
    Journal(path, CONDITION).add(BLOCK, SECONDS)
    other = Journal(path, {**CONDITION, "sequence_length": 32})
    assert BLOCK not in other
    other.add(BLOCK, {"forward": 9.0})
    assert Journal(path, CONDITION)[BLOCK] == SECONDS


def test_the_latest_line_wins(tmp_path: Path) -> None:
    """A case that was measured again has its newer seconds."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, CONDITION)
    journal.add(BLOCK, SECONDS)
    journal.add(BLOCK, {"forward": 2.0})
    assert Journal(path, CONDITION)[BLOCK] == {"forward": 2.0}


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        '{"case": {}}',
        '{"condition": {}, "case": {"kind": [], "work": "layer", "micro_batch_size": 1}, "figures": {"forward": 1}}',
        '{"condition": {}, "case": {"kind": "a", "work": "layer", "micro_batch_size": 1}, "figures": {"forward": -1}}',
        '{"condition": {}, "case": {"kind": "a", "work": "layer", "micro_batch_size": 1}, "figures": {"forward": NaN}}',
        '{"condition": {}, "case": {"kind": "a", "work": "layer", "micro_batch_size": 1}, "figures": {"forward": [1]}}',
    ],
)
def test_broken_lines_are_told_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    """A line that is no measured case costs a warning with its number, not the work of the others."""
    path = tmp_path / "journal.jsonl"
    path.write_text(line + "\n")
    Journal(path, CONDITION).add(BLOCK, SECONDS)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert Journal(path, CONDITION)[BLOCK] == SECONDS
    assert [
        record.args[1] for record in caplog.records if isinstance(record.args, tuple)
    ] == [1]


def test_a_line_cut_off_spoils_only_itself(tmp_path: Path) -> None:
    """After a crash in the middle of a line, the next case starts on a line of its own."""
    path = tmp_path / "journal.jsonl"
    path.write_text('{"condition": {"dig')
    Journal(path, CONDITION).add(BLOCK, SECONDS)
    assert Journal(path, CONDITION)[BLOCK] == SECONDS


def test_without_a_file_cases_stay_in_memory() -> None:
    """No path, no file: the journal still answers."""
    journal = Journal(None, CONDITION)
    journal.add(BLOCK, SECONDS)
    assert journal[BLOCK] == SECONDS


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A directory, or a file in no directory, is an error that names the path."""
    with pytest.raises(DocumentError) as caught:
        Journal(tmp_path, CONDITION)
    assert caught.value.problems[0].field == str(tmp_path)
    with pytest.raises(DocumentError, match="cannot be used"):
        Journal(tmp_path / "nowhere" / "journal.jsonl", CONDITION).add(BLOCK, SECONDS)
