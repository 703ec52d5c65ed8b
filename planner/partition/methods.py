"""All partition methods by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.errors import LayoutError, UnknownNameError
from planner.partition.block import block
from planner.partition.histogram import histogram
from planner.partition.optimal import optimal
from planner.partition.sequence import Partition

METHODS: dict[str, Callable[[Sequence[float], int], Partition]] = {
    "histogram": histogram,
    "block": block,
    "optimal": optimal,
}


def partition(
    costs: Sequence[float],
    parts: int,
    method: str = "optimal",
    transfers: Sequence[float] = (),
    *,
    exposed: bool = False,
) -> Partition:
    """Cut a sequence of layers into contiguous, non-empty parts.

    Args:
        costs: of each layer, in any unit.
        parts: number of parts.
        method: ``histogram``, ``block`` or ``optimal``.
        transfers: of each boundary between two layers, activations and gradients together, in the unit of the costs;
            for ``optimal``. Empty: none takes time.
        exposed: transfers add to the compute of the parts instead of overlapping with it.

    Raises:
        UnknownNameError: no method has this name.
        LayoutError: no costs, a negative one, more parts than layers, another number of transfers than boundaries, or
            transfers for a method that ignores them.
    """
    name = method.lower()
    chosen = METHODS.get(name)
    if chosen is None:
        raise UnknownNameError(
            f"no method {method!r}.",
            field="method",
            hint=f"use one of {', '.join(METHODS)}.",
        )
    if chosen is optimal:
        return optimal(costs, parts, transfers, exposed=exposed)
    if transfers:
        raise LayoutError(
            f"method {name} ignores transfers.",
            field="transfers",
            hint="use method optimal.",
        )
    return chosen(costs, parts)
