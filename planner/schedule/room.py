"""What ranks have room for: units of their stages, each of its size, from the start of F to the end of B or W."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from planner.errors import LayoutError
from planner.schedule.actions import Schedule
from planner.schedule.in_flight import crests


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that an order has to keep to, in any unit: bytes, or units of stages.

    Raises:
        LayoutError: a size that is negative.
    """

    sizes: tuple[int, ...]
    """Per stage: of one unit (micro-batch, or sequence chunk of it)."""
    capacities: tuple[int, ...]
    """Per rank: all units that it holds together are no larger."""

    def __post_init__(self) -> None:
        for stage, size in enumerate(self.sizes):
            if size < 0:
                raise LayoutError(
                    f"a size is not negative, got {size}.",
                    field=f"sizes[{stage}]",
                    hint="give 0 or more.",
                )

    @classmethod
    def of_units(cls, shape: Schedule, limit: int | None) -> Self:
        """Every rank may hold so many units; None: any number."""
        most = shape.units * shape.virtual_stages if limit is None else limit
        return cls((1,) * shape.stages, (most,) * shape.ranks)

    def holds(self, schedule: Schedule) -> bool:
        """No rank ever holds more than it has room for."""
        return all(
            self._largest(schedule, rank) <= most
            for rank, most in enumerate(self.capacities)
        )

    def _largest(self, schedule: Schedule, rank: int) -> int:
        sizes = [self.sizes[stage] for stage in schedule.stages_of(rank)]
        return max(
            sum(count * size for count, size in zip(held, sizes, strict=True))
            for held in crests(schedule, rank)
        )

    def most_units(self, shape: Schedule, rank: int) -> int:
        """Units of every one of its stages for which a rank has room at once; with one stage: all that it may hold."""
        size, room = (
            sum(self.sizes[stage] for stage in shape.stages_of(rank)),
            self.capacities[rank],
        )
        if size == 0:
            return shape.units if room >= 0 else 0
        return max(0, min(shape.units, room // size))

    def is_enough(self, shape: Schedule) -> bool:
        """Is there an order at all? When its first backward runs, a rank holds a whole micro-batch of all its stages;
        and micro-batches that run one by one need no more."""
        return all(
            self.most_units(shape, rank) >= shape.sequence_chunks
            for rank in range(shape.ranks)
        )
