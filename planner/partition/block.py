"""Even out neighbouring parts until the largest and the smallest differ by no more than one layer's cost.

Source: Bárány and Grinberg 2013, "Block partitions of sequences" (arXiv 1308.2452), the theorem and the algorithm of
its proof; torchgpipe balances with the same method. Costs are not reordered. The guarantee

    largest part <= smallest part + largest layer                                                       (1)

holds for every sequence; it does not say that the largest part is as small as it could be (see `optimal`).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.partition.sequence import Partition, check, cut, whole_numbers


def block(costs: Sequence[float], parts: int) -> Partition:
    """Cut a sequence of layers so that (1) holds.

    Raises:
        LayoutError: no costs, a negative one, or more parts than layers.
    """
    check(costs, parts)
    exact = whole_numbers(costs)
    ends = [len(costs) * (part + 1) // parts for part in range(parts)]
    while _level_out(exact, ends):
        pass
    starts = [0, *ends[:-1]]
    return cut(costs, [end - start for start, end in zip(starts, ends, strict=True)])


def _level_out(costs: Sequence[int], ends: list[int]) -> bool:
    """Hand layers from the largest part towards a smallest one, until it has given one itself; False when (1) holds.

    The gap to a smallest part travels: each receives a layer from its neighbour on the side of the largest part, which
    then is smaller in turn. Costs are whole numbers, so that the proof's argument (the sorted sums shrink) holds.
    """
    sums = _sums(costs, ends)
    largest = max(range(len(sums)), key=sums.__getitem__)
    while sums[largest] > min(sums) + max(costs):
        smallest = _smallest_near(sums, largest)
        giver = smallest - 1 if smallest > largest else smallest + 1
        if giver < smallest:
            ends[giver] -= 1
        else:
            ends[smallest] += 1
        if giver == largest:
            return True
        sums = _sums(costs, ends)
    return False


def _smallest_near(sums: Sequence[int], largest: int) -> int:
    """The smallest part, on a tie the one nearest to the largest: so a part that gave its only layer is the next."""
    return min(range(len(sums)), key=lambda part: (sums[part], abs(part - largest)))


def _sums(costs: Sequence[int], ends: Sequence[int]) -> list[int]:
    return [
        sum(costs[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
