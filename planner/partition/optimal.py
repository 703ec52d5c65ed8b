"""The smallest possible largest part, and among those the most even parts.

For a single cost per layer the linear partition problem is solved exactly in polynomial time, so no solver is needed:

    bottleneck   the smallest B for which filling parts greedily up to B needs no more than the given parts;
                 B is the sum of some run of layers, found by bisection over exact whole numbers           (1)
    evenness     dynamic program over (part, end): least sum of squared part costs, no part above B        (2)

-> (1) `_bottleneck`, (2) `_most_even`. Greedy filling is optimal for a fixed B, because a part that takes a layer more
never makes the rest need more parts (Pinar and Aykanat 2004, "Fast optimal load balancing algorithms for 1D
partitioning"). When memory, recompute and transfers matter too, `planner.search` solves the joint problem.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from planner.partition.sequence import Partition, check_costs, cut, whole_numbers


def optimal(costs: Sequence[float], parts: int) -> Partition:
    """Cut a sequence of layers so that its largest part is as small as possible.

    Raises:
        LayoutError: no costs, a negative one, or more parts than layers.
    """
    check_costs(costs, parts)
    cumulative = [0, *accumulate(whole_numbers(costs))]
    return cut(costs, _most_even(cumulative, parts, _bottleneck(cumulative, parts)))


def _bottleneck(cumulative: Sequence[int], parts: int) -> int:
    """Bisection over the whole numbers: the least bound that greedy filling can meet."""
    below = (
        max(
            max(end - start for start, end in pairwise(cumulative)),
            -(-cumulative[-1] // parts),
        )
        - 1
    )
    enough = cumulative[-1]
    while enough - below > 1:
        middle = (below + enough) // 2
        if _greedy_parts(cumulative, middle) <= parts:
            enough = middle
        else:
            below = middle
    return enough


def _greedy_parts(cumulative: Sequence[int], bound: int) -> int:
    """Parts needed when each takes as many layers as the bound permits."""
    needed, start = 0, 0
    while start < len(cumulative) - 1:
        start = bisect_right(cumulative, cumulative[start] + bound) - 1
        needed += 1
    return needed


def _most_even(cumulative: Sequence[int], parts: int, bound: int) -> list[int]:
    """Sizes with the least sum of squares among those within the bound; ties go to the later cut."""
    layers = len(cumulative) - 1
    best: list[int | None] = [0] + [None] * layers
    cuts: list[list[int]] = []
    for part in range(1, parts + 1):
        best, cut_before = _extend(
            cumulative, best, bound, first=part, last=layers - (parts - part)
        )
        cuts.append(cut_before)
    end, sizes = layers, []
    for cut_before in reversed(cuts):
        sizes.append(end - cut_before[end])
        end = cut_before[end]
    return sizes[::-1]


def _extend(
    cumulative: Sequence[int],
    best: Sequence[int | None],
    bound: int,
    first: int,
    last: int,
) -> tuple[list[int | None], list[int]]:
    """One part more: least sum of squares up to every end, and where its last part then starts."""
    extended: list[int | None] = [None] * len(best)
    cut_before = [0] * len(best)
    for end in range(first, last + 1):
        for start in range(end - 1, -1, -1):
            cost = cumulative[end] - cumulative[start]
            if cost > bound:
                break
            before = best[start]
            if before is None:
                continue
            known = extended[end]
            if known is None or before + cost * cost < known:
                extended[end], cut_before[end] = before + cost * cost, start
    return extended, cut_before
