"""`planner schedule`: simulate a pipeline schedule, compare several, or find the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from planner.cli.console import STDOUT, check_output, data, note, table, to_json, write
from planner.cli.failures import DONE, INFEASIBLE
from planner.cli.inputs import complete
from planner.cli.options import (
    COSTS,
    POSITIVE_INT,
    SECONDS,
    OneOf,
    option,
    refuse,
    verb,
)
from planner.cli.schedule_options import (
    Result,
    ScheduleOptions,
    check_options,
    simulated,
)
from planner.cli.timeline import FORMATS, check_format, drawing
from planner.errors import LayoutError, SpecError
from planner.spec.units import percent

Function = TypeVar("Function", bound=Callable[..., Any])

DURATIONS, SEARCH = "Durations: one value, or one per stage", "Search of synthesized"
PROOF = (
    "objective",
    "lower_bound",
    "gap",
    "optimal",
    "canonical",
    "canonical_value",
)
"""Fields of a synthesis in JSON."""
COMPARISON_HEADER = ("schedule", "makespan", "span", "bubble", "peak micro-batches")


def _duration(
    name: str, help_text: str, **settings: Any
) -> Callable[[Function], Function]:
    return option(name, type=COSTS, group=DURATIONS, help=help_text, **settings)


def _schedule_names() -> Iterable[str]:
    from planner.schedule import names

    return names()


@verb("schedule")
@click.argument(
    "name",
    required=False,
    metavar="[NAME]",
    shell_complete=complete(_schedule_names),
)
@option("--stages", type=POSITIVE_INT, required=True, help="Pipeline ranks")
@option(
    "--micro-batches", type=POSITIVE_INT, required=True, help="Micro-batches per step"
)
@option(
    "--virtual",
    type=POSITIVE_INT,
    help="Stages per rank [default: the schedule's fewest]",
)
@option("--sequence-chunks", type=POSITIVE_INT, default=1, help="Per micro-batch")
@_duration("--forward", "Forward of one stage", default="1")
@_duration("--backward-input", "Gradient of the input", default="1", advanced=True)
@_duration("--backward-weight", "Gradient of the weights", default="1", advanced=True)
@_duration(
    "--recompute",
    "Recomputation [default: 0; torchgpipe: as --forward]",
    advanced=True,
)
@_duration(
    "--overlap",
    "Saving of a forward that overlaps a backward (1f1b-overlap, dualpipe, dualpipev)",
    default="0",
    advanced=True,
)
@_duration(
    "--transfer",
    "Transfer to the next stage; a list has one value per boundary",
    default="0",
    advanced=True,
)
@option(
    "--transfer-mode",
    metavar="MODE",
    type=OneOf("mode", ("overlapped", "queued", "blocking")),
    default="overlapped",
    group=DURATIONS,
    advanced=True,
    help="overlapped with compute, queued per link, or blocking the sender",
)
@option(
    "--recompute-mode",
    metavar="MODE",
    type=OneOf("mode", ("except_last", "always", "never")),
    group=DURATIONS,
    advanced=True,
    help="Micro-batches that torchgpipe recomputes: except_last, always or never "
    "[default: except_last]",
)
@option(
    "--memory-limit",
    type=POSITIVE_INT,
    help="Most units in flight on a rank; exit code 3 above it",
)
@option(
    "--objective",
    metavar="O",
    type=OneOf("objective", ("makespan", "span")),
    group=SEARCH,
    advanced=True,
    help="Minimize makespan or span [default: makespan]",
)
@option(
    "--placement",
    metavar="P",
    type=OneOf("placement", ("wave", "loop")),
    group=SEARCH,
    advanced=True,
    help="Order of several stages per rank: wave or loop [default: wave]",
)
@option(
    "--time-limit",
    type=SECONDS,
    group=SEARCH,
    advanced=True,
    help="Stop the search after this time [default: 20]",
)
@option("--actions", is_flag=True, help="Print the actions of every rank")
@option(
    "--compare",
    metavar="NAME,...",
    help="Compare schedules; durations are then of one rank's whole work",
)
@option(
    "-o",
    "--output",
    metavar="FILE",
    help="Draw the step: out.svg, out.html or out.json (Chrome trace)",
)
@option("--ascii", "draw_ascii", is_flag=True, help="Draw the step in the terminal")
def command(
    name: str | None,
    actions: bool,
    compare: str | None,
    output: str | None,
    draw_ascii: bool,
    as_json: bool,
    **arguments: Any,
) -> int:
    """Simulate one step of the pipeline schedule NAME: time, bubble and memory.

    NAME is e.g. gpipe, 1f1b, interleaved-1f1b, zb-h1, dualpipe, or synthesized, which
    searches the best order.
    """
    options = ScheduleOptions(**arguments)
    _check_picture(output, draw_ascii, as_json)
    if compare is not None:
        refuse(
            {"--actions": actions}, "is not printed by --compare.", "leave out OPTION."
        )
        names = compare.split(",")
        results, code = _compare([name, *names] if name else names, options, as_json)
    elif name is not None:
        results, code = _simulate(name, options, actions, as_json)
    else:
        raise SpecError(
            "is missing.", field="NAME", hint="give a schedule, or --compare NAME,..."
        )
    _draw(results, output, draw_ascii)
    return code


def _simulate(
    name: str, options: ScheduleOptions, actions: bool, as_json: bool
) -> tuple[list[Result], int]:
    """Print one schedule; exit code 3 if a rank exceeds the memory limit."""
    from planner.schedule import find

    check_options(options, [find(name)], is_comparison=False)
    result = simulated(options, name)
    limit = options.memory_limit
    if result is None:
        note(f"no order stays within the memory limit of {limit} units in flight")
        return [], INFEASIBLE
    data(to_json(_document(result)) if as_json else _text(result, actions))
    above = []
    for rank, peak in enumerate(result.simulation.peak_in_flight):
        if limit is not None and peak > limit:
            above.append(f"rank {rank} holds {peak}")
    if above:
        note(f"above the memory limit of {limit} units in flight: {', '.join(above)}")
    return [result], INFEASIBLE if above else DONE


def _document(result: Result) -> dict[str, Any]:
    actions = [list(row) for row in result.simulation.schedule.to_text()]
    return {**_figures(result), "actions": actions, **_proof(result)}


def _figures(result: Result) -> dict[str, Any]:
    simulation = result.simulation
    return {
        "makespan": simulation.makespan,
        "span": simulation.span,
        "bubble_fraction": simulation.bubble_fraction,
        "peak_in_flight": list(simulation.peak_in_flight),
    }


def _proof(result: Result) -> dict[str, Any]:
    """How good a searched order is; empty for the other schedules."""
    found = result.synthesis
    if found is None:
        return {}
    return {name: getattr(found, name) for name in PROOF}


def _text(result: Result, actions: bool) -> str:
    simulation, found = result.simulation, result.synthesis
    lines = [
        f"schedule        {simulation.schedule.name}",
        f"makespan        {simulation.makespan:g}",
        f"span            {simulation.span:g}",
        f"bubble          {percent(simulation.bubble_fraction)}",
        f"peak in flight  {' '.join(map(str, simulation.peak_in_flight))}",
    ]
    if found is not None:
        proven = " (proven optimal)" if found.optimal else ""
        known = "none fits"
        if found.canonical is not None:
            known = f"{found.canonical} takes {found.canonical_value:g}"
        lines += [
            f"lower bound     {found.lower_bound:g} of {found.objective}{proven}",
            f"gap             {percent(found.gap)}",
            f"best known      {known}",
        ]
    if actions:
        for rank, row in enumerate(simulation.schedule.to_text()):
            lines.append(f"rank {rank}: {' '.join(row)}")
    return "\n".join(lines)


def _compare(
    names: Sequence[str], options: ScheduleOptions, as_json: bool
) -> tuple[list[Result], int]:
    """Print one row per schedule, and why the others are left out."""
    from planner.schedule import canonical_name, find

    known = [canonical_name(name.strip()) for name in names if name.strip()]
    known = list(dict.fromkeys(known))
    if not known:
        raise SpecError(
            "names no schedule.", field="--compare", hint="give NAME,NAME,..."
        )
    check_options(options, [find(name) for name in known], is_comparison=True)
    results, refused = [], []
    for name in known:
        try:
            results.append(_compared(name, options))
        except LayoutError as error:
            refused.append({"name": name, "reason": error.problems[0].message})
    if as_json:
        rows = [_comparison_document(result) for result in results]
        data(to_json({"schedules": rows, "refused": refused}))
    elif results:
        data(table(COMPARISON_HEADER, [_comparison_row(each) for each in results]))
    for result in results:
        found = result.synthesis
        if found is not None:
            bound = f"{found.objective} at least {found.lower_bound:g}"
            note(f"synthesized: {bound}, gap {percent(found.gap)}")
    for each in refused:
        note(f"{each['name']}: {each['reason']}")
    return results, DONE if results else INFEASIBLE


def _compared(name: str, options: ScheduleOptions) -> Result:
    """One schedule of a comparison.

    Raises:
        LayoutError: it does not take the numbers, or the memory limit.
    """
    limit = options.memory_limit
    result = simulated(options, name, whole_ranks=True)
    if result is None:
        raise LayoutError(f"no order stays within the memory limit of {limit}.")
    peak = max(result.peak_micro_batches)
    if limit is not None and peak > limit:
        raise LayoutError(
            f"holds {peak:g} micro-batches, above the memory limit of {limit}."
        )
    return result


def _comparison_document(result: Result) -> dict[str, Any]:
    return {
        "name": result.simulation.schedule.name,
        **_figures(result),
        "peak_micro_batches": result.peak_micro_batches,
        **_proof(result),
    }


def _comparison_row(result: Result) -> tuple[str, ...]:
    simulation = result.simulation
    return (
        simulation.schedule.name,
        f"{simulation.makespan:g}",
        f"{simulation.span:g}",
        percent(simulation.bubble_fraction),
        f"{max(result.peak_micro_batches):g}",
    )


def _check_picture(output: str | None, draw_ascii: bool, as_json: bool) -> None:
    """Refuse a picture that cannot be drawn, before any work."""
    if as_json:
        message = "cannot be combined with --json."
        refuse({"--ascii": draw_ascii}, message, "leave out OPTION or --json.")
    if output == STDOUT:
        raise SpecError(
            "must name a file: stdout has the results.",
            field="--output",
            hint=f"end the name with one of {', '.join(FORMATS)}.",
        )
    check_format(output)
    check_output(output)


def _draw(results: Sequence[Result], output: str | None, draw_ascii: bool) -> None:
    if not results or not (output or draw_ascii):
        return
    from planner.schedule.timeline import ascii, from_simulation

    timelines = []
    for result in results:
        simulation = result.simulation
        timelines.append(from_simulation(simulation, title=simulation.schedule.name))
    if draw_ascii:
        data(ascii(timelines))
    if output:
        write(output, drawing(timelines, Path(output).suffix))
