"""`planner schedule`: simulates a pipeline schedule from durations per action."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from planner.cli.arguments import add_json, add_option, costs, positive_int
from planner.cli.console import data, to_json, words
from planner.cli.failures import DONE, INFEASIBLE
from planner.cli.units import percent
from planner.errors import DocumentError

if TYPE_CHECKING:
    from planner.schedule import Durations, Schedule, Simulation


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("name", metavar="NAME", help="schedule, e.g. gpipe or 1f1b")
    add_option(parser, "--stages", positive_int, required=True, metavar="P", help="pipeline ranks")
    add_option(parser, "--micro-batches", positive_int, required=True, metavar="M", help="micro-batches of one step")
    add_option(parser, "--virtual", positive_int, default=1, metavar="V", help="stages of one rank")
    add_option(parser, "--sequence-chunks", positive_int, default=1, metavar="Q", help="chunks of one micro-batch")
    for name, default, what in (
        ("--forward", (1,), "forward"),
        ("--backward-input", (1,), "gradient of the input"),
        ("--backward-weight", (1,), "gradient of the weights"),
        ("--transfer", (0,), "transfer to the next stage, overlapped with compute"),
    ):
        summary = f"duration of one {what}: one value, or one per stage (default: {default[0]})"
        parser.add_argument(name, type=costs, default=default, metavar="S", help=summary)
    add_option(
        parser,
        "--memory-limit",
        positive_int,
        metavar="A",
        help="units that any rank may hold; exit 3 if it holds more",
    )
    parser.add_argument("--actions", action="store_true", help="print the actions of every rank")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print makespan, bubble and peak in flight; exit 3 when a rank holds more than the memory limit."""
    from planner.schedule import build, simulate

    schedule = build(
        arguments.name,
        ranks=arguments.stages,
        micro_batches=arguments.micro_batches,
        virtual_stages=arguments.virtual,
        sequence_chunks=arguments.sequence_chunks,
    )
    simulation = simulate(schedule, _durations(arguments, len(schedule.stage_ranks)))
    if arguments.json:
        data(to_json(_document(schedule, simulation)))
    else:
        data(_text(schedule, simulation, actions=arguments.actions))
    return _hold_memory(simulation, arguments.memory_limit)


def _durations(arguments: argparse.Namespace, stages: int) -> Durations:
    from planner.schedule import Durations

    transfer = _per_stage("--transfer", arguments.transfer, max(stages - 1, 1), what="boundaries between stages")
    return Durations(
        forward=_per_stage("--forward", arguments.forward, stages),
        backward_input=_per_stage("--backward-input", arguments.backward_input, stages),
        backward_weight=_per_stage("--backward-weight", arguments.backward_weight, stages),
        recompute=(0,) * stages,
        transfer_forward=transfer[: stages - 1],
        transfer_backward=transfer[: stages - 1],
    )


def _per_stage(option: str, values: tuple[float, ...], count: int, *, what: str = "stages") -> tuple[float, ...]:
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise DocumentError(
            f"{len(values)} values for {count} {what}.", field=option, mend=f"give one value, or {count}."
        )
    return values


def _document(schedule: Schedule, simulation: Simulation) -> dict[str, object]:
    return {
        "makespan": simulation.makespan,
        "span": simulation.span,
        "bubble_fraction": simulation.bubble_fraction,
        "peak_in_flight": list(simulation.peak_in_flight),
        "actions": [[str(action) for action in rank] for rank in schedule.actions],
    }


def _text(schedule: Schedule, simulation: Simulation, *, actions: bool) -> str:
    peaks = " ".join(str(peak) for peak in simulation.peak_in_flight)
    lines = [
        f"schedule        {schedule.name}",
        f"makespan        {simulation.makespan:g}",
        f"span            {simulation.span:g}",
        f"bubble          {percent(simulation.bubble_fraction)}",
        f"peak in flight  {peaks}",
    ]
    if actions:
        lines += [f"rank {rank}: {' '.join(str(each) for each in row)}" for rank, row in enumerate(schedule.actions)]
    return "\n".join(lines)


def _hold_memory(simulation: Simulation, limit: int | None) -> int:
    over = {rank: peak for rank, peak in enumerate(simulation.peak_in_flight) if limit is not None and peak > limit}
    if not over:
        return DONE
    held = ", ".join(f"rank {rank} holds {peak}" for rank, peak in over.items())
    words(f"over the memory limit of {limit} in flight: {held}")
    return INFEASIBLE
