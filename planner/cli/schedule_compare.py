"""`planner schedule --compare`: schedules side by side, for the same work on the same ranks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from planner.cli.console import data, table, to_json, words
from planner.cli.failures import DONE, INFEASIBLE
from planner.cli.schedule import simulated
from planner.cli.units import percent
from planner.errors import LayoutError, SpecError

if TYPE_CHECKING:
    from planner.schedule import Simulation


def compare(arguments: argparse.Namespace) -> int:
    """Print one row per schedule, in the order given; a schedule that refuses the numbers is told on stderr."""
    if arguments.actions or arguments.time_limit is not None:
        raise SpecError(
            "--actions and --time-limit are not for comparisons.", field="--compare", mend="leave them out."
        )
    made, refused = _simulated(arguments)
    if arguments.json:
        data(to_json({"schedules": list(map(_document, made)), "refused": refused}))
    elif made:
        header = ("schedule", "makespan", "span", "bubble", "peak in flight, micro-batches")
        data(table(header, [_row(each) for each in made]))
    for each in refused:
        words(f"{each['name']}: {each['reason']}")
    return DONE if made else INFEASIBLE


def _simulated(arguments: argparse.Namespace) -> tuple[list[Simulation], list[dict[str, str]]]:
    from planner.schedule import canonical_name

    names = [each.strip() for each in arguments.compare.split(",") if each.strip()]
    if arguments.name is not None:
        names.insert(0, arguments.name)
    if not names:
        raise SpecError("names no schedule.", field="--compare", mend="give NAME,NAME,...")
    made, refused = [], []
    for name in dict.fromkeys(map(canonical_name, names)):
        try:
            simulation = simulated(arguments, name, whole_ranks=True)
        except LayoutError as error:
            refused.append({"name": name, "reason": error.problems[0].message})
            continue
        peak, limit = max(_peaks(simulation)), arguments.memory_limit
        if limit is not None and peak > limit:
            refused.append({"name": name, "reason": f"holds {peak:g} micro-batches, over the memory limit of {limit}."})
        else:
            made.append(simulation)
    return made, refused


def _peaks(simulation: Simulation) -> list[float]:
    """Per rank, in whole micro-batches, so that schedules with smaller units compare."""
    parts = simulation.schedule.virtual_stages * simulation.schedule.sequence_chunks
    return [units / parts for units in simulation.peak_in_flight]


def _document(simulation: Simulation) -> dict[str, object]:
    return {
        "name": simulation.schedule.name,
        "makespan": simulation.makespan,
        "span": simulation.span,
        "bubble_fraction": simulation.bubble_fraction,
        "peak_in_flight": list(simulation.peak_in_flight),
        "peak_micro_batches": _peaks(simulation),
    }


def _row(simulation: Simulation) -> tuple[str, ...]:
    return (
        simulation.schedule.name,
        f"{simulation.makespan:g}",
        f"{simulation.span:g}",
        percent(simulation.bubble_fraction),
        f"{max(_peaks(simulation)):g}",
    )
