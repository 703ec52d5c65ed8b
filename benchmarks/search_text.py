"""What `benchmarks.search` prints: its table, and one table each of what grows, of partitions and of winners."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.search_rows import NOT_SEARCHED, Planned, Row, exponent
from planner.cli.console import table
from planner.spec.units import gibibytes

HEADER = ("case", "target", "result", "met", "checked")
PLANNED = ("clock", "processor", "profile", "memory", "layouts", "solved")
GROWING = {"devices": "growth with devices", "layers": "growth with layers"}
BUSY_LOAD = 1.0


def growth(rows: Sequence[Row]) -> list[Row]:
    """What the rows of a growing case say together: the exponents of time over size, below 1 slower than linearly."""
    return [
        _grown(case, name, mine)
        for case, name in GROWING.items()
        if len(mine := _of(rows, case)) > 1
    ]


def _of(rows: Iterable[Row], case: str) -> list[Row]:
    return [row for row in rows if row.case == case and row.planned is not None]


def _grown(case: str, name: str, rows: Sequence[Row]) -> Row:
    made = {row.size: row.planned for row in rows if row.planned is not None}
    clock = exponent([(size, one.seconds) for size, one in made.items()])
    processor = exponent([(size, one.processor_seconds) for size, one in made.items()])
    is_proven = all(one.is_proven for one in made.values())
    return Row(
        case=f"growth, {case}",
        name=f"{name}, {min(made)} to {max(made)}",
        target="exponent of time < 1",
        result=f"clock {clock:.2f}, processor {processor:.2f}"
        + ("" if is_proven else "; not all proven"),
        met=is_proven and max(clock, processor) < 1,
        checked=next((row.checked for row in rows if row.is_wrong), rows[0].checked),
    )


def text(rows: Sequence[Row], before: dict[str, Any], after: dict[str, Any]) -> str:
    """All tables that have rows, and what they were measured on."""
    main = [row for row in rows if row.case not in GROWING]
    parts = [planned_text(main), *(planned_text(_of(rows, case)) for case in GROWING)]
    for row in rows:
        if row.details:
            parts.append(
                {"partitions": partitions_text, "winners": winners_text}[row.case](
                    row.details
                )
            )
    load = (
        f"{before['cores']} cores; load {before['load']} before, {after['load']} after"
    )
    busy = (
        "; the machine was not idle: seconds by the clock say little"
        if before["load"] > BUSY_LOAD
        else ""
    )
    return "\n\n".join([*filter(None, parts), load + busy])


def planned_text(rows: Sequence[Row]) -> str:
    """One line per row; without the columns of plans where none was made."""
    has_plans = any(row.planned is not None for row in rows)
    header = (*HEADER, *PLANNED) if has_plans else HEADER
    lines = [
        (*_judged(row), *(_took(row.planned) if has_plans else ())) for row in rows
    ]
    return table(header, lines, left=range(len(HEADER))) if rows else ""


def _judged(row: Row) -> tuple[str, ...]:
    met = {True: "yes", False: "no", None: NOT_SEARCHED}[row.met]
    return row.name, row.target, row.result, met, row.checked


def _took(one: Planned | None) -> tuple[str, ...]:
    if one is None:
        return (NOT_SEARCHED,) * len(PLANNED)
    times = (
        f"{each:.2f} s"
        for each in (one.seconds, one.processor_seconds, one.profile_seconds)
    )
    return (
        *times,
        gibibytes(one.peak_memory_bytes),
        str(one.layouts_considered),
        str(one.layouts_solved),
    )


def partitions_text(found: Sequence[dict[str, Any]]) -> str:
    """Largest stage over the optimum's: one line per profile, two columns per number of parts."""
    parts = sorted({each["parts"] for one in found for each in one["parts"]})
    header = (
        "profile",
        "layers",
        *(f"{kind}, {count}" for count in parts for kind in ("block", "histogram")),
    )
    rows = []
    for one in found:
        known = {each["parts"]: each for each in one["parts"]}
        ratios = (
            known.get(count, {}).get(kind, math.nan)
            for count in parts
            for kind in ("block", "histogram")
        )
        rows.append(
            (one["profile"], str(one["layers"]), *(_ratio(each) for each in ratios))
        )
    return table(header, rows)


def _ratio(value: float) -> str:
    return NOT_SEARCHED if math.isnan(value) else f"{value:.3f}"


def winners_text(found: Sequence[dict[str, Any]]) -> str:
    """One line per family."""
    header = ("family", "plans", "groups", "within 3 %", "worst")
    rows = [
        (
            one["family"],
            *(str(one[key]) for key in ("plans", "groups", "close")),
            _ratio(one["worst"]),
        )
        for one in found
    ]
    return table(header, rows)
