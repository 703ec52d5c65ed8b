"""`planner schedule`: simulates a pipeline schedule from durations per action, compares several, or finds the best."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from planner.cli.arguments import (
    add_json,
    add_option,
    costs,
    positive_int,
    positive_seconds,
)
from planner.cli.console import data, to_json, words
from planner.cli.failures import DONE, INFEASIBLE
from planner.errors import DocumentError, SpecError
from planner.spec.units import percent

if TYPE_CHECKING:
    from planner.schedule import Durations, Schedule, Simulation

DURATIONS: tuple[tuple[str, tuple[float, ...] | None, str], ...] = (
    ("--forward", (1,), "one forward"),
    ("--backward-input", (1,), "one gradient of the input"),
    ("--backward-weight", (1,), "one gradient of the weights"),
    ("--recompute", None, "one recomputation (default: 0; torchgpipe: as --forward)"),
    (
        "--overlap",
        (0,),
        "what a forward beside a backward saves (1f1b-overlap, dualpipe, dualpipev)",
    ),
    (
        "--transfer",
        (0,),
        "one transfer to a neighbouring stage; a list has one per boundary",
    ),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="schedule, e.g. gpipe, 1f1b or synthesized",
    )
    add_option(
        parser,
        "--stages",
        positive_int,
        required=True,
        metavar="P",
        help="pipeline ranks",
    )
    add_option(
        parser,
        "--micro-batches",
        positive_int,
        required=True,
        metavar="M",
        help="micro-batches of one step",
    )
    add_option(
        parser,
        "--virtual",
        positive_int,
        metavar="V",
        help="stages of one rank (default: the schedule's fewest)",
    )
    add_option(
        parser,
        "--sequence-chunks",
        positive_int,
        default=1,
        metavar="Q",
        help="chunks of one micro-batch",
    )
    _add_durations(parser)
    add_option(
        parser,
        "--memory-limit",
        positive_int,
        metavar="A",
        help="units that any rank may hold; exit 3 if it holds more",
    )
    parser.add_argument(
        "--actions", action="store_true", help="print the actions of every rank"
    )
    parser.add_argument(
        "--compare",
        metavar="NAME,NAME,...",
        help="a table of schedules; durations then are of one rank's whole work",
    )
    _add_search(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="draw the step: out.svg, out.html, or out.json (Chrome trace)",
    )
    parser.add_argument(
        "--ascii", action="store_true", help="draw the step in the terminal"
    )
    add_json(parser)


def _add_search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "search", "for synthesized, which searches the best order for the durations"
    )
    group.add_argument(
        "--objective",
        choices=("makespan", "span"),
        help="what is to be least (default: makespan)",
    )
    group.add_argument(
        "--placement",
        choices=("wave", "loop"),
        help="of several stages per rank: down and up, or round (default: wave)",
    )
    group.add_argument(
        "--time-limit",
        type=positive_seconds,
        metavar="S",
        help="seconds to search (default: 20)",
    )


def _add_durations(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "durations", "one value, or a comma list with one per stage (and chunk)"
    )
    for name, default, what in DURATIONS:
        summary = f"{what} (default: {default[0]})" if default else what
        group.add_argument(name, type=costs, default=default, metavar="S", help=summary)
    group.add_argument(
        "--transfer-mode",
        choices=("overlapped", "queued", "blocking"),
        default="overlapped",
        help="transfers beside compute, one at a time per link, or in the sender's way (default: overlapped)",
    )
    group.add_argument(
        "--recompute-mode",
        choices=("except_last", "always", "never"),
        default="",
        help="micro-batches that torchgpipe recomputes (default: except_last)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print makespan, bubble and peak in flight; exit 3 when a rank holds more than the memory limit."""
    from planner.cli.schedule_picture import check_picture, draw

    check_picture(arguments)
    if arguments.compare is not None:
        from planner.cli.schedule_compare import compare

        return compare(arguments)
    if arguments.name is None:
        raise SpecError(
            "names no schedule.",
            field="schedule",
            hint="give a NAME, or --compare NAME,NAME,...",
        )
    from planner.cli.schedule_options import check_options
    from planner.schedule import find

    entry = find(arguments.name)
    check_options(arguments, [entry])
    if entry.needs_durations:
        from planner.cli.schedule_search import search

        return search(arguments)
    simulation = simulated(arguments, arguments.name)
    document = describe(simulation)
    if arguments.json:
        data(to_json(document))
    else:
        data(tell(simulation, actions=arguments.actions))
    draw(arguments, [simulation])
    return _hold_memory(simulation, arguments.memory_limit)


def simulated(
    arguments: argparse.Namespace, name: str, *, whole_ranks: bool = False
) -> Simulation:
    """The schedule of this name under the command's options; `whole_ranks`: durations are of one rank's whole work."""
    from planner.schedule import TransferMode, build, find, simulate

    entry = find(name)
    takes_virtual = entry.most_virtual_stages != entry.least_virtual_stages
    schedule = build(
        name,
        ranks=arguments.stages,
        micro_batches=arguments.micro_batches,
        virtual_stages=arguments.virtual if takes_virtual or not whole_ranks else None,
        sequence_chunks=arguments.sequence_chunks
        if entry.takes_sequence_chunks or not whole_ranks
        else 1,
        recompute=arguments.recompute_mode
        if entry.recompute_modes or not whole_ranks
        else "",
    )
    durations = durations_of(arguments, schedule, whole_ranks=whole_ranks)
    return simulate(
        schedule, durations, transfer_mode=TransferMode(arguments.transfer_mode)
    )


def durations_of(
    arguments: argparse.Namespace, schedule: Schedule, *, whole_ranks: bool = False
) -> Durations:
    """The options for these stages: per action, or `whole_ranks`: of one rank's whole work, in equal parts."""
    return (
        _shares(arguments, schedule) if whole_ranks else _durations(arguments, schedule)
    )


def _durations(arguments: argparse.Namespace, schedule: Schedule) -> Durations:
    """The options as they stand: per action."""
    from planner.schedule import Durations

    stages, chunks = schedule.stages, schedule.sequence_chunks
    given = {name: _option(arguments, schedule, name) for name, _, _ in DURATIONS[:-1]}
    has_chunks = chunks > 1 and any(
        len(values) == stages * chunks for values in given.values()
    )
    spread = {
        name: _per_stage(name, values, stages, chunks if has_chunks else 1)
        for name, values in given.items()
    }
    transfer = _per_boundary(arguments.transfer, stages)
    return Durations(
        forward=spread["--forward"],
        backward_input=spread["--backward-input"],
        backward_weight=spread["--backward-weight"],
        recompute=spread["--recompute"],
        overlap=spread["--overlap"],
        transfer_forward=transfer,
        transfer_backward=transfer,
        sequence_chunks=chunks if has_chunks else 1,
    )


def _shares(arguments: argparse.Namespace, schedule: Schedule) -> Durations:
    """The options as the whole work of each rank, in equal parts for each of its actions."""
    from planner.schedule import Durations

    parts = schedule.virtual_stages * schedule.sequence_chunks

    def share(name: str) -> tuple[float, ...]:
        values = _per_stage(name, _option(arguments, schedule, name), schedule.ranks, 1)
        return tuple(_divide(values[rank], parts) for rank in schedule.stage_ranks)

    if len(arguments.transfer) > 1:
        raise DocumentError(
            "takes one value when schedules are compared.",
            field="--transfer",
            hint="give one value.",
        )
    transfer = _per_boundary(arguments.transfer, schedule.stages)
    return Durations(
        forward=share("--forward"),
        backward_input=share("--backward-input"),
        backward_weight=share("--backward-weight"),
        recompute=share("--recompute"),
        overlap=share("--overlap"),
        transfer_forward=transfer,
        transfer_backward=transfer,
    )


def _option(
    arguments: argparse.Namespace, schedule: Schedule, name: str
) -> tuple[float, ...]:
    given: tuple[float, ...] | None = getattr(
        arguments, name.removeprefix("--").replace("-", "_")
    )
    if given is not None:
        return given
    # Only --recompute has no default of its own: torchgpipe runs the forward again, the others run nothing again.
    return (
        (0,)
        if schedule.recompute_stop is None
        else _option(arguments, schedule, "--forward")
    )


def _divide(seconds: float, parts: int) -> float:
    """Whole numbers stay whole where they can."""
    return seconds // parts if seconds % parts == 0 else seconds / parts


def _per_stage(
    option: str, values: tuple[float, ...], stages: int, chunks: int
) -> tuple[float, ...]:
    if len(values) == 1:
        return values * (stages * chunks)
    if len(values) == stages * chunks:
        return values
    if len(values) == stages:
        return tuple(seconds for seconds in values for _ in range(chunks))
    raise DocumentError(
        f"{len(values)} values for {stages} stages.",
        field=option,
        hint=f"give one value, or {stages}.",
    )


def _per_boundary(values: tuple[float, ...], stages: int) -> tuple[float, ...]:
    if len(values) == 1:
        return values * (stages - 1)
    if len(values) != stages - 1:
        raise DocumentError(
            f"{len(values)} values for {stages - 1} boundaries between stages.",
            field="--transfer",
            hint=f"give one value, or {stages - 1}.",
        )
    return values


def describe(simulation: Simulation) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "makespan": simulation.makespan,
        "span": simulation.span,
        "bubble_fraction": simulation.bubble_fraction,
        "peak_in_flight": list(simulation.peak_in_flight),
        "actions": [list(row) for row in simulation.schedule.to_text()],
    }


def tell(simulation: Simulation, *, actions: bool) -> str:
    """What the terminal shows."""
    peaks = " ".join(str(peak) for peak in simulation.peak_in_flight)
    lines = [
        f"schedule        {simulation.schedule.name}",
        f"makespan        {simulation.makespan:g}",
        f"span            {simulation.span:g}",
        f"bubble          {percent(simulation.bubble_fraction)}",
        f"peak in flight  {peaks}",
    ]
    if actions:
        lines += [
            f"rank {rank}: {' '.join(row)}"
            for rank, row in enumerate(simulation.schedule.to_text())
        ]
    return "\n".join(lines)


def _hold_memory(simulation: Simulation, limit: int | None) -> int:
    over = {
        rank: peak
        for rank, peak in enumerate(simulation.peak_in_flight)
        if limit is not None and peak > limit
    }
    if not over:
        return DONE
    held = ", ".join(f"rank {rank} holds {peak}" for rank, peak in over.items())
    words(f"over the memory limit of {limit} in flight: {held}")
    return INFEASIBLE
