"""What the cases of `benchmarks.search` hand to its table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NOT_SEARCHED = "-"
CHECKED = "yes"
PROVEN_GAP = 1e-6


@dataclass(frozen=True, slots=True)
class Task:
    """A function to be called in a process of its own."""

    case: str
    module: str
    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """What one plan took."""

    seconds: float
    """By the clock, of the whole search: bounds, solver, proof and alternatives; without the profile."""
    processor_seconds: float
    profile_seconds: float
    """To load or count the profile, and to hash the request."""
    peak_memory_bytes: int
    """Of the process, before the plan is checked."""
    layouts_considered: int
    layouts_solved: int
    gap: float | None = None
    """None: no plan was found."""
    step_seconds: float | None = None
    layout: dict[str, Any] | None = None

    def is_within(self, gap: float) -> bool:
        """A plan was found, and is proven to be so near to the optimum."""
        return self.gap is not None and self.gap <= gap

    @property
    def is_proven(self) -> bool:
        """The plan is the optimum."""
        return self.is_within(PROVEN_GAP)

    @property
    def result(self) -> str:
        """In words."""
        if self.gap is None:
            return "no plan"
        return "proven" if self.is_proven else f"gap {self.gap:.2%}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    case: str
    name: str
    target: str
    result: str
    met: bool | None
    """None: there is nothing to judge by."""
    checked: str = NOT_SEARCHED
    """``yes``: the independent validator accepts every plan of the row; else its first complaint."""
    planned: Planned | None = None
    size: int = 0
    """That grows, of the rows of a growth table."""
    details: tuple[dict[str, Any], ...] = ()
    """What `--json` tells beyond the table."""
    is_exact: bool = True
    """What must hold on every machine does: the optima are right."""

    @property
    def is_wrong(self) -> bool:
        """Not slow, but wrong."""
        return not self.is_exact or self.checked not in (NOT_SEARCHED, CHECKED)


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Least-squares slope of log time over log size; nan with fewer than two sizes."""
    if len({size for size, _ in points}) < 2:
        return math.nan
    x = [math.log(size) for size, _ in points]
    y = [math.log(max(time, 1e-9)) for _, time in points]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return across / sum((a - middle_x) ** 2 for a in x)
