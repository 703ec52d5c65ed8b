"""What this process, a rank, is doing: for its error, and for the launcher of one that dies without any. Torch-free."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


class _Rank:
    """A process is one rank."""

    doing = ""
    note: Path | None = None
    """File that tells the launcher; None: no launcher looks."""


def now(doing: str) -> None:
    """Say what this rank does from here on, in words that follow its name: ``while it joined the process group``."""
    _Rank.doing = doing
    if _Rank.note is not None:
        with suppress(OSError):  # a full disk must not end the training for it
            _Rank.note.write_text(doing, encoding="utf-8")


def current() -> str:
    """What was said last; empty in a process that is no rank."""
    return _Rank.doing


def note_in(path: Path | None) -> None:
    """From here on this process is a rank, and says it in this file too; None: in none."""
    _Rank.note = path
    now("while it started")


def forget() -> None:
    """This process is no rank any more: what its rank said last stays in the file."""
    _Rank.note, _Rank.doing = None, ""
