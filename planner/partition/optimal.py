"""The smallest possible bottleneck, and among those the most even parts.

With t_i the seconds of layer i and c_b those of boundary b for one micro-batch, activations and gradients together
(c_b = 0 where nothing is sent, c_0 = c_n = 0), part k has the layers i .. j - 1 between two cuts i < j, and

    overlapped   bottleneck = max over parts and cuts of    t_i + ... + t_(j-1)    and    c_j                    (1)
    exposed      bottleneck = max over parts of             t_i + ... + t_(j-1) + (c_i + c_j) / 2               (2)

Sources: (1) is the straight pipeline (no replicated stage) of Narayanan et al. 2019, "PipeDream: Generalized Pipeline
Parallelism for DNN Training", section 3.1: A(j, m) = min over i of max(A(i, m - 1), 2 a_i / B, T(i + 1 -> j)). Compute and
transfers overlap, so the slowest of them sets the pace. (2) is the load of a device without that overlap (Tarnawski et
al. 2020, "Efficient Algorithms for Device Placement of DNN Graph Operators"; a sender waits, so either side pays for what
it sends: activations onwards, gradients back). (2) also bounds 1F1B with overlapped transfers, whose stages wait for each
other's results: m micro-batches end within sum of t + sum of c + (m - 1) (2), and in the steady state one takes at least
half of (1). Neither is the better choice for every model; (1) is the default because it is PipeDream's.

Both are dynamic programs over (parts, end of the last part), exact on whole numbers:

    bottleneck   A(j, k) = min over i of max(A(i, k - 1), part i .. j)                                          (3)
    evenness     the same with least sums of squares, no part or cut above A(n, parts)                          (4)

(3) is optimal because the cost of a part depends on its own two cuts only, and max never falls: whatever follows cut i,
a prefix of smaller bottleneck is no worse. When memory, recompute and replicas matter too, `planner.search` solves the
joint problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.partition.sequence import Partition, check, cut, whole_numbers


def optimal(
    costs: Sequence[float],
    parts: int,
    transfers: Sequence[float] = (),
    *,
    exposed: bool = False,
) -> Partition:
    """Cut a sequence of layers so that its bottleneck is as small as possible: equation (1), or (2) if `exposed`.

    Args:
        costs: of every layer.
        parts: number of parts.
        transfers: of every boundary between two layers, in the unit of the costs; empty: none takes time.
        exposed: transfers do not overlap with compute.

    Raises:
        LayoutError: no costs, a negative one, more parts than layers, or another number of transfers than boundaries.
    """
    check(costs, parts, transfers)
    loads = _Loads.of(costs, transfers, exposed=exposed)
    sizes = _most_even(loads, parts, _bottleneck(loads, parts))
    return cut(costs, sizes, transfers, exposed=exposed)


@dataclass(frozen=True, slots=True)
class _Loads:
    """A part from cut i to cut j lasts ``ends[j] - starts[i]``, and its last cut ``links[j]``, in whole numbers."""

    starts: list[int]
    ends: list[int]
    links: list[int]
    latest: list[int]
    """Largest of `starts` up to each cut: every part from there or before lasts at least ``ends[j] - latest[i]``."""

    @classmethod
    def of(
        cls, costs: Sequence[float], transfers: Sequence[float], *, exposed: bool
    ) -> _Loads:
        """Bring costs and transfers to one denominator."""
        layers = len(costs)
        exact = whole_numbers([*costs, *transfers])
        cumulative = [0, *accumulate(exact[:layers])]
        sent = [0, *(exact[layers:] or [0] * (layers - 1)), 0]
        if not exposed:
            return cls(cumulative, cumulative, sent, cumulative)
        # Twice the load of (2), so that halves stay whole.
        both = list(zip(cumulative, sent, strict=True))
        starts = [2 * before - seconds for before, seconds in both]
        ends = [2 * before + seconds for before, seconds in both]
        return cls(starts, ends, [0] * len(sent), list(accumulate(starts, max)))


def _bottleneck(loads: _Loads, parts: int) -> int:
    """Return the least bottleneck of all partitions: equation (3)."""
    layers = len(loads.starts) - 1
    best: list[float] = [0] + [math.inf] * layers
    for part in range(1, parts + 1):
        extended: list[float] = [math.inf] * (layers + 1)
        for end in range(part, layers - (parts - part) + 1):
            extended[end] = _least_up_to(loads, best, end)
        best = extended
    return int(best[-1])


def _least_up_to(loads: _Loads, best: Sequence[float], end: int) -> float:
    """Return the least bottleneck of one more part that ends at a cut."""
    least = math.inf
    for start in range(end - 1, -1, -1):
        if loads.ends[end] - loads.latest[start] >= least:
            break
        load = loads.ends[end] - loads.starts[start]
        least = min(least, max(best[start], load, loads.links[end]))
    return least


def _most_even(loads: _Loads, parts: int, bound: int) -> list[int]:
    """Return the sizes of equation (4); ties go to the later cut."""
    layers = len(loads.starts) - 1
    best: list[int | None] = [0] + [None] * layers
    cuts: list[list[int]] = []
    for part in range(1, parts + 1):
        best, cut_before = _extend(
            loads, best, bound, first=part, last=layers - (parts - part)
        )
        cuts.append(cut_before)
    end, sizes = layers, []
    for cut_before in reversed(cuts):
        sizes.append(end - cut_before[end])
        end = cut_before[end]
    return sizes[::-1]


def _extend(
    loads: _Loads, best: Sequence[int | None], bound: int, first: int, last: int
) -> tuple[list[int | None], list[int]]:
    """Return the least sum of squares with one more part up to every end, and where that part then starts."""
    extended: list[int | None] = [None] * len(best)
    cut_before = [0] * len(best)
    for end in range(first, last + 1):
        link = loads.links[end]
        if link > bound:
            continue
        for start in range(end - 1, -1, -1):
            if loads.ends[end] - loads.latest[start] > bound:
                break
            before = best[start]
            load = loads.ends[end] - loads.starts[start]
            if before is None or load > bound:
                continue
            squares = before + load * load + link * link
            known = extended[end]
            if known is None or squares < known:
                extended[end], cut_before[end] = squares, start
    return extended, cut_before
