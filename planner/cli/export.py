"""`planner export`: writes a plan for another runtime or launcher, and tells what that one does otherwise."""

from __future__ import annotations

import argparse
from typing import Any

from planner.cli.arguments import add_json, add_output
from planner.cli.console import STDOUT, check_output, data, table, to_json, words, write
from planner.cli.failures import DONE
from planner.errors import DocumentError, PlannerError
from planner.export import TARGETS, Export, Target, find
from planner.spec import Plan, read

SEE_LIST = (
    "`planner export --list` shows all targets; with a plan, which of them can take it."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "plan", metavar="plan.json", nargs="?", help="plan to write ('-': stdin)"
    )
    parser.add_argument(
        "--to", metavar="TARGET", help="runtime or launcher to write it for"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the targets; with a plan, which of them can take it",
    )
    add_output(parser, "write the text to FILE instead of stdout")
    add_json(
        parser,
        "print one object with target, text, warnings and file_name (with --list: the list)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the plan for a target, or list the targets."""
    if arguments.list:
        return _list(arguments)
    if arguments.to is None:
        raise DocumentError(
            "was not given: for what shall the plan be written?",
            field="--to",
            hint=SEE_LIST,
        )
    target = find(arguments.to)
    if arguments.plan is None:
        raise DocumentError(
            "was not given.",
            field="plan.json",
            hint=f"planner export plan.json --to {target.name}, as `planner plan -o plan.json` writes it.",
        )
    check_output(arguments.output)
    plan = read(Plan, arguments.plan)
    _publish(plan, target, target.write(plan), arguments)
    return DONE


def _publish(
    plan: Plan, target: Target, export: Export, arguments: argparse.Namespace
) -> None:
    for warning in export.warnings:
        words(f"warning: {warning}")
    text = export.text.removesuffix(
        "\n"
    )  # `write` and `data` end the last line themselves
    if arguments.output is not None:
        write(arguments.output, text)
    if arguments.json and arguments.output != STDOUT:
        document = {"target": target.name, "file_name": target.file_name(plan)}
        data(
            to_json(
                {**document, "warnings": list(export.warnings), "text": export.text}
            )
        )
    elif arguments.output is None:
        data(text)


def _list(arguments: argparse.Namespace) -> int:
    for option in ("to", "output"):
        if getattr(arguments, option) is not None:
            raise DocumentError(
                "means nothing with --list.",
                field=f"--{option}",
                hint="leave one of the two out.",
            )
    plan = None if arguments.plan is None else read(Plan, arguments.plan)
    rows = [_row(target, plan) for target in TARGETS.values()]
    if arguments.json:
        data(to_json({"exports": rows}))
        return DONE
    header = ("target", "what is written", "checked against")
    cells = [(row["name"], row["title"], row["version"]) for row in rows]
    if plan is not None:
        header = ("target", "this plan", "checked against")
        cells = [(row["name"], _verdict(row), row["version"]) for row in rows]
    data(table(header, cells, left=(0, 1, 2)))
    return DONE


def _row(target: Target, plan: Plan | None) -> dict[str, Any]:
    """A target as JSON, and whether it can take a plan."""
    row: dict[str, Any] = {
        "name": target.name,
        "title": target.title,
        "version": target.version,
        "media_type": target.media_type,
    }
    if plan is None:
        return row
    try:
        return {**row, "can": True, "warnings": list(target.write(plan).warnings)}
    except PlannerError as error:
        problems = [
            {"field": each.field, "message": each.message, "hint": each.hint}
            for each in error.problems
        ]
        return {**row, "can": False, "errors": problems}


def _verdict(row: dict[str, Any]) -> str:
    if not row["can"]:
        return f"no: {row['errors'][0]['field']}"
    warnings = len(row["warnings"])
    return (
        "yes"
        if not warnings
        else f"yes, with {warnings} warning{'s' if warnings > 1 else ''}"
    )
