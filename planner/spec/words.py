"""Numbers, bytes and values as people read them in messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """``1 device``, ``2 devices``, ``1 micro-batch``, ``2 micro-batches``."""
    return f"{count} {noun if count == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


def gibibytes(count: int, *, is_room: bool = False) -> str:
    """``4 GiB``, ``1.25 GiB``; small amounts in MiB or KiB. What is needed is rounded up, what there is down."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            hundredths = 100 * count // size if is_room else -(-100 * count // size)
            return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return counted(count, "byte")


def written(value: bool | int | str | None) -> str:
    """As YAML and JSON have it: ``false``, ``null``, ``4``; strings without quotes."""
    return (
        {True: "true", False: "false", None: "null"}[value]
        if isinstance(value, bool | None)
        else str(value)
    )
