"""Options of `planner schedule` as schedules and durations, and their simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from planner.cli.console import Progress
from planner.errors import DocumentError, LayoutError, SpecError

if TYPE_CHECKING:
    from planner.schedule import (
        Durations,
        Schedule,
        ScheduleEntry,
        Simulation,
        Synthesis,
    )

Values = tuple[float, ...]
TIME_LIMIT_SECONDS = 20.0
"""Default of the search for the best order."""
OPTIONS = {
    "ranks": "--stages",
    "micro_batches": "--micro-batches",
    "virtual_stages": "--virtual",
    "sequence_chunks": "--sequence-chunks",
    "recompute": "--recompute-mode",
}
"""Field of a schedule's errors -> option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """The options of the command; None: not given."""

    stages: int
    """Pipeline ranks."""
    micro_batches: int
    virtual: int | None
    sequence_chunks: int
    forward: Values
    backward_input: Values
    backward_weight: Values
    recompute: Values | None
    overlap: Values
    transfer: Values
    transfer_mode: str
    recompute_mode: str | None
    memory_limit: int | None
    """Units that a rank may have in flight; micro-batches in a comparison."""
    objective: str | None
    placement: str | None
    time_limit: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """A simulated schedule."""

    simulation: Simulation
    synthesis: Synthesis | None = None
    """The search's proof, for the schedule `synthesized`."""

    @property
    def peak_micro_batches(self) -> list[float]:
        """Peak of every rank in whole micro-batches, which all schedules have."""
        schedule = self.simulation.schedule
        units = schedule.virtual_stages * schedule.sequence_chunks
        return [peak / units for peak in self.simulation.peak_in_flight]


def check_options(
    options: ScheduleOptions, entries: Sequence[ScheduleEntry], *, is_comparison: bool
) -> None:
    """Refuse options that change nothing for any of these schedules.

    Raises:
        SpecError: names the first such option, and the reason.
    """
    names = ", ".join(entry.name for entry in entries)
    unused = _unused_options(options, entries)
    if is_comparison:  # a single schedule refuses its numbers itself
        unused = chain(unused, _unused_numbers(options, entries))
    for option, reason in unused:
        raise SpecError(f"{names}: {reason}.", field=option, hint="leave it out.")


def _unused_options(
    options: ScheduleOptions, entries: Sequence[ScheduleEntry]
) -> Iterator[tuple[str, str]]:
    """Options that none of the schedules uses, with the reason."""
    if not any(entry.needs_durations for entry in entries):
        of_search = {
            "--objective": options.objective,
            "--placement": options.placement,
            "--time-limit": options.time_limit,
        }
        for option, value in of_search.items():
            if value is not None:
                yield option, "only the schedule synthesized is searched"
    if any(options.overlap) and not any(entry.has_pairs for entry in entries):
        yield "--overlap", "no actions are paired"
    mode = options.recompute_mode
    having_mode = [entry for entry in entries if mode in entry.recompute_modes]
    if mode is not None and not having_mode:
        yield "--recompute-mode", "only torchgpipe has it"
    recomputes_nothing = mode == "never" and len(having_mode) == len(entries)
    if recomputes_nothing and any(options.recompute or ()):
        yield "--recompute", "--recompute-mode never recomputes nothing"
    sends = any(options.transfer)
    if sends and options.stages == 1:
        yield "--transfer", "one rank sends nothing"
    if options.transfer_mode != "overlapped" and not sends:
        yield "--transfer-mode", "nothing is sent without --transfer"


def _unused_numbers(
    options: ScheduleOptions, entries: Sequence[ScheduleEntry]
) -> Iterator[tuple[str, str]]:
    """Stages per rank and sequence chunks that none of the schedules takes."""
    virtual = options.virtual or 1
    fits = any(entry.takes_virtual_stages(virtual) for entry in entries)
    if options.virtual is not None and not fits:
        yield "--virtual", f"none puts {virtual} stages on a rank"
    splits = any(entry.takes_sequence_chunks for entry in entries)
    if options.sequence_chunks > 1 and not splits:
        yield "--sequence-chunks", "none splits the sequence"


def simulated(
    options: ScheduleOptions, name: str, *, whole_ranks: bool = False
) -> Result | None:
    """The schedule of this name, simulated; None if no order keeps the memory limit.

    Args:
        options: of the command.
        name: canonical name or alias.
        whole_ranks: durations are of one rank's whole work, and the memory limit counts
            micro-batches, so that schedules with smaller units can be compared.

    Raises:
        LayoutError: the schedule does not take these numbers; names the option.
    """
    from planner.schedule import find

    entry = find(name)
    simulate = _synthesized if entry.needs_durations else _built
    try:
        return simulate(options, entry, whole_ranks)
    except LayoutError as error:
        problems = []
        for problem in error.problems:
            option = OPTIONS.get(problem.field, problem.field)
            problems.append(replace(problem, field=option))
        raise LayoutError("", problems=tuple(problems)) from None


def _built(options: ScheduleOptions, entry: ScheduleEntry, whole_ranks: bool) -> Result:
    """A schedule whose order does not depend on the durations."""
    from planner.schedule import TransferMode, build, simulate

    virtual, chunks = options.virtual, options.sequence_chunks
    recompute = options.recompute_mode or ""
    if whole_ranks:  # options that another schedule of the comparison takes
        if entry.most_virtual_stages == entry.least_virtual_stages:
            virtual = None
        if not entry.takes_sequence_chunks:
            chunks = 1
        if not entry.recompute_modes:
            recompute = ""
    schedule = build(
        entry.name,
        ranks=options.stages,
        micro_batches=options.micro_batches,
        virtual_stages=virtual,
        sequence_chunks=chunks,
        recompute=recompute,
    )
    durations = durations_of(options, schedule, whole_ranks=whole_ranks)
    mode = TransferMode(options.transfer_mode)
    return Result(simulate(schedule, durations, transfer_mode=mode))


def _synthesized(
    options: ScheduleOptions, entry: ScheduleEntry, whole_ranks: bool
) -> Result | None:
    """The best order for the durations; None if no order keeps the memory limit."""
    from planner.schedule import Objective, Placement, TransferMode, synthesize
    from planner.schedule.synthesize import best_shape

    if options.transfer_mode != TransferMode.OVERLAPPED:
        raise LayoutError(
            f"{entry.name} supports overlapped transfers only.",
            field="--transfer-mode",
            hint="leave it out.",
        )
    virtual, chunks = options.virtual or 1, options.sequence_chunks
    placement = Placement(options.placement or Placement.WAVE)
    shape = best_shape(
        options.stages, options.micro_batches, virtual, chunks, placement
    )
    limit = options.memory_limit
    if limit is not None and whole_ranks:
        limit *= virtual * chunks
    with Progress("searching"):
        synthesis = synthesize(
            durations_of(options, shape, whole_ranks=whole_ranks),
            ranks=options.stages,
            micro_batches=options.micro_batches,
            virtual_stages=virtual,
            sequence_chunks=chunks,
            placement=placement,
            objective=Objective(options.objective or Objective.MAKESPAN),
            memory_limit=limit,
            time_limit_seconds=options.time_limit or TIME_LIMIT_SECONDS,
        )
    return None if synthesis is None else Result(synthesis.simulation, synthesis)


def durations_of(
    options: ScheduleOptions, schedule: Schedule, *, whole_ranks: bool
) -> Durations:
    """The durations of every action; `whole_ranks`: in equal parts of a rank's work.

    Raises:
        DocumentError: a list is neither one value nor one per stage or boundary.
    """
    from planner.schedule import Durations

    given = {
        "forward": options.forward,
        "backward_input": options.backward_input,
        "backward_weight": options.backward_weight,
        "recompute": _recompute(options, schedule),
        "overlap": options.overlap,
    }
    if whole_ranks and len(options.transfer) > 1:
        raise DocumentError(
            "takes one value in a comparison.",
            field="--transfer",
            hint="give one value.",
        )
    chunks = 1 if whole_ranks else _values_per_stage(given, schedule)
    times = {}
    for name, values in given.items():
        option = f"--{name.replace('_', '-')}"
        if whole_ranks:
            times[name] = _shares(option, values, schedule)
        else:
            times[name] = _per_stage(option, values, schedule.stages, chunks)
    transfer = _per_boundary(options.transfer, schedule.stages)
    return Durations(
        forward=times["forward"],
        backward_input=times["backward_input"],
        backward_weight=times["backward_weight"],
        recompute=times["recompute"],
        overlap=times["overlap"],
        transfer_forward=transfer,
        transfer_backward=transfer,
        sequence_chunks=chunks,
    )


def _recompute(options: ScheduleOptions, schedule: Schedule) -> Values:
    """Time of a recomputation: by default that of a forward in torchgpipe, else 0."""
    if options.recompute is not None:
        return options.recompute
    return (0,) if schedule.recompute_stop is None else options.forward


def _values_per_stage(given: dict[str, Values], schedule: Schedule) -> int:
    """The sequence chunks if a list has a value for each of them, else 1."""
    chunks = schedule.sequence_chunks
    lengths = [len(values) for values in given.values()]
    return chunks if schedule.stages * chunks in lengths else 1


def _shares(option: str, values: Values, schedule: Schedule) -> Values:
    """A rank's time, divided among its stages and chunks."""
    parts = schedule.virtual_stages * schedule.sequence_chunks
    per_rank = _per_stage(option, values, schedule.ranks, 1)
    return tuple(_divide(per_rank[rank], parts) for rank in schedule.stage_ranks)


def _divide(seconds: float, parts: int) -> float:
    """The quotient; a whole number where possible, so that results are exact."""
    return seconds // parts if seconds % parts == 0 else seconds / parts


def _per_stage(option: str, values: Values, stages: int, chunks: int) -> Values:
    """One value for every chunk of every stage."""
    if len(values) == 1:
        return values * (stages * chunks)
    if len(values) == stages * chunks:
        return values
    if len(values) == stages:
        return tuple(value for value in values for _ in range(chunks))
    raise DocumentError(
        f"{len(values)} values for {stages} stages.",
        field=option,
        hint=f"give one value, or {stages}.",
    )


def _per_boundary(values: Values, stages: int) -> Values:
    if len(values) == 1:
        return values * (stages - 1)
    if len(values) == stages - 1:
        return values
    raise DocumentError(
        f"{len(values)} values for {stages - 1} boundaries between stages.",
        field="--transfer",
        hint=f"give one value, or {stages - 1}.",
    )
