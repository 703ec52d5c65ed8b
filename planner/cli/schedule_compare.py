"""`planner schedule --compare`: schedules side by side, for the same work on the same ranks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from planner.cli.console import data, table, to_json, words
from planner.cli.failures import DONE, INFEASIBLE
from planner.cli.schedule import simulated
from planner.cli.schedule_options import check_options
from planner.cli.schedule_picture import draw
from planner.cli.schedule_search import proof, synthesis_of
from planner.errors import LayoutError, SpecError
from planner.schedule import Simulation, Synthesis, canonical_name, find
from planner.spec.units import percent


def compare(arguments: argparse.Namespace) -> int:
    """Print one row per schedule, in the order given; a schedule that refuses the numbers is told on stderr."""
    if arguments.actions:
        raise SpecError(
            "comparisons print no actions.", field="--actions", hint="leave it out."
        )
    names = _names(arguments)
    check_options(arguments, [find(name) for name in names])
    made, refused = _made(arguments, names)
    if arguments.json:
        data(to_json({"schedules": list(map(_document, made)), "refused": refused}))
    elif made:
        header = (
            "schedule",
            "makespan",
            "span",
            "bubble",
            "peak in flight, micro-batches",
        )
        data(table(header, [_row(each.simulation) for each in made]))
    draw(arguments, [each.simulation for each in made])
    for found in (each.synthesis for each in made if each.synthesis):
        words(
            f"synthesized: {found.objective} at least {found.lower_bound:g}, gap {percent(found.gap)}"
        )
    for each in refused:
        words(f"{each['name']}: {each['reason']}")
    return DONE if made else INFEASIBLE


@dataclass(frozen=True, slots=True)
class _Made:
    simulation: Simulation
    synthesis: Synthesis | None = None
    """Its proof, when it was searched."""


def _names(arguments: argparse.Namespace) -> list[str]:
    """Canonical names, each once."""
    names = [each.strip() for each in arguments.compare.split(",") if each.strip()]
    if arguments.name is not None:
        names.insert(0, arguments.name)
    if not names:
        raise SpecError(
            "names no schedule.", field="--compare", hint="give NAME,NAME,..."
        )
    return list(dict.fromkeys(map(canonical_name, names)))


def _made(
    arguments: argparse.Namespace, names: list[str]
) -> tuple[list[_Made], list[dict[str, str]]]:
    made, refused = [], []
    for name in names:
        try:
            made.append(_one(arguments, name))
        except LayoutError as error:
            refused.append({"name": name, "reason": error.problems[0].message})
    return made, refused


def _one(arguments: argparse.Namespace, name: str) -> _Made:
    """One schedule of the comparison.

    Raises:
        LayoutError: it does not take the numbers, or the memory limit.
    """
    limit = arguments.memory_limit
    if find(name).needs_durations:
        parts = (arguments.virtual or 1) * arguments.sequence_chunks
        found = synthesis_of(
            arguments, memory_limit=limit and limit * parts, whole_ranks=True
        )
        if found is None:
            raise LayoutError(
                f"no order stays within the memory limit of {limit}.",
                field="--memory-limit",
            )
        return _Made(found.simulation, found)
    simulation = simulated(arguments, name, whole_ranks=True)
    peak = max(_peaks(simulation))
    if limit is not None and peak > limit:
        raise LayoutError(
            f"holds {peak:g} micro-batches, over the memory limit of {limit}.",
            field="--memory-limit",
        )
    return _Made(simulation)


def _peaks(simulation: Simulation) -> list[float]:
    """Per rank, in whole micro-batches, so that schedules with smaller units compare."""
    parts = simulation.schedule.virtual_stages * simulation.schedule.sequence_chunks
    return [units / parts for units in simulation.peak_in_flight]


def _document(made: _Made) -> dict[str, object]:
    simulation = made.simulation
    return {
        "name": simulation.schedule.name,
        "makespan": simulation.makespan,
        "span": simulation.span,
        "bubble_fraction": simulation.bubble_fraction,
        "peak_in_flight": list(simulation.peak_in_flight),
        "peak_micro_batches": _peaks(simulation),
        **(proof(made.synthesis) if made.synthesis else {}),
    }


def _row(simulation: Simulation) -> tuple[str, ...]:
    return (
        simulation.schedule.name,
        f"{simulation.makespan:g}",
        f"{simulation.span:g}",
        percent(simulation.bubble_fraction),
        f"{max(_peaks(simulation)):g}",
    )
