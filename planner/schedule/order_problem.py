"""What an order is to be best at, and what it has to keep to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from planner.errors import LayoutError
from planner.schedule.actions import ActionKind, Schedule
from planner.schedule.candidates import candidates, is_canonical
from planner.schedule.durations import Durations
from planner.schedule.graph import check_stages
from planner.schedule.order_bound import SPLIT, WHOLE, Lengths, OrderBound
from planner.schedule.room import Room
from planner.schedule.simulate import Simulation, simulate


class Objective(StrEnum):
    """What an order is best at."""

    MAKESPAN = "makespan"
    """A step that starts and ends with a barrier."""
    SPAN = "span"
    """Steps that follow each other without one (`Simulation.span`)."""

    def of(self, simulation: Simulation, tails: tuple[float, ...] = ()) -> float:
        """The time that is to be least: of the rank that ends last, its tail included.

        Args:
            simulation: of an order.
            tails: per rank, time after its last action (gradient reduction, optimizer); empty: none.
        """
        ends = simulation.end_seconds
        starts = (
            (0.0,) * len(ends)
            if self is Objective.MAKESPAN
            else simulation.begin_seconds
        )
        return max(
            end + tail - start
            for end, tail, start in zip(
                ends, tails or (0,) * len(ends), starts, strict=True
            )
        )


@dataclass(frozen=True, slots=True)
class OrderProblem:
    """Stages whose best order is asked for.

    Raises:
        LayoutError: durations, tails or room of other stages, or actions that overlap in pairs.
    """

    shape: Schedule
    """Stages, ranks and units; its actions do not matter."""
    durations: Durations
    room: Room
    tails: tuple[float, ...] = ()
    """Per rank, time after its last action; empty: none."""
    is_split: bool = True
    """Backwards are I and W; else B, as recomputation asks for."""
    objective: Objective = Objective.MAKESPAN

    def __post_init__(self) -> None:
        check_stages(self.shape, self.durations)
        for field, given, wanted in (
            ("sizes", len(self.room.sizes), self.shape.stages),
            ("capacities", len(self.room.capacities), self.shape.ranks),
            ("tails", len(self.tails) or self.shape.ranks, self.shape.ranks),
        ):
            if given != wanted:
                raise LayoutError(
                    f"{field} has {given} values, not {wanted}.",
                    field=field,
                    hint=f"give {wanted}.",
                )
        if any(self.durations.overlap):
            raise LayoutError(
                "an order pairs no actions, so nothing overlaps.",
                field="overlap",
                hint="leave it out.",
            )

    @property
    def kinds(self) -> tuple[ActionKind, ...]:
        """What every unit of every stage runs."""
        return SPLIT if self.is_split else WHOLE

    @property
    def actions(self) -> int:
        """Number of actions of an order."""
        return len(self.kinds) * self.shape.stages * self.shape.units

    def of(self, simulation: Simulation) -> float:
        """What is to be least, of an order."""
        return self.objective.of(simulation, self.tails)

    def bound(self) -> float:
        """No order takes less: equations (P1) to (P3) of `planner.schedule.order_bound`."""
        lengths = Lengths.of(self.shape, self.durations, self.kinds)
        return OrderBound(
            lengths, self.room, self.tails, self.objective is Objective.MAKESPAN
        ).value()

    def known(self) -> list[Simulation]:
        """Orders that need no search, the best first, those of the catalogue before others; empty: none fits."""
        found = [
            simulate(each, self.durations)
            for each in candidates(self.shape, self.room, is_split=self.is_split)
        ]
        return sorted(
            found, key=lambda each: (self.of(each), not is_canonical(each.schedule))
        )
