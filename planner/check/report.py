"""The result of a check: what is wrong, by field, and what was recomputed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.errors import PlannerError


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Verdict on a plan."""

    ok: bool
    problems: tuple[str, ...]
    """One line each: field, the plan's value, the recomputed value."""
    checked: tuple[str, ...]
    """What was recomputed, as text. A plan with a wrong structure is not priced."""


@dataclass
class Findings:
    """Problems and checks of one plan, in the order in which they were found."""

    problems: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)

    def wrong(self, where: str, message: str) -> None:
        """Add a problem of a field."""
        self.problems.append(f"{where}: {message}")

    def rule(self, where: str, stated: object, holds: bool, rule: str) -> None:
        """Add a problem unless a rule holds for the plan's value."""
        if not holds:
            self.wrong(where, f"the plan says {stated}; {rule}.")

    def equal(self, where: str, stated: object, recomputed: object) -> None:
        """Add a problem unless both values are equal."""
        if stated != recomputed:
            self.wrong(where, f"the plan says {stated}, recomputed {recomputed}.")

    def same(
        self, where: str, stated: Mapping[str, object], recomputed: Mapping[str, object]
    ) -> None:
        """Add a problem for every recomputed field that is not as stated."""
        for name, value in recomputed.items():
            self.equal(f"{where}.{name}", stated[name], value)

    def close(
        self,
        where: str,
        stated: float | None,
        recomputed: float | None,
        relative: float = 1e-6,
        absolute: float = 1e-9,
    ) -> None:
        """Add a problem unless both numbers are equal up to rounding, or both None."""
        if stated is None or recomputed is None:
            self.equal(where, stated, recomputed)
        elif not math.isclose(stated, recomputed, rel_tol=relative, abs_tol=absolute):
            self.wrong(where, f"the plan says {stated!r}, recomputed {recomputed!r}.")

    def refused(self, where: str, error: PlannerError) -> None:
        """Add the problems of an error, below a field; "": the whole plan."""
        prefix = f"{where}." if where else ""
        self.problems += [f"{prefix}{problem}" for problem in error.problems]

    def report(self) -> CheckReport:
        """Return the verdict."""
        return CheckReport(not self.problems, tuple(self.problems), tuple(self.checked))
