"""Options of `planner schedule` as schedules and durations, and their simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    searches = any(entry.needs_durations for entry in entries)
    pairs = any(entry.has_pairs for entry in entries)
    sends = any(options.transfer)
    mode = options.recompute_mode
    having_mode = [entry for entry in entries if mode in entry.recompute_modes]
    recomputes = mode != "never" or len(having_mode) < len(entries)
    not_searched = "only the schedule synthesized is searched"
    used = [
        ("--objective", options.objective is None or searches, not_searched),
        ("--placement", options.placement is None or searches, not_searched),
        ("--time-limit", options.time_limit is None or searches, not_searched),
        ("--overlap", pairs or not any(options.overlap), "no actions are paired"),
        ("--recompute-mode", mode is None or having_mode, "only torchgpipe has it"),
        (
            "--recompute",
            recomputes or not any(options.recompute or ()),
            "--recompute-mode never recomputes nothing",
        ),
        ("--transfer", options.stages > 1 or not sends, "one rank sends nothing"),
        (
            "--transfer-mode",
            sends or options.transfer_mode == "overlapped",
            "nothing is sent without --transfer",
        ),
    ]
    if is_comparison:  # a single schedule refuses its numbers itself
        virtual, chunks = options.virtual or 1, options.sequence_chunks
        takes_virtual = any(each.takes_virtual_stages(virtual) for each in entries)
        takes_chunks = any(each.takes_sequence_chunks for each in entries)
        used += [
            (
                "--virtual",
                options.virtual is None or takes_virtual,
                f"none puts {virtual} stages on a rank",
            ),
            (
                "--sequence-chunks",
                chunks == 1 or takes_chunks,
                "none splits the sequence",
            ),
        ]
    for option, is_used, reason in used:
        if not is_used:
            names = ", ".join(entry.name for entry in entries)
            raise SpecError(f"{names}: {reason}.", field=option, hint="leave it out.")


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
    from planner.schedule.durations import OF_ACTIONS

    given = {name: getattr(options, name) for name in OF_ACTIONS}
    given["recompute"] = _recompute(options, schedule)
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
        **times,
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
