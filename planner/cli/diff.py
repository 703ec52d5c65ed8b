"""`planner diff`: what differs between two plans."""

from __future__ import annotations

import json

import click

from planner.cli.console import data, table, to_json
from planner.cli.failures import DONE
from planner.cli.options import verb
from planner.spec import Plan, read
from planner.spec.plan_diff import FigureDiff, PlanDiff, plan_diff
from planner.spec.units import gibibytes, percent, scaled, seconds

FIGURES = {
    "step_seconds": ("step time", seconds),
    "tokens_per_second": ("throughput", lambda value: scaled(value, "tokens/s")),
    "mfu": ("MFU", percent),
    "peak_bytes": ("memory", gibibytes),
}
LONGEST_VALUE = 40
"""Characters of a value in the table; --json prints all of them."""


@verb("diff", json_help="Print the difference as JSON")
@click.argument("plan_path", metavar="plan.json")
@click.argument("other_path", metavar="other.json")
def command(plan_path: str, other_path: str, as_json: bool) -> int:
    """Compare two plans: step time, throughput, MFU and memory, and the changed fields."""
    found = plan_diff(read(Plan, plan_path), read(Plan, other_path))
    data(to_json(found) if as_json else _text(found))
    return DONE


def _text(found: PlanDiff) -> str:
    header = ("", found.plan_id[:12], found.other_id[:12], "change")
    parts = [table(header, [_figure(each) for each in found.figures])]
    if found.changes:
        rows = [
            (each.field, _value(each.value), _value(each.other))
            for each in found.changes
        ]
        parts.append(table(("field", *header[1:3]), rows, left=(0, 1, 2)))
    else:
        parts.append("Request and layout are equal.")
    if found.left_out:
        parts.append(f"{found.left_out} more changes")
    return "\n\n".join(parts)


def _figure(figure: FigureDiff) -> tuple[str, str, str, str]:
    name, write = FIGURES[figure.name]
    values = [
        "-" if value is None else write(value) for value in (figure.value, figure.other)
    ]
    change = "-" if figure.change is None else f"{100 * figure.change:+.1f} %"
    return name, values[0], values[1], change


def _value(value: object) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
