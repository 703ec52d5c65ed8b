"""`planner timeline`: draw predicted and measured steps on one time axis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner.cli.console import STDOUT, check_output, data, write
from planner.cli.failures import DONE
from planner.cli.options import option, verb
from planner.errors import DocumentError
from planner.profiler.resolve import profile_behind
from planner.spec import MeasuredRun, Plan, parse, read_data

if TYPE_CHECKING:
    from planner.schedule.timeline import Timeline

FORMATS = (".json", ".svg", ".html")
MOST_LINES = 40
"""Lines of a picture in the terminal without --full; the middle ranks are left out."""


@verb("timeline", json_help="Print the Chrome trace on stdout")
@click.argument(
    "inputs", nargs=-1, required=True, metavar="plan.json|measured.json ..."
)
@option(
    "-o",
    "--output",
    metavar="FILE",
    help="out.json (Chrome trace for ui.perfetto.dev), out.svg or out.html",
)
@option("--profile", metavar="FILE", help="Profile of a plan that does not carry it")
@option("--ascii", "draw_ascii", is_flag=True, help="Draw in the terminal too")
@option("--full", is_flag=True, help="Draw every rank in the terminal")
def command(
    inputs: tuple[str, ...],
    output: str | None,
    profile: str | None,
    draw_ascii: bool,
    full: bool,
    as_json: bool,
) -> int:
    """Draw the predicted step of a plan, the measured step of a run, or several of them.

    Without -o the step is drawn in the terminal.
    """
    check_format(output)
    check_output(output)
    timelines = [_read(path, profile) for path in inputs]
    if output is not None:
        write(output, drawing(timelines, Path(output).suffix))
    if as_json and output != STDOUT:
        data(drawing(timelines, ".json"))
    elif draw_ascii or output is None:
        data(_in_terminal(timelines, full))
    return DONE


def check_format(output: str | None) -> None:
    """Refuse a file name without a known format.

    Raises:
        DocumentError: the suffix is none of a picture or trace.
    """
    if output in (None, STDOUT) or Path(str(output)).suffix in FORMATS:
        return
    suffix = Path(str(output)).suffix or "no suffix"
    raise DocumentError(
        f"{suffix!r} is not a picture format.",
        field=str(output),
        hint=f"end the name with one of {', '.join(FORMATS)}.",
    )


def drawing(timelines: Sequence[Timeline], suffix: str) -> str:
    """The picture or Chrome trace of timelines, side by side."""
    from planner.schedule.timeline import chrome_trace, html, svg

    if suffix == ".svg":
        return svg(timelines)
    if suffix == ".html":
        return html(timelines)
    return json.dumps(chrome_trace(timelines), allow_nan=False)


def _in_terminal(timelines: Sequence[Timeline], full: bool) -> str:
    from planner.schedule.timeline import ascii

    lines = ascii(timelines).splitlines()
    hidden = len(lines) - MOST_LINES
    if full or hidden <= 0:
        return "\n".join(lines)
    half = MOST_LINES // 2
    lines[half:-half] = [f"... {hidden} more ranks: --full, or -o step.html"]
    return "\n".join(lines)


def _read(path: str, profile: str | None) -> Timeline:
    from planner.api.timeline import predicted_timeline
    from planner.schedule.timeline import from_measured

    found = read_data(path)
    if isinstance(found, dict) and "plan_id" in found:
        return from_measured(parse(MeasuredRun, found, where=path))
    if isinstance(found, dict) and "layout" in found:
        plan = parse(Plan, found, where=path)
        return predicted_timeline(plan, profile_behind(plan, profile))
    raise DocumentError(
        "is neither a plan nor a measured run.",
        field=path,
        hint="give plan.json of `planner plan`, or measured.json of `planner run`.",
    )
