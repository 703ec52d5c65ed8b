"""`planner timeline`: draws the predicted step of a plan, the measured step of a run, or both on one time axis."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.arguments import add_json
from planner.cli.console import STDOUT, check_output, data, write
from planner.cli.failures import DONE
from planner.cli.inputs import profile_behind
from planner.errors import DocumentError
from planner.spec import MeasuredRun, Plan, parse, read_data

if TYPE_CHECKING:
    from planner.schedule.timeline import Timeline

FORMATS = (".json", ".svg", ".html")


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="plan.json|measured.json",
        help="one plan or measured run; several are drawn above each other on one time axis",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="out.json (Chrome trace, for ui.perfetto.dev), out.svg or out.html ('-': Chrome trace on stdout)",
    )
    parser.add_argument(
        "--profile", metavar="FILE", help="profile of a plan that does not carry it"
    )
    parser.add_argument(
        "--ascii",
        action="store_true",
        help="draw in the terminal (also done when no -o is given)",
    )
    add_json(parser, "print the Chrome trace on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Draw, and write the picture."""
    check_format(arguments.output)
    check_output(arguments.output)
    timelines = [_read(path, arguments.profile) for path in arguments.inputs]
    if arguments.output is not None:
        write(arguments.output, drawing(timelines, Path(arguments.output).suffix))
    if arguments.json and arguments.output != STDOUT:
        data(drawing(timelines, ".json"))
    elif arguments.ascii or arguments.output is None:
        from planner.schedule.timeline import ascii as draw_ascii

        data(draw_ascii(timelines))
    return DONE


def check_format(output: str | None) -> None:
    """Refuse a name that tells no format; none, and ``-`` for a Chrome trace on stdout, need not.

    Raises:
        DocumentError: the suffix is no picture's.
    """
    if output in (None, STDOUT) or Path(str(output)).suffix in FORMATS:
        return
    raise DocumentError(
        f"{Path(str(output)).suffix or 'no suffix'!r} is no picture format.",
        field=str(output),
        hint=f"end the name with one of {', '.join(FORMATS)}.",
    )


def drawing(timelines: list[Timeline], suffix: str) -> str:
    """The picture or Chrome trace of these timelines, side by side."""
    from planner.schedule.timeline import chrome_trace, html, svg

    if suffix == ".svg":
        return svg(timelines)
    if suffix == ".html":
        return html(timelines)
    return json.dumps(chrome_trace(timelines), allow_nan=False)


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
