"""Memory and step of many cuts of one layout.

Cuts that differ by one moved layer have most ranks in common. What a rank holds, and
how long its stages take, depends on their layers and modes, on what crosses their
boundaries, and on which shared parameters other ranks hold: it is priced once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayoutCosts, StageLayers, StageMap, Step, choose
from planner.cost.memory import memory_of_rank
from planner.cost.step import (
    StageTicks,
    by_rank,
    column_orders,
    joined_durations,
    per_column,
    simulated_step,
    stage_ticks,
    tail_of_rank,
)
from planner.schedule import Durations, Schedule, find, simulate
from planner.schedule.critical_path import CriticalPath, critical_path
from planner.spec.plan import RankMemory

MOST_PATHS = 16
"""Longest paths of earlier cuts that a cut is compared with."""


class StageKey(NamedTuple):
    """What decides the costs of a stage on its rank."""

    layers: tuple[int, ...]
    """Numbers of its layers: equal ones cost the same and share the same parameters."""
    modes: tuple[str, ...]
    before: int
    """Number of the tensors that cross the boundary before it; equal ones are alike."""
    after: int
    """The same for the boundary after it."""


class Solution(NamedTuple):
    """A stage map of a layout and its simulated step."""

    stage_map: StageMap
    step: Step
    last_class: int
    """Which class of identical replicas ends last, counted from 0."""

    @property
    def total(self) -> int:
        """Nanoseconds of the step."""
        return self.step.total_ticks

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers of every stage."""
        return tuple(map(len, self.stage_map))


class CutCosts:
    """Prices stage maps of one layout."""

    def __init__(
        self, costs: LayoutCosts, schedule: Schedule, kind_of: Sequence[int]
    ) -> None:
        """Number layers and boundaries that are alike.

        Args:
            costs: of the layout.
            schedule: of its micro-batches.
            kind_of: number of every layer; equal ones cost the same.
        """
        self.costs = costs
        self.schedule = schedule
        layers = range(len(kind_of))
        uses = [[layer in one.layers for one in costs.shared] for layer in layers]
        numbers = _numbered(zip(kind_of, map(tuple, uses), strict=True))
        crosses = [
            [one.producer <= layer < one.consumer for one in costs.skips]
            for layer in layers
        ]
        outputs = zip(numbers, map(tuple, crosses), strict=True)
        self._layers = numbers
        self._outputs = _numbered([*outputs, None])
        self._fits: dict[Hashable, bool] = {}
        self._ranks = range(schedule.ranks)
        self._stages_of = [schedule.stages_of(rank) for rank in self._ranks]

    def keys(self, stage_map: StageMap) -> list[StageKey]:
        """Return what decides the costs of every stage."""
        found = []
        for stage in stage_map:
            first, last = stage[0][0], stage[-1][0]
            layers = self._layers[first : last + 1]
            modes = tuple(mode for _, mode in stage)
            # Before the first layer that is the last number, the one of None.
            before, after = self._outputs[first - 1], self._outputs[last]
            found.append(StageKey(layers, modes, before, after))
        return found

    def of_rank(self, keys: Sequence[StageKey], rank: int) -> tuple[StageKey, ...]:
        """Return the keys of a rank's stages."""
        return tuple(keys[stage] for stage in self._stages_of[rank])

    def fits(self, stage_map: StageMap) -> bool:
        """Return whether all ranks have memory for a stage map."""
        keys = self.keys(stage_map)
        replicas: list[Replicas] | None = None
        for rank in self._ranks:
            key = (rank, self.of_rank(keys, rank))
            if key not in self._fits:
                replicas = replicas or self.replicas(stage_map)
                self._fits[key] = all(each.memory(rank).fits for each in replicas)
            if not self._fits[key]:
                return False
        return True

    def replicas(self, stage_map: StageMap) -> list[Replicas]:
        """Return all classes of identical replicas with a stage map."""
        stages = choose(self.costs, stage_map)
        classes = per_column(self.costs, self.schedule, stages)
        return [Replicas(*each) for each in classes]

    @cached_property
    def _classes(self) -> list[_ReplicaSteps]:
        """The steps of every class of identical replicas."""
        classes = column_orders(self.costs, self.schedule)
        return [_ReplicaSteps(*each) for each in classes]

    def simulate(self, stage_map: StageMap) -> Solution:
        """Return a stage map with the step of the replicas that end last."""
        keys = self.keys(stage_map)
        steps = [each.step(stage_map, keys) for each in self._classes]
        last = max(range(len(steps)), key=lambda place: steps[place].total_ticks)
        return Solution(stage_map, steps[last], last)

    def learn(self, solution: Solution) -> CriticalPath | None:
        """Keep the longest path of a step for `is_slower`, and return it.

        None: paths do not bound steps of this layout.
        """
        return self._classes[solution.last_class].learn(solution.step)

    def is_slower(self, stage_map: StageMap, limit: float) -> bool:
        """Return whether a known path shows that a step takes a limit or longer, in ticks.

        A path through an order bounds every step, however long its actions last.
        """
        keys = self.keys(stage_map)
        return any(each.is_slower(stage_map, keys, limit) for each in self._classes)


class _ReplicaSteps:
    """Simulates stage maps on one class of identical replicas."""

    def __init__(self, costs: LayoutCosts, schedule: Schedule) -> None:
        self.costs = costs
        self.schedule = schedule
        self._ticks: dict[Hashable, StageTicks] = {}
        self._tails: dict[Hashable, int] = {}
        self._ranks = range(schedule.ranks)
        self._stages_of = [schedule.stages_of(rank) for rank in self._ranks]
        self._paths: list[CriticalPath] = []
        self._counts: NDArray[np.float64] = np.zeros((0, 0))

    def step(self, stage_map: StageMap, keys: Sequence[StageKey]) -> Step:
        """Return the simulated step of a stage map."""
        durations, tails = self._parts(stage_map, keys)
        return simulated_step(self.costs, simulate(self.schedule, durations), tails)

    def learn(self, step: Step) -> CriticalPath | None:
        """Keep the longest path of a step, and return it; None: it bounds no step."""
        if not self._has_paths:
            return None
        path = critical_path(self.schedule, step.simulation.durations, step.tails)
        if path not in self._paths:
            self._paths = [path, *self._paths][:MOST_PATHS]
            ends = [[rank == each.rank for rank in self._ranks] for each in self._paths]
            counts = [each.counts for each in self._paths]
            self._counts = np.hstack([np.array(counts, dtype=np.float64), ends])
        return path

    def is_slower(
        self, stage_map: StageMap, keys: Sequence[StageKey], limit: float
    ) -> bool:
        """Return whether a known path takes a limit or longer, in ticks."""
        if not self._paths:
            return False
        durations, tails = self._parts(stage_map, keys)
        seconds = [*self._paths[0].seconds_of(durations), *tails]
        longest = float((self._counts @ np.array(seconds, dtype=np.float64)).max())
        return longest >= limit

    @cached_property
    def _has_paths(self) -> bool:
        """Whether a step lasts as long as the longest path of its one order."""
        is_flushed = not find(self.costs.layout.schedule).is_asynchronous
        return is_flushed and not self.costs.work.framework.staggers_steps

    def _parts(
        self, stage_map: StageMap, keys: Sequence[StageKey]
    ) -> tuple[Durations, tuple[int, ...]]:
        """Return the durations of a stage map, and the tail of every rank."""
        stages: Sequence[StageLayers] | None = None
        parts = []
        for stage, key in enumerate(keys):
            known = (self._devices[stage], key.layers, key.modes)
            if known not in self._ticks:
                stages = stages or choose(self.costs, stage_map)
                self._ticks[known] = stage_ticks(self.costs, stages, stage)
            parts.append(self._ticks[known])
        moves = [
            by_last_layer[layers[-1][0]]
            for by_last_layer, layers in zip(
                self._transfers, stage_map[:-1], strict=True
            )
        ]
        durations = joined_durations(parts, moves, self._waiting)
        return durations, self._tails_of(stage_map, keys)

    def _tails_of(
        self, stage_map: StageMap, keys: Sequence[StageKey]
    ) -> tuple[int, ...]:
        """Return the ticks of every rank's reduction and optimizer."""
        ranks: Sequence[StageLayers] | None = None
        holders = self._holders(stage_map)
        tails = []
        for rank in self._ranks:
            mine = [keys[stage][:2] for stage in self._stages_of[rank]]
            known = (rank, holders, *mine)
            if known not in self._tails:
                if ranks is None:
                    ranks = by_rank(self.schedule, choose(self.costs, stage_map))
                self._tails[known] = sum(tail_of_rank(self.costs, ranks, rank))
            tails.append(self._tails[known])
        return tuple(tails)

    def _holders(self, stage_map: StageMap) -> tuple[int, ...]:
        """Return how many ranks hold each of the shared parameters."""
        counts = []
        for shared in self.costs.shared:
            held = set()
            for stage, layers in enumerate(stage_map):
                first, last = layers[0][0], layers[-1][0]
                if any(first <= layer <= last for layer in shared.layers):
                    held.add(stage)
            counts.append(sum(not held.isdisjoint(mine) for mine in self._stages_of))
        return tuple(counts)

    @cached_property
    def _devices(self) -> tuple[int, ...]:
        """The rank that every stage is priced on; 0 if all ranks have the same device."""
        stages = self.schedule.stages
        return self.schedule.stage_ranks if self.costs.ranks else (0,) * stages

    @cached_property
    def _transfers(self) -> list[tuple[int, ...]]:
        """Ticks of a transfer after every stage but the last, by its last layer."""
        boundaries = range(self.schedule.stages - 1)
        return [self.costs.transfers_behind(boundary) for boundary in boundaries]

    @cached_property
    def _waiting(self) -> list[int]:
        """Ticks that the actions of every stage wait for its neighbours."""
        stages = range(self.schedule.stages)
        if len(stages) == 1:
            return [0]
        return [self.costs.on_stage(stage).waiting_ticks for stage in stages]


@dataclass(frozen=True)
class Replicas:
    """One class of identical replicas, and the layers of each of its stages."""

    costs: LayoutCosts
    schedule: Schedule
    stages: Sequence[StageLayers]

    def memory(self, rank: int) -> RankMemory:
        """Return the memory of a pipeline rank."""
        return memory_of_rank(self.costs, self.stages, self.schedule, rank)


def _numbered(things: Iterable[Hashable]) -> tuple[int, ...]:
    """Return a number for every thing; equal things have the same one."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(each, len(numbers)) for each in things)
