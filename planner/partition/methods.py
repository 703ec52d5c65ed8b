"""All partition methods by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.errors import UnknownNameError
from planner.partition.block import block
from planner.partition.histogram import histogram
from planner.partition.optimal import optimal
from planner.partition.sequence import Partition

METHODS: dict[str, Callable[[Sequence[float], int], Partition]] = {
    "histogram": histogram,
    "block": block,
    "optimal": optimal,
}


def partition(costs: Sequence[float], parts: int, method: str = "optimal") -> Partition:
    """Cut a sequence of layers into contiguous, non-empty parts.

    Args:
        costs: of each layer, in any unit.
        parts: number of parts.
        method: ``histogram``, ``block`` or ``optimal``.

    Raises:
        UnknownNameError: no method has this name.
        LayoutError: no costs, a negative one, or more parts than layers.
    """
    chosen = METHODS.get(method.lower())
    if chosen is None:
        raise UnknownNameError(
            f"no method {method!r}.",
            field="method",
            hint=f"use one of {', '.join(METHODS)}.",
        )
    return chosen(costs, parts)
