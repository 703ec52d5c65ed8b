"""Recompute modes of the layers of one pipeline rank, under its memory.

The choice is exact for one stage per rank and whole sequences: every mixture of modes
that is not dominated in bytes and nanoseconds is kept. With several stages the units
of a stage at the peak weigh its bytes; the caller checks the peak itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from planner.search.engine.prices import Modes

Choice = tuple[int, ...]
"""Index of the chosen mode, per layer of a group."""


@dataclass(frozen=True, slots=True)
class Group:
    """Equal layers of one stage."""

    kind: int
    count: int
    units: float
    """Micro-batches of the stage that the rank holds at its peak."""


@dataclass(frozen=True, slots=True)
class Mixtures:
    """Undominated mixtures of recompute modes for one group of layers."""

    bytes: NDArray[np.float64]
    nanoseconds: NDArray[np.float64]
    choices: tuple[Choice, ...]


def fewest_nanoseconds(
    groups: Sequence[Group], modes: Sequence[Modes], room_bytes: float
) -> list[Choice] | None:
    """Return the modes of every group that take least time within a memory.

    Args:
        groups: layers of the rank.
        modes: of every kind.
        room_bytes: for saved activations and the largest temporary.

    Returns:
        None if no choice fits.
    """
    best: tuple[float, list[Choice]] | None = None
    for largest in _temporaries(groups, modes):
        found = _within(groups, modes, room_bytes - largest, largest)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else best[1]


def _temporaries(groups: Sequence[Group], modes: Sequence[Modes]) -> list[int]:
    """Return the candidate sizes of the largest temporary."""
    sizes = {one.temporary_bytes for each in groups for one in modes[each.kind]}
    least = max(min(one.temporary_bytes for one in modes[each.kind]) for each in groups)
    return sorted(size for size in sizes if size >= least)


def _within(
    groups: Sequence[Group], modes: Sequence[Modes], room: float, largest: int
) -> tuple[float, list[Choice]] | None:
    """Return time and modes of the best choice with temporaries up to a size."""
    if room < 0:
        return None
    bytes_ = np.zeros(1)
    spent = np.zeros(1)
    steps: list[tuple[Mixtures, NDArray[np.intp], NDArray[np.intp]]] = []
    for group in groups:
        options = mixtures(modes[group.kind], group.count, group.units, largest)
        both = bytes_[:, None] + options.bytes
        times = spent[:, None] + options.nanoseconds
        kept = _undominated(both.ravel(), times.ravel(), room)
        if not len(kept):
            return None
        before, chosen = np.divmod(kept, len(options.choices))
        steps.append((options, before, chosen))
        bytes_, spent = both.ravel()[kept], times.ravel()[kept]
    place = int(spent.argmin())
    total = float(spent[place])
    found: list[Choice] = []
    for options, before, chosen in reversed(steps):
        found.append(options.choices[int(chosen[place])])
        place = int(before[place])
    return total, found[::-1]


def _undominated(
    bytes_: NDArray[np.float64], times: NDArray[np.float64], room: float
) -> NDArray[np.intp]:
    """Return places of mixtures that fit and that no other one dominates."""
    order = np.lexsort((times, bytes_))
    order = order[bytes_[order] <= room]
    if not len(order):
        return order
    sorted_times = times[order]
    least = np.minimum.accumulate(sorted_times)
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = sorted_times[1:] < least[:-1]
    return order[is_new]


@lru_cache(maxsize=1 << 14)
def mixtures(modes: Modes, count: int, units: float, largest: int) -> Mixtures:
    """Return the mixtures of modes of equal layers that no other one dominates.

    Args:
        modes: of one layer.
        count: of layers.
        units: micro-batches held of each.
        largest: bytes of a temporary that a mode may have.
    """
    places = [
        place for place, one in enumerate(modes) if one.temporary_bytes <= largest
    ]
    choices = list(combinations_with_replacement(places, count))
    bytes_ = np.zeros(len(choices))
    spent = np.zeros(len(choices))
    for index, choice in enumerate(choices):
        counted = Counter(choice)
        for place, times in counted.items():
            bytes_[index] += times * units * modes[place].activation_bytes
            spent[index] += times * modes[place].backward_ticks
    kept = _undominated(bytes_, spent, np.inf)
    return Mixtures(bytes_[kept], spent[kept], tuple(choices[i] for i in kept))
