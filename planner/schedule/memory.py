"""What every rank holds over time: activations from F until their backward, in bytes or in units.

    from F's start              the unit's activations; where the unit is recomputed, only its input     (1)
    from its recomputation on   the activations after all                                                (2)
    at I's end                  what W does not need is released                                         (3)
    at B's or W's end           the rest                                                                 (4)

Source of the two parts: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", M_B and M_W.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter

from planner.errors import LayoutError
from planner.schedule.actions import Action, ActionKind, Schedule
from planner.schedule.simulate import Event, Simulation

Curve = tuple[tuple[float, float], ...]
"""(seconds, held from then on), in order of time."""


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes that one unit (micro-batch, or sequence chunk of it) of each stage holds. Any unit will do.

    Raises:
        LayoutError: lengths that differ, or a part that is larger than the whole.
    """

    activation: tuple[float, ...]
    """Per stage: between forward and backward."""
    weight: tuple[float, ...] = ()
    """Per stage: the part that W still needs after I; empty: all of it."""
    recomputed: tuple[float, ...] = ()
    """Per stage: what a unit that is recomputed holds until then (its input); empty: nothing is recomputed."""

    def __post_init__(self) -> None:
        for name in ("weight", "recomputed"):
            values: tuple[float, ...] = getattr(self, name)
            if values and len(values) != len(self.activation):
                raise LayoutError(
                    f"{len(values)} values for {len(self.activation)} stages.",
                    field=name,
                    hint=f"give {len(self.activation)} values, or none.",
                )
            if any(
                part > whole
                for part, whole in zip(values, self.activation, strict=bool(values))
            ):
                raise LayoutError(
                    "a part is larger than the stage's activations.",
                    field=name,
                    hint="give no more than activation.",
                )


def units_held(schedule: Schedule) -> HeldBytes:
    """Every unit counts 1 until B or W."""
    return HeldBytes((1,) * schedule.stages)


def memory_curves(
    simulation: Simulation, held: HeldBytes | None = None
) -> tuple[Curve, ...]:
    """Per rank: what it holds over time; None counts units (the curve's top is then `Simulation.peak_in_flight`).

    Raises:
        LayoutError: bytes for another number of stages.
    """
    held = held or units_held(simulation.schedule)
    if len(held.activation) != simulation.schedule.stages:
        raise LayoutError(
            f"bytes of {len(held.activation)} stages for a schedule of {simulation.schedule.stages}.",
            field="activation",
            hint=f"give {simulation.schedule.stages} values, one per stage.",
        )
    return tuple(_curve(simulation, held, events) for events in simulation.events)


def peak_bytes(simulation: Simulation, held: HeldBytes) -> tuple[float, ...]:
    """Per rank: most bytes held at once."""
    return tuple(
        max((each for _, each in curve), default=0)
        for curve in memory_curves(simulation, held)
    )


def _curve(simulation: Simulation, held: HeldBytes, events: Sequence[Event]) -> Curve:
    return curve_of(
        change
        for place, event in enumerate(events)
        for change in _changes(
            simulation, held, event, events[place - 1].end_seconds if place else 0
        )
    )


def curve_of(changes: Iterable[tuple[float, float]]) -> Curve:
    """The curve of (seconds, how much more is held), given in any order; what changes at one moment counts together."""
    moments = groupby(
        sorted(change for change in changes if change[1]), key=itemgetter(0)
    )
    steps = [
        (seconds, sum(change for _, change in group)) for seconds, group in moments
    ]
    totals = accumulate(change for _, change in steps)
    return tuple(
        (seconds, total) for (seconds, _), total in zip(steps, totals, strict=True)
    )


def _changes(
    simulation: Simulation, held: HeldBytes, event: Event, free: float
) -> Iterator[tuple[float, float]]:
    """(seconds, bytes more) of one action; `free` is when its rank could start on it."""
    stage, kind = event.action.stage, event.action.kind
    whole = held.activation[stage]
    after_input = held.weight[stage] if held.weight else whole
    stored = _stored(simulation.schedule, held, event.action)
    if kind is ActionKind.FORWARD:
        yield event.start_seconds, stored
    elif kind is ActionKind.BACKWARD_WEIGHT:
        yield event.end_seconds, -after_input
    else:
        recomputes_early = simulation.schedule.recompute_stop is not None
        yield (free if recomputes_early else event.start_seconds), whole - stored
        yield (
            event.end_seconds,
            after_input - whole if kind is ActionKind.BACKWARD_INPUT else -whole,
        )


def _stored(schedule: Schedule, held: HeldBytes, action: Action) -> float:
    """What the unit holds between its forward and its recomputation, if it has one."""
    stop = schedule.recompute_stop
    if held.recomputed and (stop is None or action.micro_batch < stop):
        return held.recomputed[action.stage]
    return held.activation[action.stage]
