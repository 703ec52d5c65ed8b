"""What ``python -m benchmarks.fidelity --winners`` prints: in how many rank groups the fastest plan was named.

And in how many it could be, given how far runs of one plan lie apart (`planner.fidelity.noise`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.cli.console import table
from planner.fidelity.metrics import Outcome
from planner.fidelity.noise import (
    CLOSE,
    Line,
    Spread,
    Winnable,
    host_share,
    lines,
    spread_of_runs,
    spread_of_traces,
    timed,
    trace_of,
    winnable,
)

UNKNOWN = "-"
EXACT = 1e-9
"""Relative distance from a straight line that no clock keeps to."""


@dataclass(frozen=True, slots=True)
class Winners:
    """Rank groups of one family, and what its runs' own spread lets a model win."""

    family: str
    is_simulated: bool
    spread: Spread | None
    """None: no plan ran twice."""
    groups: Winnable

    @property
    def cells(self) -> tuple[str, ...]:
        """Of the table's row."""
        name = f"{self.family}, simulated" if self.is_simulated else self.family
        return (
            name,
            str(self.groups.groups),
            str(self.groups.won),
            _expected(self.groups),
            self._spread(),
        )

    def _spread(self) -> str:
        if self.spread is None:
            return UNKNOWN
        of = (
            f"of host time ({self.spread.plans} traces)"
            if self.is_simulated
            else f"({self.spread.plans} plans)"
        )
        return f"{100 * self.spread.sigma:.1f} % {of}"


def _expected(found: Winnable) -> str:
    return (
        UNKNOWN
        if found.expected is None
        else f"{found.expected:.1f} ({found.least} to {found.most})"
    )


def winners_of(outcomes: Sequence[Outcome]) -> list[Winners]:
    """Every family that has rank groups; steps that its source simulated stand apart."""
    families: dict[tuple[str, bool], list[Outcome]] = defaultdict(list)
    for one in outcomes:
        families[one.run.family, one.remarks.is_simulated].append(one)
    found = [_family(*key, each) for key, each in sorted(families.items())]
    return [one for one in found if one.groups.groups]


def _family(name: str, is_simulated: bool, outcomes: Sequence[Outcome]) -> Winners:
    if not is_simulated:
        spread = spread_of_runs(outcomes)
        return Winners(name, is_simulated, spread, winnable(outcomes, spread))
    shares = {one.run: host_share(one.run) for one in timed(outcomes)}
    spread = spread_of_traces(outcomes, shares)
    groups = winnable(outcomes, spread, source=trace_of, weight=shares.__getitem__)
    return Winners(name, is_simulated, spread, groups)


def exact_lines(outcomes: Sequence[Outcome]) -> dict[str, list[Line]]:
    """By family, steps that lie on straight lines to the last digit."""
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines(outcomes):
        if line.distance < EXACT:
            found[line.family].append(line)
    return found


def winners_text(outcomes: Sequence[Outcome]) -> str:
    """Tables for people."""
    close = f"within {CLOSE - 1:.0%}".replace("%", " %")
    header = ("family", "groups", close, "a right model", "runs of one plan lie apart")
    parts = [table(header, [one.cells for one in winners_of(outcomes)])]
    exact = [
        (
            family,
            str(sum(line.runs for line in each)),
            str(len(each)),
            f"{max(line.distance for line in each):.0e}",
        )
        for family, each in sorted(exact_lines(outcomes).items())
    ]
    if exact:
        parts.append(
            table(
                (
                    "computed, not measured",
                    "steps",
                    "on straight lines",
                    "farthest off",
                ),
                exact,
            )
        )
    return "\n\n".join(parts)


def winners_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "winners": [asdict(one) for one in winners_of(outcomes)],
        "exact_lines": {
            family: [asdict(line) for line in each]
            for family, each in exact_lines(outcomes).items()
        },
    }
