"""What a check found: problems that name the field, the plan's value and the recomputed one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Verdict on a plan."""

    ok: bool
    problems: tuple[str, ...]
    """One line each: field, the plan's value, the recomputed value."""
    checked: tuple[str, ...]
    """What was recomputed, in words. A plan with broken structure is not priced, and then no price is named here."""


@dataclass
class Findings:
    """Collects what one check finds."""

    problems: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)

    def wrong(self, where: str, message: str) -> None:
        """Note a problem of a field."""
        self.problems.append(f"{where}: {message}")

    def equal(self, where: str, stated: Any, recomputed: Any) -> None:
        """Both must be the same."""
        if stated != recomputed:
            self.wrong(where, f"the plan says {stated}, recomputed {recomputed}.")

    def close(
        self,
        where: str,
        stated: float,
        recomputed: float,
        *,
        relative: float,
        absolute: float = 0.0,
    ) -> None:
        """Both must be the same up to rounding."""
        if not math.isclose(stated, recomputed, rel_tol=relative, abs_tol=absolute):
            self.wrong(where, f"the plan says {stated!r}, recomputed {recomputed!r}.")

    def report(self) -> CheckReport:
        """The verdict."""
        return CheckReport(not self.problems, tuple(self.problems), tuple(self.checked))
