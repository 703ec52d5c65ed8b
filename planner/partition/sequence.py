"""What every partition method takes and gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from planner.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Partition:
    """A sequence of layers cut into contiguous, non-empty parts."""

    sizes: tuple[int, ...]
    """Layers of each part, in order."""
    costs: tuple[float, ...]
    """Cost of each part, in the unit of the layers' costs."""

    @property
    def bottleneck(self) -> float:
        """Cost of the largest part: a pipeline is as slow as its slowest stage."""
        return max(self.costs)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Index of the first layer of each part, and the number of layers at the end."""
        return (0, *accumulate(self.sizes))

    @property
    def parts(self) -> tuple[range, ...]:
        """Indices of the layers of each part."""
        return tuple(map(range, self.boundaries, self.boundaries[1:]))


def cut(costs: Sequence[float], sizes: Sequence[int]) -> Partition:
    """The partition with parts of these sizes."""
    ends = list(accumulate(sizes))
    return Partition(
        tuple(sizes),
        tuple(
            _total(costs[end - size : end])
            for end, size in zip(ends, sizes, strict=True)
        ),
    )


def _total(costs: Sequence[float]) -> float:
    return (
        sum(costs) if all(isinstance(cost, int) for cost in costs) else math.fsum(costs)
    )


def check_costs(costs: Sequence[float], parts: int) -> None:
    """Raise `LayoutError` for costs or parts that no method can take."""
    if not costs:
        raise LayoutError(
            "there are no costs.",
            field="costs",
            hint="give the cost of every layer, e.g. 10,40,30.",
        )
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise LayoutError(
                f"a cost must be finite and not negative, got {cost}.",
                field=f"costs[{index}]",
                hint="give 0 or more.",
            )
    if parts < 1:
        raise LayoutError(
            f"there must be at least 1 part, got {parts}.",
            field="parts",
            hint="give 1 or more.",
        )
    if parts > len(costs):
        raise LayoutError(
            f"{len(costs)} layers cannot make {parts} parts: every part needs a layer.",
            field="parts",
            hint=f"use at most {len(costs)} parts, or cut the model into more layers.",
        )


def whole_numbers(costs: Sequence[float]) -> list[int]:
    """The costs times their common denominator.

    Every float is a whole number over a power of two, so nothing is rounded, and sums compare exactly.
    """
    exact = [Fraction(cost) for cost in costs]
    denominator = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * denominator) for cost in exact]
