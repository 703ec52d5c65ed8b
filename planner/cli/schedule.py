"""`planner schedule`: simulates a pipeline schedule from durations per action, compares several, or finds the best."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from planner.cli.arguments import add_json, add_option, costs, positive_int, positive_seconds
from planner.cli.console import Progress, data, to_json, words
from planner.cli.failures import DONE, INFEASIBLE
from planner.cli.units import percent
from planner.errors import DocumentError, SpecError

if TYPE_CHECKING:
    from planner.schedule import Durations, Schedule, Simulation
    from planner.schedule.synthesize import Synthesis

SYNTHESIZED = "synthesized"
TIME_LIMIT_SECONDS = 20.0
DURATIONS: tuple[tuple[str, tuple[float, ...] | None, str], ...] = (
    ("--forward", (1,), "one forward"),
    ("--backward-input", (1,), "one gradient of the input"),
    ("--backward-weight", (1,), "one gradient of the weights"),
    ("--recompute", None, "one recomputation (default: 0; torchgpipe: as --forward)"),
    ("--overlap", (0,), "what a forward beside a backward saves (1f1b-overlap, dualpipe, dualpipev)"),
    ("--transfer", (0,), "one transfer to a neighbouring stage; a list has one per boundary"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("name", metavar="NAME", nargs="?", help=f"schedule, e.g. gpipe or 1f1b; or {SYNTHESIZED}")
    add_option(parser, "--stages", positive_int, required=True, metavar="P", help="pipeline ranks")
    add_option(parser, "--micro-batches", positive_int, required=True, metavar="M", help="micro-batches of one step")
    add_option(
        parser, "--virtual", positive_int, metavar="V", help="stages of one rank (default: the schedule's fewest)"
    )
    add_option(parser, "--sequence-chunks", positive_int, default=1, metavar="Q", help="chunks of one micro-batch")
    _add_durations(parser)
    add_option(
        parser,
        "--memory-limit",
        positive_int,
        metavar="A",
        help="units that any rank may hold; exit 3 if it holds more",
    )
    parser.add_argument("--actions", action="store_true", help="print the actions of every rank")
    parser.add_argument(
        "--compare", metavar="NAME,NAME,...", help="a table of schedules; durations then are of one rank's whole work"
    )
    parser.add_argument(
        "--time-limit",
        type=positive_seconds,
        metavar="S",
        help=f"seconds to search for {SYNTHESIZED} (default: {TIME_LIMIT_SECONDS:g})",
    )
    add_json(parser)


def _add_durations(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("durations", "one value, or a comma list with one per stage (and chunk)")
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
    if arguments.compare is not None:
        from planner.cli.schedule_compare import compare

        return compare(arguments)
    if arguments.name is None:
        raise SpecError("names no schedule.", field="schedule", mend="give a NAME, or --compare NAME,NAME,...")
    if arguments.name == SYNTHESIZED:
        return _synthesize(arguments)
    _check_options(arguments)
    simulation = simulated(arguments, arguments.name)
    document = _document(simulation)
    if arguments.json:
        data(to_json(document))
    else:
        data(_text(simulation, actions=arguments.actions))
    return _hold_memory(simulation, arguments.memory_limit)


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that would change nothing."""
    from planner.schedule import find

    entry = find(arguments.name)
    if arguments.time_limit is not None:
        raise SpecError(f"only {SYNTHESIZED} searches.", field="--time-limit", mend="leave it out.")
    if any(arguments.overlap) and not entry.has_pairs:
        raise SpecError(f"{entry.name} pairs no actions.", field="--overlap", mend="leave it out.")


def simulated(arguments: argparse.Namespace, name: str, *, whole_ranks: bool = False) -> Simulation:
    """The schedule of this name under the command's options; `whole_ranks`: durations are of one rank's whole work."""
    from planner.schedule import TransferMode, build, find, simulate

    entry = find(name)
    takes_virtual = entry.most_virtual_stages != entry.least_virtual_stages
    schedule = build(
        name,
        ranks=arguments.stages,
        micro_batches=arguments.micro_batches,
        virtual_stages=arguments.virtual if takes_virtual or not whole_ranks else None,
        sequence_chunks=arguments.sequence_chunks if entry.takes_sequence_chunks or not whole_ranks else 1,
        recompute=arguments.recompute_mode if entry.recompute_modes or not whole_ranks else "",
    )
    durations = _shares(arguments, schedule) if whole_ranks else _durations(arguments, schedule)
    return simulate(schedule, durations, transfer_mode=TransferMode(arguments.transfer_mode))


def _durations(arguments: argparse.Namespace, schedule: Schedule) -> Durations:
    """The options as they stand: per action."""
    from planner.schedule import Durations

    stages, chunks = schedule.stages, schedule.sequence_chunks
    given = {name: _option(arguments, schedule, name) for name, _, _ in DURATIONS[:-1]}
    has_chunks = chunks > 1 and any(len(values) == stages * chunks for values in given.values())
    spread = {name: _per_stage(name, values, stages, chunks if has_chunks else 1) for name, values in given.items()}
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
        raise DocumentError("takes one value when schedules are compared.", field="--transfer", mend="give one value.")
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


def _option(arguments: argparse.Namespace, schedule: Schedule, name: str) -> tuple[float, ...]:
    given: tuple[float, ...] | None = getattr(arguments, name.removeprefix("--").replace("-", "_"))
    if given is not None:
        return given
    # Only --recompute has no default of its own: torchgpipe runs the forward again, the others run nothing again.
    return (0,) if schedule.recompute_stop is None else _option(arguments, schedule, "--forward")


def _divide(seconds: float, parts: int) -> float:
    """Whole numbers stay whole where they can."""
    return seconds // parts if seconds % parts == 0 else seconds / parts


def _per_stage(option: str, values: tuple[float, ...], stages: int, chunks: int) -> tuple[float, ...]:
    if len(values) == 1:
        return values * (stages * chunks)
    if len(values) == stages * chunks:
        return values
    if len(values) == stages:
        return tuple(seconds for seconds in values for _ in range(chunks))
    raise DocumentError(
        f"{len(values)} values for {stages} stages.", field=option, mend=f"give one value, or {stages}."
    )


def _per_boundary(values: tuple[float, ...], stages: int) -> tuple[float, ...]:
    if len(values) == 1:
        return values * (stages - 1)
    if len(values) != stages - 1:
        raise DocumentError(
            f"{len(values)} values for {stages - 1} boundaries between stages.",
            field="--transfer",
            mend=f"give one value, or {stages - 1}.",
        )
    return values


def _synthesize(arguments: argparse.Namespace) -> int:
    """Search for the best order, and print it with its proof."""
    from planner.schedule import TransferMode
    from planner.schedule.synthesize import best_shape, synthesize

    has_others = arguments.sequence_chunks > 1 or arguments.recompute_mode or any(arguments.overlap)
    if has_others or arguments.transfer_mode != TransferMode.OVERLAPPED:
        raise SpecError(
            f"{SYNTHESIZED} takes no sequence chunks, recompute mode, pairs, or transfers that are not overlapped.",
            field="schedule",
            mend="leave these options out.",
        )
    shape = best_shape(arguments.stages, arguments.micro_batches, arguments.virtual or 1)
    with Progress("synthesize"):
        found = synthesize(
            _durations(arguments, shape),
            ranks=arguments.stages,
            micro_batches=arguments.micro_batches,
            virtual_stages=arguments.virtual or 1,
            memory_limit=arguments.memory_limit,
            time_limit_seconds=arguments.time_limit or TIME_LIMIT_SECONDS,
        )
    if found is None:
        words(f"no order stays within the memory limit of {arguments.memory_limit} in flight")
        return INFEASIBLE
    proof = {"lower_bound": found.lower_bound, "gap": found.gap, "optimal": found.optimal, "canonical": found.canonical}
    if arguments.json:
        data(to_json({**_document(found.simulation), **proof}))
    else:
        data(_text(found.simulation, actions=arguments.actions) + "\n" + _proof(found))
    return DONE


def _proof(found: Synthesis) -> str:
    best = f"{found.canonical} takes {found.canonical_makespan:g}" if found.canonical else "none fits"
    return "\n".join(
        [
            f"lower bound     {found.lower_bound:g}" + (" (proven optimal)" if found.optimal else ""),
            f"gap             {percent(found.gap)}",
            f"best canonical  {best}",
        ]
    )


def _document(simulation: Simulation) -> dict[str, object]:
    return {
        "makespan": simulation.makespan,
        "span": simulation.span,
        "bubble_fraction": simulation.bubble_fraction,
        "peak_in_flight": list(simulation.peak_in_flight),
        "actions": [list(row) for row in simulation.schedule.to_text()],
    }


def _text(simulation: Simulation, *, actions: bool) -> str:
    peaks = " ".join(str(peak) for peak in simulation.peak_in_flight)
    lines = [
        f"schedule        {simulation.schedule.name}",
        f"makespan        {simulation.makespan:g}",
        f"span            {simulation.span:g}",
        f"bubble          {percent(simulation.bubble_fraction)}",
        f"peak in flight  {peaks}",
    ]
    if actions:
        lines += [f"rank {rank}: {' '.join(row)}" for rank, row in enumerate(simulation.schedule.to_text())]
    return "\n".join(lines)


def _hold_memory(simulation: Simulation, limit: int | None) -> int:
    over = {rank: peak for rank, peak in enumerate(simulation.peak_in_flight) if limit is not None and peak > limit}
    if not over:
        return DONE
    held = ", ".join(f"rank {rank} holds {peak}" for rank, peak in over.items())
    words(f"over the memory limit of {limit} in flight: {held}")
    return INFEASIBLE
