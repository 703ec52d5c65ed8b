"""`planner timeline`: draws the predicted step of a plan, the measured step of a run, or both on one time axis."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    parser.add_argument("--profile", metavar="FILE", help="profile of a plan that does not carry it")
    parser.add_argument("--ascii", action="store_true", help="draw in the terminal (also done when no -o is given)")
    add_json(parser, "print the Chrome trace on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Draw, and write the picture."""
    _check_format(arguments.output)
    check_output(arguments.output)
    timelines = [_read(path, arguments.profile) for path in arguments.inputs]
    if arguments.output is not None:
        write(arguments.output, _drawing(timelines, Path(arguments.output).suffix))
    if arguments.json and arguments.output != STDOUT:
        data(_drawing(timelines, ".json"))
    elif arguments.ascii or arguments.output is None:
        from planner.schedule.timeline import ascii as draw_ascii

        data(draw_ascii(timelines))
    return DONE


def _check_format(output: str | None) -> None:
    if output in (None, STDOUT) or Path(str(output)).suffix in FORMATS:
        return
    raise DocumentError(
        f"{Path(str(output)).suffix or 'no suffix'!r} is no picture format.",
        field=str(output),
        mend=f"end the name with one of {', '.join(FORMATS)}.",
    )


def _drawing(timelines: list[Timeline], suffix: str) -> str:
    from planner.schedule.timeline import chrome_trace, html, svg

    if suffix == ".svg":
        return svg(timelines)
    if suffix == ".html":
        return html(timelines)
    return json.dumps(chrome_trace(timelines), allow_nan=False)


def _read(path: str, profile: str | None) -> Timeline:
    from planner.schedule.timeline import from_measured

    found = read_data(path)
    if isinstance(found, dict) and "plan_id" in found:
        return from_measured(parse(MeasuredRun, found, where=path))
    if isinstance(found, dict) and "layout" in found:
        return predicted(parse(Plan, found, where=path), profile)
    raise DocumentError(
        "is neither a plan nor a measured run.",
        field=path,
        mend="give plan.json of `planner plan`, or measured.json of `planner run`.",
    )


def predicted(plan: Plan, profile: str | None = None) -> Timeline:
    """The plan's schedule, simulated with its predicted seconds per stage."""
    from planner.cost import stage_durations
    from planner.schedule import build, simulate
    from planner.schedule.timeline import from_simulation

    schedule = build(plan.layout.schedule, **_shape(plan))
    durations = stage_durations(plan, profile_behind(plan, profile))
    return from_simulation(simulate(schedule, durations), f"predicted {plan.id[:12]}")


def _shape(plan: Plan) -> dict[str, Any]:
    return {
        "ranks": plan.layout.pipeline_parallel_degree,
        "micro_batches": plan.micro_batches,
        "virtual_stages": plan.layout.virtual_stages_per_rank,
    }
