"""`planner export`: write a plan for another framework or launcher."""

from __future__ import annotations

from typing import Any

import click

from planner.cli.console import STDOUT, check_output, data, note, table, to_json, write
from planner.cli.failures import DONE
from planner.cli.options import option, output_option, refuse, verb
from planner.errors import DocumentError, PlannerError
from planner.export import TARGETS, Target, find
from planner.spec import Plan, read
from planner.spec.words import counted

SEE_LIST = "see `planner export --list`; with a plan it shows which targets accept it."


def _complete_targets(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[str]:
    return [name for name in TARGETS if name.startswith(incomplete)]


@verb("export", json_help="Print target, text, warnings and file name as JSON")
@click.argument("plan_path", metavar="plan.json", required=False)
@option(
    "--to",
    "target_name",
    metavar="TARGET",
    shell_complete=_complete_targets,
    help="Framework or launcher to write the plan for",
)
@option("--list", "list_targets", is_flag=True, help="List the targets")
@output_option("Write the text to FILE instead of stdout")
def command(
    plan_path: str | None,
    target_name: str | None,
    list_targets: bool,
    output: str | None,
    as_json: bool,
) -> int:
    """Write a plan for another framework or launcher.

    --list with a plan shows which targets accept it.
    """
    if list_targets:
        refuse(
            {"--to": target_name, "--output": output},
            "cannot be combined with --list.",
            "leave out OPTION or --list.",
        )
        return _list(plan_path, as_json)
    if target_name is None:
        raise DocumentError("is missing.", field="--to", hint=SEE_LIST)
    target = find(target_name)
    if plan_path is None:
        raise DocumentError(
            "is missing.",
            field="plan.json",
            hint=f"planner export plan.json --to {target.name}.",
        )
    check_output(output)
    _write(read(Plan, plan_path), target, output, as_json)
    return DONE


def _write(plan: Plan, target: Target, output: str | None, as_json: bool) -> None:
    export = target.write(plan)
    for warning in export.warnings:
        note(f"warning: {warning}")
    text = export.text.removesuffix("\n")  # both writers end the last line
    if output is not None:
        write(output, text)
    if as_json and output != STDOUT:
        document = {
            "target": target.name,
            "file_name": target.file_name(plan),
            "warnings": list(export.warnings),
            "text": export.text,
        }
        data(to_json(document))
    elif output is None:
        data(text)


def _list(plan_path: str | None, as_json: bool) -> int:
    plan = None if plan_path is None else read(Plan, plan_path)
    rows = [_row(target, plan) for target in TARGETS.values()]
    if as_json:
        data(to_json({"exports": rows}))
        return DONE
    if plan is None:
        header = ("target", "file", "checked against")
        cells = [(row["name"], row["title"], row["version"]) for row in rows]
    else:
        header = ("target", "accepts the plan", "checked against")
        cells = [(row["name"], _verdict(row), row["version"]) for row in rows]
    data(table(header, cells, left=(0, 1, 2)))
    return DONE


def _row(target: Target, plan: Plan | None) -> dict[str, Any]:
    """A target as JSON, and whether it accepts a plan."""
    row: dict[str, Any] = {
        "name": target.name,
        "title": target.title,
        "version": target.version,
        "media_type": target.media_type,
    }
    if plan is None:
        return row
    try:
        warnings = list(target.write(plan).warnings)
    except PlannerError as error:
        problems = [
            {"field": each.field, "message": each.message, "hint": each.hint}
            for each in error.problems
        ]
        return {**row, "can": False, "errors": problems}
    return {**row, "can": True, "warnings": warnings}


def _verdict(row: dict[str, Any]) -> str:
    if not row["can"]:
        return f"no: {row['errors'][0]['field']}"
    warnings = len(row["warnings"])
    return f"yes, with {counted(warnings, 'warning')}" if warnings else "yes"
