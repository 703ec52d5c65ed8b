"""Printing: files whole or not at all, colour and progress only where people see them."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import pytest

from planner.cli import console
from planner.errors import DocumentError


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def test_write_replaces_a_file_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The document ends with a new line, no draft stays behind, and the word about it goes to stderr."""
    path = tmp_path / "plan.json"
    path.write_text("old")
    console.write(str(path), "{}")
    assert path.read_text() == "{}\n"
    assert os.listdir(tmp_path) == ["plan.json"]
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"wrote {path}\n")


def test_write_keeps_the_mode_and_follows_links(tmp_path: Path) -> None:
    """Writing through a link changes the file behind it and keeps its permissions."""
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    console.write(str(link), "{}")
    assert link.is_symlink()
    assert target.read_text() == "{}\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_write_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """``-`` is stdout, and says nothing on stderr."""
    console.write("-", "{}")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("{}\n", "")


def test_write_to_a_device() -> None:
    """A device is written to, never replaced."""
    console.write(os.devnull, "{}")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("path", ["absent/plan.json", "."])
def test_outputs_are_refused_before_the_work(tmp_path: Path, path: str) -> None:
    """A missing folder and a folder in place of a file are named before any long work starts."""
    with pytest.raises(DocumentError) as caught:
        console.check_output(str(tmp_path / path))
    assert caught.value.problems[0].field == str(tmp_path / path)
    assert caught.value.problems[0].hint


@pytest.mark.parametrize(
    ("stream", "environment", "coloured"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
    ],
)
def test_colour(
    monkeypatch: pytest.MonkeyPatch,
    stream: io.StringIO,
    environment: dict[str, str],
    coloured: bool,
) -> None:
    """Only a terminal is coloured, and never when NO_COLOR is set."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert console.has_colour(stream) is coloured


def test_progress_draws_on_a_terminal_and_cleans_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line has its share, counts and state, and is empty again at the end."""
    monkeypatch.setattr(console, "REDRAW_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with console.Progress("searching", stream) as progress:
        progress.update(3_000, 4_000, "layouts  best 2 s")
    assert "75 %" in stream.getvalue()
    assert "3,000 of 4,000" in stream.getvalue()
    assert "best 2 s" in stream.getvalue()
    assert stream.getvalue().rstrip("\r").endswith("\033[2K")


def test_progress_is_silent_elsewhere() -> None:
    """A log file sees no progress bar."""
    stream = io.StringIO()
    with console.Progress("searching", stream) as progress:
        progress.update(3, 4)
    assert stream.getvalue() == ""


def test_table_aligns_numbers_right() -> None:
    """Text columns stand left, numbers right, without spaces at the ends of lines."""
    text = console.table(("name", "n"), [("a", "1"), ("bcdefg", "100")])
    assert text.splitlines() == ["name      n", "a         1", "bcdefg  100"]


@pytest.mark.parametrize(
    ("fraction", "filled"), [(0.0, 0), (0.5, 5), (1.0, 10), (1.7, 10), (-1.0, 0)]
)
def test_bar_stays_in_its_width(fraction: float, filled: int) -> None:
    """A bar has always its width; more than full is drawn as full."""
    drawn = console.bar(fraction, 10)
    assert (len(drawn), drawn.count("█")) == (10, filled)


def test_json_refuses_what_json_has_not() -> None:
    """NaN never reaches a document."""
    with pytest.raises(ValueError, match="JSON"):
        console.to_json({"value": float("nan")})
