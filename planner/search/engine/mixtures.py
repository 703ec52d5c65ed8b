"""Mixtures of recompute modes: as little recomputation as the memory of a rank requires.

The choice is exact for one stage per rank and whole sequences: a mixture of modes is
left out only if another one dominates it in bytes and nanoseconds, or if it cannot be
part of the best. With several stages the units of a stage at the peak weigh its bytes;
the caller checks the peak itself.

    (R1)  relaxed  layers may be in several modes at once: then the fewest nanoseconds
                   within a memory follow the lower hull of (bytes, nanoseconds) of each
                   layer's modes, steps of most bytes per nanosecond first
    (R2)  rounded  one layer at most is in two modes; in the one that saves fewer
                   bytes, the mixture fits and takes at most one more step
    (R3)  cut      modes of some layers are left out if with (R1) for all others they
                   take longer than (R1) of all layers and the longest step of (R2)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.search.engine.hull import lower_hull
from planner.search.engine.prices import Modes

Choice = tuple[int, ...]
"""Index of the chosen mode, per layer of a group."""
Hull = tuple[tuple[float, float], ...]
"""(Bytes, nanoseconds) of one layer, from the shortest time to fewest bytes."""
PART = 12
"""Layers whose mixtures are listed at once."""
ROUNDING = 1e-9
"""Relative error of sums."""


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
    counts: NDArray[np.intp]
    """Layers in every mode, [mixture, mode]."""

    def choice(self, place: int) -> Choice:
        """Return the modes of a mixture, those of least recomputation first."""
        modes = np.arange(self.counts.shape[1])
        return tuple(np.repeat(modes, self.counts[place]).tolist())


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Fewest nanoseconds of some layers by their bytes: equation (R1)."""

    bytes: NDArray[np.float64]
    """Ascending."""
    nanoseconds: NDArray[np.float64]
    longest_step: float
    """Nanoseconds between two neighbouring modes of one layer."""

    @classmethod
    @lru_cache(maxsize=1 << 14)
    def of(cls, hulls: tuple[tuple[Hull, int], ...]) -> Relaxed:
        """Return the curve of layers.

        Args:
            hulls: of the modes of a layer, and the number of such layers.
        """
        least = sum(count * hull[-1][0] for hull, count in hulls)
        most = sum(count * hull[-1][1] for hull, count in hulls)
        steps: list[tuple[float, float, int]] = []
        for hull, count in hulls:
            for (large, short), (small, long) in pairwise(hull):
                steps.append((large - small, long - short, count))
        steps.sort(key=lambda step: step[1] / step[0], reverse=True)
        sizes = [least, *(count * more for more, _, count in steps)]
        times = [most, *(-count * less for _, less, count in steps)]
        longest = max((less for _, less, _ in steps), default=0.0)
        return cls(np.cumsum(sizes), np.cumsum(times), longest)

    def within(self, free: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the fewest nanoseconds within a memory; infinite if nothing fits."""
        found = np.interp(free, self.bytes, self.nanoseconds)
        # Sums of bytes in another order differ in their last digit.
        return np.where(free < self.bytes[0] * (1 - ROUNDING) - 1, np.inf, found)


def fewest_nanoseconds(
    groups: Sequence[Group], modes: Sequence[Modes], free_bytes: float
) -> list[Choice] | None:
    """Return the modes of every group that take least time within a memory.

    Args:
        groups: layers of the rank.
        modes: of every kind.
        free_bytes: for saved activations and the largest temporary.

    Returns:
        None if no choice fits.
    """
    parts = [part for group in groups for part in _parts(group)]
    spent = np.inf
    best: list[Choice] = []
    for largest in _temporaries(groups, modes):
        found = _within(parts, modes, free_bytes - largest, largest, spent)
        if found is not None:
            spent, best = found
    if spent == np.inf:
        return None
    chosen = iter(best)
    return [_joined(chosen, group) for group in groups]


def _parts(group: Group) -> list[Group]:
    """Return the layers of a group in groups of at most `PART` layers."""
    whole, rest = divmod(group.count, PART)
    counts = [PART] * whole + [rest] * bool(rest)
    return [replace(group, count=count) for count in counts]


def _joined(chosen: Iterator[Choice], group: Group) -> Choice:
    """Return the modes of a group from those of its parts, least recomputation first."""
    parts = [next(chosen) for _ in _parts(group)]
    return tuple(sorted(mode for part in parts for mode in part))


def _temporaries(groups: Sequence[Group], modes: Sequence[Modes]) -> list[int]:
    """Return the candidate sizes of the largest temporary."""
    sizes = {one.temporary_bytes for each in groups for one in modes[each.kind]}
    least = max(min(one.temporary_bytes for one in modes[each.kind]) for each in groups)
    return sorted(size for size in sizes if size >= least)


def _within(
    groups: Sequence[Group],
    modes: Sequence[Modes],
    free: float,
    largest: int,
    known: float,
) -> tuple[float, list[Choice]] | None:
    """Return time and modes of the best choice with temporaries up to a size.

    Args:
        groups: layers of the rank.
        modes: of every kind.
        free: bytes for saved activations.
        largest: bytes of a temporary that a mode may have.
        known: time of another choice.

    Returns:
        None if no choice fits that takes less time than `known`.
    """
    if free < 0:
        return None
    hulls = tuple(
        (_hull(modes[one.kind], one.units, largest), one.count) for one in groups
    )
    relaxed = Relaxed.of(hulls)
    least = float(relaxed.within(np.array(free)))
    if least * (1 - ROUNDING) >= known:
        return None
    limit = (least + relaxed.longest_step) * (1 + ROUNDING)
    bytes_ = np.zeros(1)
    spent = np.zeros(1)
    steps: list[tuple[Mixtures, NDArray[np.intp], NDArray[np.intp]]] = []
    for place, group in enumerate(groups):
        options = mixtures(modes[group.kind], group.count, group.units, largest)
        both = (bytes_[:, None] + options.bytes).ravel()
        times = (spent[:, None] + options.nanoseconds).ravel()
        others = Relaxed.of(hulls[place + 1 :])
        may_be_best = times + others.within(free - both) <= limit
        kept = np.flatnonzero(may_be_best)
        kept = kept[_undominated(both[kept], times[kept], free)]
        if not len(kept):
            return None
        before, chosen = np.divmod(kept, len(options.bytes))
        steps.append((options, before, chosen))
        bytes_, spent = both[kept], times[kept]
    place = int(spent.argmin())
    total = float(spent[place])
    if total >= known:
        return None
    found: list[Choice] = []
    for options, before, chosen in reversed(steps):
        found.append(options.choice(int(chosen[place])))
        place = int(before[place])
    return total, found[::-1]


@lru_cache(maxsize=1 << 14)
def _hull(modes: Modes, units: float, largest: int) -> Hull:
    """Return the lower hull of the modes with temporaries up to a size."""
    points = {
        (units * one.activation_bytes, float(one.backward_ticks))
        for one in modes
        if one.temporary_bytes <= largest
    }
    return tuple(lower_hull(points))


def _undominated(
    bytes_: NDArray[np.float64], times: NDArray[np.float64], free: float
) -> NDArray[np.intp]:
    """Return places of mixtures that fit and that no other one dominates."""
    order = np.lexsort((times, bytes_))
    order = order[bytes_[order] <= free]
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

    Layers are added one by one: a part of an undominated mixture is undominated.

    Args:
        modes: of one layer.
        count: of layers.
        units: micro-batches held of each.
        largest: bytes of a temporary that a mode may have.
    """
    size = np.array([units * one.activation_bytes for one in modes])
    time = np.array([float(one.backward_ticks) for one in modes])
    is_small = [one.temporary_bytes <= largest for one in modes]
    places = np.flatnonzero(is_small)
    places = places[_undominated(size[places], time[places], np.inf)]
    counts = np.zeros((1, len(modes)), dtype=np.intp)
    for _ in range(count):
        more = counts[:, None, :] + np.eye(len(modes), dtype=np.intp)[places]
        more = more.reshape(-1, len(modes))
        counts = more[_undominated(more @ size, more @ time, np.inf)]
    return Mixtures(counts @ size, counts @ time, counts)
