"""What every partition method takes and gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from planner.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Partition:
    """A sequence of layers cut into contiguous, non-empty parts."""

    sizes: tuple[int, ...]
    """Layers of each part, in order."""
    costs: tuple[float, ...]
    """Cost of each part, in the unit of the layers' costs."""
    transfers: tuple[float, ...] = ()
    """Transfer of each cut between two parts, in the same unit; empty: none takes time."""
    exposed: bool = False
    """Transfers do not overlap with compute."""

    @property
    def loads(self) -> tuple[float, ...]:
        """Time that each part is busy: its cost, and half of the transfers of both its cuts if they are exposed."""
        if not self.exposed:
            return self.costs
        sent = (0, *self.transfers, 0)
        sides = pairwise(sent)
        return tuple(
            cost + (before + after) / 2
            for cost, (before, after) in zip(self.costs, sides, strict=True)
        )

    @property
    def bottleneck(self) -> float:
        """Largest load, or overlapped transfer: a pipeline is as slow as its slowest stage or link."""
        if self.exposed:
            return max(self.loads)
        return max((*self.costs, *self.transfers))

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Index of the first layer of each part, and the number of layers at the end."""
        return (0, *accumulate(self.sizes))

    @property
    def parts(self) -> tuple[range, ...]:
        """Indices of the layers of each part."""
        return tuple(map(range, self.boundaries, self.boundaries[1:]))


def cut(
    costs: Sequence[float],
    sizes: Sequence[int],
    transfers: Sequence[float] = (),
    *,
    exposed: bool = False,
) -> Partition:
    """The partition with parts of these sizes.

    Args:
        costs: of every layer.
        sizes: layers of every part.
        transfers: of every boundary between two layers; empty: none takes time.
        exposed: transfers do not overlap with compute.
    """
    ends = list(accumulate(sizes))
    crossed = [transfers[end - 1] for end in ends[:-1]] if transfers else []
    return Partition(
        tuple(sizes),
        tuple(
            _total(costs[end - size : end])
            for end, size in zip(ends, sizes, strict=True)
        ),
        tuple(crossed),
        exposed,
    )


def _total(costs: Sequence[float]) -> float:
    return (
        sum(costs) if all(isinstance(cost, int) for cost in costs) else math.fsum(costs)
    )


def check(costs: Sequence[float], parts: int, transfers: Sequence[float] = ()) -> None:
    """Raise `LayoutError` for costs, parts or transfers that no method can take."""
    if not costs:
        raise LayoutError(
            "there are no costs.",
            field="costs",
            hint="give the cost of every layer, e.g. 10,40,30.",
        )
    _check_values("cost", costs)
    _check_values("transfer", transfers)
    if transfers and len(transfers) != len(costs) - 1:
        raise LayoutError(
            f"{len(costs)} layers have {len(costs) - 1} boundaries, got {len(transfers)} transfers.",
            field="transfers",
            hint="give one value per boundary between two layers.",
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


def _check_values(what: str, values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise LayoutError(
                f"a {what} must be finite and not negative, got {value}.",
                field=f"{what}s[{index}]",
                hint="give 0 or more.",
            )


def whole_numbers(costs: Sequence[float]) -> list[int]:
    """The costs times their common denominator.

    Every float is a whole number over a power of two, so nothing is rounded, and sums compare exactly.
    """
    exact = [Fraction(cost) for cost in costs]
    denominator = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * denominator) for cost in exact]
