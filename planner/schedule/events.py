"""Timelines: what every rank did, or will do, in one step; predicted and measured ones look the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby, pairwise
from operator import attrgetter
from typing import TypeVar

from planner.errors import DocumentError, ScheduleError
from planner.schedule.actions import Action, ActionKind
from planner.schedule.memory import Curve, HeldBytes, curve_of, memory_curves
from planner.schedule.simulate import Event, Simulation
from planner.schedule.transfers import Transfer, transfers_of
from planner.spec.measured import SENDS, MeasuredAction, MeasuredRun


class EventKind(StrEnum):
    """What a rank spends time on."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "recompute"
    REDUCE = "reduce"
    """Exchange of gradients between data-parallel ranks."""
    OPTIMIZER = "optimizer"
    TRANSFER = "transfer"
    """Between stages, beside compute."""
    WAIT = "wait"
    """For a tensor of another rank, as measured where it is received: all that can be seen of a transfer there."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One bar of a timeline. Times are seconds from the step's start."""

    label: str
    """An action such as ``2F0``, or words."""
    kind: EventKind
    start_seconds: float
    end_seconds: float
    sequence_chunks: int = 1
    """Pieces of each micro-batch's sequence, which the action counts."""

    @property
    def action(self) -> Action | None:
        """The action that the label names, if it names one."""
        try:
            return Action.parse(self.label)
        except ScheduleError:
            return None

    @property
    def place(self) -> tuple[int, ...]:
        """(micro-batch,) of the action, or (micro-batch, sequence chunk); empty when the label names none."""
        action = self.action
        if action is None:
            return ()
        return (
            divmod(action.micro_batch, self.sequence_chunks)
            if self.sequence_chunks > 1
            else (action.micro_batch,)
        )

    @property
    def short(self) -> str:
        """``3``, or ``3.1`` for its second chunk; the label when it names no action."""
        return ".".join(map(str, self.place)) or self.label


BESIDE_COMPUTE = (EventKind.TRANSFER, EventKind.WAIT)
"""Kinds that are no work of the rank, and have a track of their own."""

Window = tuple[float, float]
"""(start, end) in seconds from the step's start."""
Phases = Sequence[tuple[EventKind, float]]
"""What a rank does after its last action, one after the other: (kind, seconds)."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What all ranks did in one step."""

    title: str
    ranks: tuple[tuple[TimelineEvent, ...], ...]
    rank_names: tuple[str, ...] = ()
    """Empty: ``rank 0``, ``rank 1``, ..."""
    memory: tuple[Curve, ...] = ()
    """Per rank, what it holds over time; empty: not known."""
    memory_unit: str = "units"
    """What the curves count: ``units`` (micro-batches of a stage, or sequence chunks of them) or ``bytes``."""
    summary: str = ""
    """Text beside the title; empty: the step's time and bubble, of a whole step."""

    def __post_init__(self) -> None:
        if not self.rank_names:
            object.__setattr__(
                self,
                "rank_names",
                tuple(f"rank {rank}" for rank in range(len(self.ranks))),
            )

    @property
    def start_seconds(self) -> float:
        """The step's start, or the first event when a rank's clock runs ahead."""
        return min(
            (0.0, *(event.start_seconds for events in self.ranks for event in events))
        )

    @property
    def end_seconds(self) -> float:
        """End of the last event."""
        return max(
            (event.end_seconds for events in self.ranks for event in events),
            default=0.0,
        )

    def between(self, window: Window) -> Timeline:
        """The part within a window of time, clipped; times still count from the step's start."""
        ranks = tuple(tuple(_clipped(events, window)) for events in self.ranks)
        memory = tuple(_clipped_curve(curve, window) for curve in self.memory)
        return replace(self, ranks=ranks, memory=memory)

    def shifted(self, seconds: float) -> Timeline:
        """The timeline with all times later by some seconds."""
        ranks = tuple(
            tuple(_moved(event, seconds) for event in events) for events in self.ranks
        )
        memory = tuple(
            tuple((start + seconds, held) for start, held in curve)
            for curve in self.memory
        )
        return replace(self, ranks=ranks, memory=memory)

    @property
    def step_seconds(self) -> float:
        """From start to end."""
        return self.end_seconds - self.start_seconds

    @property
    def bubble_fraction(self) -> float:
        """Part of all ranks' time in which they do nothing; transfers and waits do not count as work."""
        if not self.step_seconds:
            return 0.0
        return 1 - sum(map(_busy_seconds, self.ranks)) / (
            len(self.ranks) * self.step_seconds
        )


def from_simulation(
    simulation: Simulation,
    title: str = "predicted",
    after: Sequence[Phases] = (),
    held: HeldBytes | None = None,
    windows: Sequence[Window] | None = None,
) -> Timeline:
    """The timeline of a simulated step.

    Args:
        simulation: the step; its durations must be in seconds.
        title: e.g. ``predicted``.
        after: per pipeline rank, what follows its last action (gradient reduction, optimizer); empty: nothing.
        held: bytes of the memory curves; None: they count units.
        windows: only events that overlap one of them are included, for
            `Timeline.between`; None: all.
    """
    rows = []
    chunks = simulation.schedule.sequence_chunks
    ends = simulation.end_seconds
    for rank, every_event in enumerate(simulation.events):
        events = _overlapping(every_event, windows)
        sent = _overlapping(transfers_of(simulation, rank), windows)
        row = [bar for event in events for bar in _bars(simulation, event)]
        row += _early_recomputes(simulation, events)
        row += map(_transfer, sent)
        row.sort(key=attrgetter("start_seconds", "end_seconds"))
        row += _phases(after[rank] if after else (), ends[rank])
        if chunks > 1:
            row = [replace(bar, sequence_chunks=chunks) for bar in row]
        rows.append(tuple(row))
    unit = "units" if held is None else "bytes"
    return Timeline(
        title, tuple(rows), memory=memory_curves(simulation, held), memory_unit=unit
    )


Timed = TypeVar("Timed", Event, Transfer)


def _overlapping(
    events: Iterable[Timed], windows: Sequence[Window] | None
) -> Sequence[Timed]:
    """The events of which some part is within one of the windows; None: all."""
    if windows is None:
        return tuple(events)
    return [
        event
        for event in events
        if any(
            event.end_seconds > start and event.start_seconds < end
            for start, end in windows
        )
    ]


def _clipped(
    events: Iterable[TimelineEvent], window: Window
) -> Iterator[TimelineEvent]:
    for event in events:
        start = max(event.start_seconds, window[0])
        end = min(event.end_seconds, window[1])
        if end > start:
            yield replace(event, start_seconds=start, end_seconds=end)


def _clipped_curve(curve: Curve, window: Window) -> Curve:
    """The steps of a curve within a window; the first is what is held at its start."""
    start, end = window
    before = [held for seconds, held in curve if seconds <= start]
    inside = tuple(step for step in curve if start < step[0] < end)
    return ((start, before[-1] if before else 0), *inside)


def _moved(event: TimelineEvent, seconds: float) -> TimelineEvent:
    start, end = event.start_seconds + seconds, event.end_seconds + seconds
    return replace(event, start_seconds=start, end_seconds=end)


def from_measured(run: MeasuredRun, title: str = "measured") -> Timeline:
    """The timeline of the recorded step of a run; one row per global rank that recorded.

    Raises:
        DocumentError: the run recorded no actions.
    """
    if not run.actions:
        raise DocumentError(
            "the run recorded no actions.",
            field="actions",
            hint="measure again with `planner run`.",
        )
    by_rank = attrgetter("rank")
    rows = {
        rank: tuple(actions)
        for rank, actions in groupby(sorted(run.actions, key=by_rank), key=by_rank)
    }
    waits = {
        rank: tuple(map(_wait, waited))
        for rank, waited in groupby(sorted(run.waits, key=by_rank), key=by_rank)
    }
    bars = tuple(
        _measured_row(actions, waits.get(rank, ())) for rank, actions in rows.items()
    )
    names = tuple(f"rank {rank}" for rank in rows)
    return Timeline(
        title, bars, names, memory=tuple(curve_of(_unit_changes(row)) for row in bars)
    )


def _measured_row(
    actions: Iterable[MeasuredAction], waits: Iterable[TimelineEvent]
) -> tuple[TimelineEvent, ...]:
    row = [
        TimelineEvent(
            each.action, _kind_of(each.action), each.start_seconds, each.end_seconds
        )
        for each in actions
    ]
    return tuple(sorted((*row, *waits), key=attrgetter("start_seconds", "end_seconds")))


def _wait(waited: MeasuredAction) -> TimelineEvent:
    label = f"{waited.action} waits"
    if waited.action != SENDS:
        action = Action.parse(waited.action)
        label += f" for stage {action.stage + (-1 if action.kind is ActionKind.FORWARD else 1)}"
    return TimelineEvent(
        label, EventKind.WAIT, waited.start_seconds, waited.end_seconds
    )


def _unit_changes(events: Iterable[TimelineEvent]) -> Iterator[tuple[float, float]]:
    """Units are held from the start of F to the end of B or W."""
    for event in events:
        if event.kind is EventKind.FORWARD:
            yield event.start_seconds, 1
        elif event.kind in (EventKind.BACKWARD, EventKind.BACKWARD_WEIGHT):
            yield event.end_seconds, -1


def _kind_of(label: str) -> EventKind:
    action = TimelineEvent(label, EventKind.OTHER, 0, 0).action
    name = action.kind.value if action else label
    return EventKind(name) if name in set(EventKind) else EventKind.OTHER


def _bars(simulation: Simulation, event: Event) -> Iterator[TimelineEvent]:
    """The recomputation inside the action, as far as it takes time, and the action."""
    action, start, end = event.action, event.start_seconds, event.end_seconds
    is_inside = simulation.schedule.recompute_stop is None
    if is_inside and action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        recomputed = start + simulation.durations.recompute_of(
            action.stage, action.micro_batch
        )
        if recomputed > start:
            yield TimelineEvent(str(action), EventKind.RECOMPUTE, start, recomputed)
        start = recomputed
    yield TimelineEvent(str(action), EventKind(action.kind.value), start, end)


def _early_recomputes(
    simulation: Simulation, events: Sequence[Event]
) -> Iterator[TimelineEvent]:
    """Recomputations that run ahead of their backward, right after the action before it."""
    stop = simulation.schedule.recompute_stop or 0
    for before, event in pairwise(events):
        action = event.action
        seconds = simulation.durations.recompute[action.stage]
        if action.kind is ActionKind.BACKWARD and action.micro_batch < stop and seconds:
            start = before.end_seconds
            yield TimelineEvent(
                str(action), EventKind.RECOMPUTE, start, start + seconds
            )


def _transfer(sent: Transfer) -> TimelineEvent:
    label = f"{sent.producer} to stage {sent.target_stage}"
    return TimelineEvent(
        label, EventKind.TRANSFER, sent.start_seconds, sent.end_seconds
    )


def _phases(phases: Phases, start: float) -> Iterator[TimelineEvent]:
    for kind, seconds in phases:
        if seconds > 0:
            yield TimelineEvent(kind.value, kind, start, start + seconds)
        start += seconds


def _busy_seconds(events: Iterable[TimelineEvent]) -> float:
    """Length of the union of all events but transfers and waits: measured ones may overlap."""
    busy, reached = 0.0, float("-inf")
    for event in sorted(events, key=attrgetter("start_seconds")):
        if event.kind not in BESIDE_COMPUTE and event.end_seconds > reached:
            busy += event.end_seconds - max(event.start_seconds, reached)
            reached = event.end_seconds
    return busy
