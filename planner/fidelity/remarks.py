"""What the words of a row say about its figures: which of them tell nothing about time or about fitting.

time is overhead      the notes say that the model is too small for its step time to mean anything ("TINY MODEL")
memory is stated      the hardware names its type and memory; else, where a product is sold with several sizes, whether
                      a run fits cannot be judged
modelled              the memory was computed by the source, so nothing ran that could have run out
simulated             the step time was (`planner.fidelity.names`): it is compared, and told apart
activations           the part of the memory that activations take, where the source tells it apart
words                 what is said besides figures and dates: it tells which runs of the same sizes and layout are
                      runs of one plan
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from planner.errors import DocumentError
from planner.fidelity.names import is_simulated
from planner.spec.devices import catalogue

RowKey = tuple[str, str]
"""Family (the file's name) and source_id."""


@dataclass(frozen=True, slots=True)
class Remarks:
    """What is said about the figures of one row."""

    time_is_overhead: bool = False
    memory_is_stated: bool = False
    is_modelled: bool = False
    is_simulated: bool = False
    activation_bytes: float | None = None
    words: str = ""


PLAIN = Remarks()
_NAMES = (
    "source_id system hardware interconnect model layers precision attention schedule vp zero_fsdp recompute status "
    "mem_kind rank_group notes"
)
_SAID = (
    "system",
    "model",
    "interconnect",
    "zero_fsdp",
    "recompute",
    "attention",
    "schedule",
    "notes",
)
COLUMNS = tuple(_NAMES.split())
"""What a file of runs must have; a column of numbers that lacks is unstated in every row."""


def read_remarks(path: Path) -> dict[RowKey, Remarks]:
    """Remarks of every row of a CSV file, or of every CSV file of a folder.

    Raises:
        DocumentError: no such file, or a file of runs that lacks columns.
    """
    found = {}
    for file in sorted(path.glob("*.csv")) if path.is_dir() else [path]:
        for row in _rows(file):
            found[file.stem, row.get("source_id") or ""] = remarks_of(row)
    return found


def _rows(file: Path) -> Iterator[dict[str, str]]:
    """Rows of a file of runs; none of other files."""
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            if {"hardware", "layers", "status"} <= set(reader.fieldnames or ()):
                _check_columns(file, reader.fieldnames or ())
                yield from reader
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(
            f"cannot be read: {error}", field=str(file), hint="give a CSV file."
        ) from error


def _check_columns(file: Path, columns: Sequence[str]) -> None:
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise DocumentError(
            f"lacks the columns {', '.join(missing)}.",
            field=str(file),
            hint="add them; blank means unstated.",
        )


def remarks_of(row: dict[str, str]) -> Remarks:
    """Remarks of one row."""
    kind, hardware = row.get("mem_kind") or "", row.get("hardware") or ""
    told = re.search(r"activations (\d+(?:\.\d+)?) GiB", kind)
    return Remarks(
        time_is_overhead="tiny model" in (row.get("notes") or "").lower(),
        memory_is_stated=re.search(
            r"\d\s*g(?:i?b)?\b", _product(hardware), re.IGNORECASE
        )
        is not None,
        is_modelled="modelled" in kind.lower(),
        is_simulated=is_simulated(row.get("source") or ""),
        activation_bytes=float(told.group(1)) * 2**30 if told else None,
        words=" ".join(
            re.findall(
                r"[a-z]+", " ".join(row.get(name) or "" for name in _SAID).lower()
            )
        ),
    )


def _product(hardware: str) -> str:
    """What is said of a device whose type is told."""
    return "" if "type not stated" in hardware else hardware


@cache
def has_one_memory_size(device: str) -> bool:
    """Is this product sold with one memory size only, as far as the catalogue knows?"""
    product = device.partition("-")[0]
    return (
        len(
            {
                one.spec.memory_bytes
                for name, one in catalogue().items()
                if name.partition("-")[0] == product
            }
        )
        == 1
    )
