"""What has been measured, on disk as JSON lines, so that interrupted work goes on where it stopped."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from planner.errors import DocumentError

logger = logging.getLogger(__name__)

Figures = Mapping[str, float]
"""What was measured of a case, by name: seconds, but ``spread`` is a fraction, and names that end in ``_bytes`` are
bytes."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure."""

    kind: str
    work: Literal["layer", "optimizer"]
    """Forward and backward of one micro-batch, or the optimizer's step, which has no micro-batch: its size is 0."""
    micro_batch_size: int
    tensor_parallel_degree: int = 1
    sequence_length: int = 0
    """Tokens per sample; 0 for models without a sequence, and for the optimizer."""


class Journal:
    """The measured cases of one condition (model, device, type, torch, concurrency).

    Args:
        path: of the file; None keeps the cases in memory only.
        condition: what all cases have in common; lines of other conditions are kept, and not looked at.

    Raises:
        DocumentError: the file cannot be read or written.
    """

    def __init__(self, path: Path | None, condition: Mapping[str, str | int]) -> None:
        self._path = path
        self._condition = dict(condition)
        self._cases = dict(self._read()) if path is not None and path.exists() else {}

    def __contains__(self, case: Case) -> bool:
        return case in self._cases

    def __getitem__(self, case: Case) -> Figures:
        return self._cases[case]

    def add(self, case: Case, figures: Figures) -> None:
        """Keep a measured case, on disk before this returns."""
        self._cases[case] = figures
        if self._path is None:
            return
        line = json.dumps(
            {
                "condition": self._condition,
                "case": asdict(case),
                "figures": dict(figures),
            }
        )
        try:
            with self._path.open("a", encoding="utf-8") as file:
                # A line cut off by a crash must not spoil this one.
                file.write(line + "\n" if self._ends_a_line() else "\n" + line + "\n")
        except OSError as error:
            raise self._unusable(error) from None

    def _read(self) -> Iterator[tuple[Case, Figures]]:
        assert self._path is not None
        try:
            lines = self._path.read_text(
                encoding="utf-8", errors="replace"
            ).splitlines()
        except OSError as error:
            raise self._unusable(error) from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield from self._read_line(number, line)

    def _read_line(self, number: int, line: str) -> Iterator[tuple[Case, Figures]]:
        try:
            data = json.loads(line)
            case, figures = (
                Case(**data["case"]),
                {name: float(value) for name, value in data["figures"].items()},
            )
            if not all(
                math.isfinite(value) and value >= 0 for value in figures.values()
            ):
                raise ValueError("not all figures are numbers from 0 on")
            hash(case)
            condition = data["condition"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning(
                "%s: line %d is not readable (%s), so its case is measured again.",
                self._path,
                number,
                error,
            )
            return
        if condition == self._condition:
            yield case, figures

    def _ends_a_line(self) -> bool:
        assert self._path is not None
        size = self._path.stat().st_size
        if size == 0:
            return True
        with self._path.open("rb") as file:
            file.seek(size - 1)
            return file.read(1) == b"\n"

    def _unusable(self, error: OSError) -> DocumentError:
        return DocumentError(
            f"the journal cannot be used: {error.strerror}.",
            field=str(self._path),
            hint="give the path of a file that can be written.",
        )
