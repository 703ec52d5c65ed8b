"""Cut where the cumulative cost passes equal shares of the total.

Source: GPipe (Huang et al. 2019) as implemented in Lingvo's ``PartitionSequentialLayers``: layer i goes to part

    floor(parts * (c_0 + ... + c_i) / total), at most the last part                                     (1)

It looks at every layer once, and it shows: a layer that ends exactly on a share goes to the part after it, so even
equal layers do not split evenly. Lingvo may leave parts empty; a stage needs a layer, so a part that (1) would skip
takes the next layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from planner.partition.sequence import Partition, check, cut, whole_numbers


def histogram(costs: Sequence[float], parts: int) -> Partition:
    """Cut a sequence of layers by its cumulative cost.

    Raises:
        LayoutError: no costs, a negative one, or more parts than layers.
    """
    check(costs, parts)
    exact = whole_numbers(costs)
    # When nothing costs anything, every layer counts alike.
    cumulative = list(accumulate(exact if any(exact) else [1] * len(exact)))
    sizes = [0] * parts
    part = 0
    for layer, cost in enumerate(cumulative):
        share = parts * cost // cumulative[-1]
        part = _nearest_allowed(share, part, sizes, left=len(costs) - layer)
        sizes[part] += 1
    return cut(costs, sizes)


def _nearest_allowed(share: int, part: int, sizes: Sequence[int], left: int) -> int:
    """The part nearest to (1) that skips no part and leaves a layer for every later one."""
    furthest = part + 1 if sizes[part] else part
    return max(part, len(sizes) - left, min(share, furthest, len(sizes) - 1))
