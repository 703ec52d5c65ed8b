"""Text of numbers, bytes and values in messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 device``, ``2 micro-batches``."""
    return f"{count} {noun if count == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


def gibibytes(count: int, *, is_room: bool = False) -> str:
    """Return bytes as text: ``4 GiB``, ``1.25 GiB``; small amounts in MiB or KiB.

    Memory that is needed is rounded up; with `is_room`, free memory is rounded down.
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            hundredths = 100 * count // size if is_room else -(-100 * count // size)
            return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return counted(count, "byte")


def written(value: bool | int | str | None) -> str:
    """Return a value as in YAML: ``false``, ``null``, ``4``; strings without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def suggestion(name: str, known: Collection[str]) -> str:
    """Return ``did you mean 'plan'? `` for a misspelled name; empty if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""
