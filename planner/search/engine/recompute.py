"""Recompute modes of the layers of a cut: as little recomputation as memory requires.

Every pipeline rank chooses by itself, since more recomputation on a rank makes no step
shorter. The choice is exact for one stage per rank and whole sequences
(`planner.search.engine.mixtures`). With several stages the units of a stage at the peak
weigh its bytes; the peak itself is checked afterwards.

Where replicas differ, a stage has the same modes in all classes of identical replicas,
and they fit in every class. Several choices are returned if one class is faster with
one of them and another class with another: the simulated step decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from math import comb, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayerCost, LayoutCosts, StageMap
from planner.cost.memory import kept_bytes
from planner.schedule import find
from planner.schedule.in_flight import in_flight_vectors
from planner.schedule.pipedream import in_steady_state
from planner.search.engine.cut_costs import CutCosts, Replicas, StageKey
from planner.search.engine.mixtures import Choice, Group, fewest_nanoseconds
from planner.search.engine.prices import Modes, Prices
from planner.spec.plan import RankMemory

RankChoice = tuple[Choice, ...]
"""One choice per stage of a pipeline rank."""
MOST_MIXTURES = 1 << 16
"""Mixtures of a stage that are compared one by one where replicas differ."""
MOST_STAGE_MAPS = 16
"""Combinations of the ranks' choices that are returned for one cut."""


@dataclass(frozen=True)
class RankLimits:
    """What a pipeline rank may save, in one class of identical replicas."""

    modes: tuple[Modes, ...]
    """Per kind of layers, on the rank's device."""
    kinds: tuple[tuple[int, ...], ...]
    """Per stage: kinds of its layers."""
    moments: tuple[tuple[int, ...], ...]
    """Units that are saved of every stage, at moments that may be the peak."""
    other_bytes: tuple[int, ...]
    """Per stage: saved of a micro-batch in addition to its layers' activations."""
    chunks: int
    free_bytes: int
    """For saved units and the largest temporary."""

    def peak_bytes(self, choice: RankChoice) -> int:
        """Return the bytes of saved units and the largest temporary at the peak."""
        units = self._unit_bytes(choice)
        saved = max(_dot(moment, units) for moment in self.moments)
        return saved + max(each.temporary_bytes for each in self._layers(choice))

    def fits(self, choice: RankChoice) -> bool:
        """Return whether the rank has memory for a choice."""
        return self.peak_bytes(choice) <= self.free_bytes

    def nanoseconds(self, choice: RankChoice) -> int:
        """Return the backward of all layers for one micro-batch."""
        return sum(each.backward_ticks for each in self._layers(choice))

    def least_recomputation(self, fastest: RankChoice) -> RankChoice | None:
        """Return the choice of fewest nanoseconds that fits; None: none was found.

        Args:
            fastest: modes of all layers if memory did not matter.
        """
        units = self._unit_bytes(fastest)
        peak = max(self.moments, key=lambda moment: _dot(moment, units))
        for moment in (peak, self.most_units):
            found = self._fewest_nanoseconds(moment)
            if found is None:
                return None
            if self.fits(found):
                return found
        return None

    def covers(self, other: RankLimits) -> bool:
        """Return whether all that fits here fits in another class of replicas."""
        is_same = self.modes == other.modes and self.other_bytes == other.other_bytes
        units = zip(self.most_units, other.most_units, strict=True)
        has_more = all(mine >= theirs for mine, theirs in units)
        return is_same and has_more and self.free_bytes <= other.free_bytes

    @property
    def most_units(self) -> tuple[int, ...]:
        """Return the most units of every stage at any moment."""
        return tuple(map(max, zip(*self.moments, strict=True)))

    def _fewest_nanoseconds(self, units: Sequence[int]) -> RankChoice | None:
        """Return the fastest choice that fits with a number of saved units per stage."""
        free = self.free_bytes
        layers: Counter[tuple[int, int]] = Counter()
        for count, kinds, other in zip(
            units, self.kinds, self.other_bytes, strict=True
        ):
            free -= count * -(-other // self.chunks)
            layers.update((count, kind) for kind in kinds)
        groups = [
            Group(kind, times, count / self.chunks)
            for (count, kind), times in layers.items()
        ]
        found = fewest_nanoseconds(groups, self.modes, free)
        if found is None:
            return None
        left = dict(zip(layers, map(iter, found), strict=True))
        # Of equal layers those of the highest stages recompute least.
        chosen = [
            tuple(next(left[count, kind]) for kind in kinds)
            for count, kinds in zip(reversed(units), reversed(self.kinds), strict=True)
        ]
        return tuple(reversed(chosen))

    def _unit_bytes(self, choice: RankChoice) -> list[int]:
        """Return the saved bytes of one unit of every stage."""
        units = []
        for kinds, chosen, other in zip(
            self.kinds, choice, self.other_bytes, strict=True
        ):
            whole = other
            for kind, mode in zip(kinds, chosen, strict=True):
                whole += self.modes[kind][mode].activation_bytes
            units.append(-(-whole // self.chunks))
        return units

    def _layers(self, choice: RankChoice) -> Iterator[LayerCost]:
        """Yield the costs of all layers in their chosen modes."""
        for kinds, chosen in zip(self.kinds, choice, strict=True):
            for kind, mode in zip(kinds, chosen, strict=True):
                yield self.modes[kind][mode]


class _Device(NamedTuple):
    """The modes of layers on one rank's device."""

    modes: tuple[Modes, ...]
    """Per kind."""
    fastest: Choice
    """Per kind: the mode whose backward is shortest, with the fewest bytes."""


class _RankChoices(NamedTuple):
    """The choices of one rank that may make the fastest step."""

    choices: list[RankChoice]
    limits: list[RankLimits]
    """Of every class of replicas, if there are several choices."""


class ModeChooser:
    """Chooses the recompute modes of all ranks for cuts of one layout."""

    def __init__(self, cut_costs: CutCosts, prices: Prices) -> None:
        """Prepare the choice.

        Args:
            cut_costs: of the layout and its schedule.
            prices: kinds of its layers, and the names of the modes that each may have.
        """
        self.cut_costs = cut_costs
        self.costs = cut_costs.costs
        self.schedule = cut_costs.schedule
        self.kind_of = prices.kind_of
        self.names = [tuple(one.mode for one in modes) for modes in prices.modes]
        self._firsts = [first for first, _ in prices.costs.kinds]
        self._devices: dict[int, _Device] = {}
        self._known: dict[tuple[int, tuple[StageKey, ...]], _RankChoices] = {}

    def stage_maps(self, sizes: Sequence[int]) -> list[StageMap]:
        """Return a cut with least recomputation; empty: no choice fits.

        Args:
            sizes: layers of every stage.

        Returns:
            Several if classes of replicas differ in which choice is fastest.
        """
        fastest = self._fastest(sizes)
        stage_map = self._stage_map(fastest)
        keys = self.cut_costs.keys(stage_map)
        replicas: list[Replicas] | None = None
        ranks = []
        for rank in range(self.schedule.ranks):
            key = (rank, self.cut_costs.of_rank(keys, rank))
            if key not in self._known:
                replicas = replicas or self.cut_costs.replicas(stage_map)
                mine = self.schedule.stages_of(rank)
                start = tuple(fastest[stage] for stage in mine)
                self._known[key] = self._of_rank(rank, replicas, start)
            ranks.append(self._known[key])
            if not ranks[-1].choices:
                return []
        return [self._joined(fastest, chosen) for chosen in _combined(ranks)]

    def _fastest(self, sizes: Sequence[int]) -> list[Choice]:
        """Return the fastest modes of every stage, in the first class of replicas."""
        costs = self.costs.of_replica
        found = []
        first = 0
        for stage, size in enumerate(sizes):
            fastest = self._device(costs.on_stage(stage)).fastest
            kinds = self.kind_of[first : first + size]
            found.append(tuple(fastest[kind] for kind in kinds))
            first += size
        return found

    def _device(self, costs: LayoutCosts) -> _Device:
        """Return the modes on the device of a rank, by its costs."""
        key = id(costs.layers)
        if key not in self._devices:
            modes = []
            for first, names in zip(self._firsts, self.names, strict=True):
                modes.append(tuple(costs.layers[first][name] for name in names))
            self._devices[key] = _Device(tuple(modes), tuple(map(_fastest, modes)))
        return self._devices[key]

    def _of_rank(
        self, rank: int, replicas: Sequence[Replicas], start: RankChoice
    ) -> _RankChoices:
        """Return the choices of a pipeline rank.

        Args:
            rank: pipeline rank.
            replicas: every class of identical ones, in their fastest modes.
            start: the rank's fastest modes in the first class.
        """
        memory = [each.memory(rank) for each in replicas]
        if not all(row.fits_host for row in memory):
            return _RankChoices([], [])
        fastest = {self._device(each.costs.on_rank(rank)).fastest for each in replicas}
        if len(fastest) == 1 and all(row.fits for row in memory):
            return _RankChoices([start], [])
        limits = []
        for each, row in zip(replicas, memory, strict=True):
            limits.append(self._limits(rank, each, row, start))
        return _RankChoices(_choices(limits, start), limits)

    def _limits(
        self, rank: int, replicas: Replicas, memory: RankMemory, start: RankChoice
    ) -> RankLimits:
        """Return what a rank may save, from its memory in some modes.

        Args:
            rank: pipeline rank.
            replicas: one class of identical ones.
            memory: of the rank.
            start: modes that its memory is known for.
        """
        costs, schedule, stages = replicas.costs, replicas.schedule, replicas.stages
        if find(costs.layout.schedule).is_asynchronous:
            schedule = in_steady_state(schedule)
        mine = self.schedule.stages_of(rank)
        kinds = []
        for stage in mine:
            kinds.append(tuple(self.kind_of[layer] for layer, _ in stages[stage]))
        limits = RankLimits(
            modes=self._device(costs.on_rank(rank)).modes,
            kinds=tuple(kinds),
            moments=in_flight_vectors(schedule)[rank],
            other_bytes=tuple(kept_bytes(costs, stages, stage) for stage in mine),
            chunks=costs.layout.sequence_chunks,
            free_bytes=0,
        )
        free = memory.capacity_bytes - memory.peak_bytes
        return replace(limits, free_bytes=free + limits.peak_bytes(start))

    def _joined(
        self, fastest: Sequence[Choice], chosen: Sequence[RankChoice]
    ) -> StageMap:
        """Return the stages of all ranks with the modes that these chose."""
        of_stages = list(fastest)
        for rank, choice in enumerate(chosen):
            mine = self.schedule.stages_of(rank)
            for stage, modes in zip(mine, choice, strict=True):
                of_stages[stage] = modes
        return self._stage_map(of_stages)

    def _stage_map(self, chosen: Sequence[Choice]) -> StageMap:
        """Return the stages of a cut with the modes of every stage."""
        found = []
        layer = 0
        for modes in chosen:
            stage = []
            for mode in modes:
                stage.append((layer, self.names[self.kind_of[layer]][mode]))
                layer += 1
            found.append(tuple(stage))
        return tuple(found)


def _combined(ranks: Sequence[_RankChoices]) -> list[tuple[RankChoice, ...]]:
    """Return combinations of the ranks' choices.

    All of them, or those that are fastest in one class of replicas each.
    """
    choices = [each.choices for each in ranks]
    if prod(map(len, choices)) <= MOST_STAGE_MAPS:
        return list(product(*choices))
    classes = max(len(each.limits) for each in ranks)
    found = []
    for place in range(classes):
        chosen = []
        for rank in ranks:
            best = rank.choices[0]
            if len(rank.choices) > 1:
                best = min(rank.choices, key=rank.limits[place].nanoseconds)
            chosen.append(best)
        found.append(tuple(chosen))
    return list(dict.fromkeys(found))


def _choices(limits: Sequence[RankLimits], fastest: RankChoice) -> list[RankChoice]:
    """Return the choices of a rank that fit and that no other one dominates.

    Args:
        limits: of every class of replicas.
        fastest: modes if memory did not matter.
    """
    binding: list[RankLimits] = []
    for each in limits:
        if not any(other.covers(each) for other in binding):
            binding = [other for other in binding if not each.covers(other)]
            binding.append(each)
    if len(binding) == 1:
        found = binding[0].least_recomputation(fastest)
        return [] if found is None else [found]
    return _choices_in_all(binding, fastest)


def _choices_in_all(
    limits: Sequence[RankLimits], fastest: RankChoice
) -> list[RankChoice]:
    """Return the choices of a stage that fit in several classes of replicas.

    None of them is slower than another one in every class. If there are too many
    mixtures to compare, the best ones of single classes are returned that fit in all.
    """
    (kinds,) = limits[0].kinds
    counts = Counter(kinds)
    modes = {kind: range(len(limits[0].modes[kind])) for kind in counts}
    shape = tuple(
        comb(len(modes[kind]) + times - 1, times) for kind, times in counts.items()
    )
    if prod(shape) > MOST_MIXTURES:
        alone = [each.least_recomputation(fastest) for each in limits]
        distinct = dict.fromkeys(each for each in alone if each is not None)
        return [each for each in distinct if all(one.fits(each) for one in limits)]
    groups = []
    for kind, times in counts.items():
        mixtures = combinations_with_replacement(modes[kind], times)
        groups.append((kind, list(mixtures)))
    fits = np.ones(prod(shape), dtype=np.bool_)
    times_in_classes = []
    for each in limits:
        bytes_, nanoseconds = _peaks_and_times(each, groups)
        fits &= bytes_ <= each.free_bytes
        times_in_classes.append(nanoseconds)
    fitting = np.flatnonzero(fits)
    nanoseconds_in_classes = np.stack(times_in_classes, axis=1)[fitting]
    found = []
    for place in fitting[_fastest_in_some(nanoseconds_in_classes)].tolist():
        indices = np.unravel_index(place, shape)
        chosen = [each[1][index] for each, index in zip(groups, indices, strict=True)]
        found.append(_placed((kinds,), chosen))
    return found


def _peaks_and_times(
    limits: RankLimits, groups: Sequence[tuple[int, list[Choice]]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return peak bytes and nanoseconds of all combinations of the groups' mixtures.

    Args:
        limits: of a rank with one stage.
        groups: kinds of layers, with mixtures of modes.
    """
    saved = temporary = spent = np.zeros(1, dtype=np.int64)
    for kind, mixtures in groups:
        modes = limits.modes[kind]
        places = range(len(modes))
        counts = np.array(
            [[each.count(place) for place in places] for each in mixtures]
        )
        activations = np.array([one.activation_bytes for one in modes])
        backwards = np.array([one.backward_ticks for one in modes])
        temporaries = np.array([one.temporary_bytes for one in modes])
        largest = np.where(counts > 0, temporaries, 0).max(axis=1)
        saved = np.add.outer(saved, counts @ activations).ravel()
        spent = np.add.outer(spent, counts @ backwards).ravel()
        temporary = np.maximum.outer(temporary, largest).ravel()
    (units,) = limits.most_units
    (other,) = limits.other_bytes
    of_unit = -(-(saved + other) // limits.chunks)
    return units * of_unit + temporary, spent


def _fastest_in_some(times: NDArray[np.int64]) -> list[int]:
    """Return the rows that no other row is below or equal to everywhere.

    Args:
        times: nanoseconds, [choice, class].
    """
    left = np.argsort(times.sum(axis=1), kind="stable")
    found = []
    while len(left):
        best = int(left[0])
        found.append(best)
        left = left[(times[left] < times[best]).any(axis=1)]
    return found


def _placed(kinds: Sequence[tuple[int, ...]], found: Sequence[Choice]) -> RankChoice:
    """Return the modes of the layers of every stage, from those of its groups.

    Args:
        kinds: of the layers of every stage.
        found: modes of the equal layers of every stage.
    """
    groups = iter(found)
    stages = []
    for each in kinds:
        left = {kind: iter(next(groups)) for kind in dict.fromkeys(each)}
        stages.append(tuple(next(left[kind]) for kind in each))
    return tuple(stages)


def _fastest(modes: Modes) -> int:
    """Return the mode whose backward is shortest, with the fewest bytes."""
    keys = [(one.backward_ticks, one.activation_bytes) for one in modes]
    return keys.index(min(keys))


def _dot(counts: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the sum of counts times sizes."""
    return sum(count * size for count, size in zip(counts, sizes, strict=True))
