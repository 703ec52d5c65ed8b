"""One row exactly: an even cut, recomputation that fits, simulation, moves of a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb

import numpy as np

from planner.cost import LayoutCosts, StageMap, choose, evaluate, rank_memory
from planner.cost.memory import StageLayers, kept_bytes, unit_bytes
from planner.cost.step import schedule_of
from planner.schedule import Schedule
from planner.schedule.in_flight import in_flight_vectors
from planner.search.engine.bound import Order
from planner.search.engine.cut import all_cuts
from planner.search.engine.division import given_sizes
from planner.search.engine.options import Option, Row
from planner.search.engine.prices import Prices
from planner.search.engine.recompute import Choice, Group, fewest_nanoseconds
from planner.search.engine.result import Candidate
from planner.search.engine.rule import MOST_REPAIRS, RuleCuts, Sizes
from planner.search.engine.stop import CUT_WORK
from planner.spec.plan import RankMemory
from planner.spec.profile import RecomputeMode

_Chosen = list[list[tuple[int, RecomputeMode]]]
"""Per stage: (layer, mode)."""
PROMISING = 1.015
"""A cut is improved by moves if its step is below this multiple of the best step."""
FEW_CUTS = 256
"""All cuts of a row are evaluated if they are not more than this."""
MOST_MOVES = 40
"""Accepted moves per row."""
MOST_NEIGHBOURS = 24
"""Cuts that are evaluated for one move, those of least bound."""
MOST_SOURCES = 4
"""Stages that a layer is moved from, where a rank has several stages."""


def has_few_cuts(layers: int, stages: int) -> bool:
    """Return whether all cuts of a row are evaluated."""
    return comb(layers - 1, stages - 1) <= FEW_CUTS


@dataclass
class Item:
    """What is solved: a row with an option, its prices and its order."""

    row: Row
    option: Option
    prices: Prices
    costs: LayoutCosts
    order: Order
    cuts: tuple[Sizes, ...]
    """Cuts to start from; empty: all cuts are evaluated."""
    modes: tuple[str, ...] = ()
    """Modes that all layers have together; empty: each layer has its own."""


@dataclass
class RowSolver:
    """Finds the best cut of one row among the even one and moves of one layer."""

    item: Item

    def __post_init__(self) -> None:
        """Start without any evaluated cut."""
        self.actions = 0
        self.cutoff = float("inf")
        self._known: dict[Sizes, Candidate | None] = {}

    @cached_property
    def schedule(self) -> Schedule:
        """The order of actions."""
        return schedule_of(self.item.costs)

    def solve(self, limit: int, *, moves: bool = True) -> Candidate | None:
        """Return the best plan found; None: no evaluated cut fits.

        Args:
            limit: nanoseconds of a known step.
            moves: try to move layers between stages.
        """
        stages = self.schedule.stages
        if not self.item.cuts:
            self.cutoff = float(limit)
            return self._best_of_all()
        if given_sizes(self.item.costs.work, stages) or stages == 1:
            return self._best_of(self.item.cuts)
        self.cutoff = PROMISING * limit
        best = self._best_of(self.item.cuts)
        if best is None:
            best = self._best_of(self._fitting_cuts())
        if best is None or not moves or best.total > PROMISING * limit:
            return best
        return self._improve(best)

    def _best_of_all(self) -> Candidate | None:
        """Return the best plan of all cuts, taken in the order of their bounds."""
        cuts = list(all_cuts(len(self.item.prices.kind_of), self.schedule.stages))
        bounds = self.rule.bounds.bounds(cuts)
        order = np.argsort(bounds, kind="stable")
        promising = order[bounds[order] < self.cutoff]
        return self._best_of(cuts[place] for place in promising.tolist())

    def _best_of(self, cuts: Iterable[Sizes]) -> Candidate | None:
        best: Candidate | None = None
        for sizes in cuts:
            found = self.evaluate(sizes)
            if found is not None and (best is None or found.total < best.total):
                best = found
                self.cutoff = min(self.cutoff, float(found.total))
        return best

    @cached_property
    def rule(self) -> RuleCuts:
        """Cuts of the schedule's rule, and the bound on a cut."""
        return RuleCuts(self.item.prices, self.item.order)

    def evaluate(self, sizes: Sizes) -> Candidate | None:
        """Return the plan of a cut with the least recomputation.

        None: it does not fit, or its bound is not below the cutoff.
        """
        if sizes not in self._known:
            if self.rule.bound(sizes) >= self.cutoff:
                return None
            self._known[sizes] = self._evaluated(sizes)
        return self._known[sizes]

    def _fitting_cuts(self) -> Iterator[Sizes]:
        """Yield cuts with one more layer moved from the fullest rank to the emptiest."""
        sizes = list(self.item.cuts[0])
        for _ in range(MOST_REPAIRS):
            if self.rule.bound(tuple(sizes)) >= self.cutoff:
                return
            moved = self._moved_to_free_memory(sizes)
            if moved is None:
                return
            sizes = moved
            yield tuple(sizes)

    def _moved_to_free_memory(self, sizes: Sequence[int]) -> list[int] | None:
        """Return a cut whose fullest rank has a layer less; None: it has none to give."""
        prices, costs = self.item.prices, self.item.costs
        least = [
            min(modes, key=lambda each: each.activation_bytes).mode
            for modes in prices.modes
        ]
        layers = [(layer, least[kind]) for layer, kind in enumerate(prices.kind_of)]
        stages = choose(costs, _divided(layers, tuple(sizes)))
        memory = rank_memory(costs, self.schedule, stages)
        free = [_free_bytes(row) for row in memory]
        source, target = int(np.argmin(free)), int(np.argmax(free))
        givers = [
            stage for stage in self.schedule.stages_of(source) if sizes[stage] > 1
        ]
        if source == target or free[source] >= 0 or not givers:
            return None
        takers = self.schedule.stages_of(target)
        moved = list(sizes)
        moved[max(givers, key=lambda stage: sizes[stage])] -= 1
        moved[min(takers, key=lambda stage: sizes[stage])] += 1
        return moved

    def _improve(self, best: Candidate) -> Candidate:
        """Return the best plan that moves of one layer reach."""
        for _ in range(MOST_MOVES):
            self.cutoff = float(best.total)
            better = self._best_neighbour(best)
            if better is None:
                return best
            best = better
        return best

    def _best_neighbour(self, best: Candidate) -> Candidate | None:
        """Return a faster plan with one layer moved; None: there is none."""
        cuts = self._neighbours(best)
        if not cuts:
            return None
        bounds = self.rule.bounds.bounds(cuts)
        order = np.argsort(bounds, kind="stable")
        promising = order[bounds[order] < best.total]
        for place in promising[:MOST_NEIGHBOURS].tolist():
            found = self.evaluate(cuts[place])
            if found is not None and found.total < best.total:
                return found
        return None

    def _neighbours(self, best: Candidate) -> list[Sizes]:
        """Return cuts with one layer moved.

        With several stages per rank it is moved from the stages with most work.
        """
        sizes = tuple(len(stage) for stage in best.stage_map)
        sources: Sequence[int] = range(len(sizes))
        if self.item.order.virtual_stages > 1:
            sources = self._slow_stages(best)
        cuts = []
        for source in sources:
            for target in range(len(sizes)):
                if target == source or sizes[source] < 2:
                    continue
                moved = list(sizes)
                moved[source] -= 1
                moved[target] += 1
                cuts.append(tuple(moved))
        return cuts

    def _slow_stages(self, best: Candidate) -> Sequence[int]:
        """Return the stages with most work, the longest first."""
        prices = self.item.prices
        works = []
        for stage in best.stage_map:
            kinds = [prices.kind_of[layer] for layer, _ in stage]
            works.append(float(prices.work[kinds].sum()))
        order = np.argsort(-np.array(works), kind="stable")
        return [int(stage) for stage in order[:MOST_SOURCES]]

    def _evaluated(self, sizes: Sizes) -> Candidate | None:
        """Return the fastest plan of the stage maps that fit."""
        costs = self.item.costs
        best: Candidate | None = None
        for stage_map in self._stage_maps(sizes):
            stages = choose(costs, stage_map)
            self.actions += CUT_WORK
            memory = rank_memory(costs, self.schedule, stages)
            if not all(row.fits for row in memory):
                continue
            step = evaluate(costs, self.schedule, stages)
            self.actions += sum(map(len, self.schedule.actions))
            found = Candidate(
                self.item.row, self.item.option, costs, self.schedule, stage_map, step
            )
            if best is None or found.total < best.total:
                best = found
        return best

    def _stage_maps(self, sizes: Sizes) -> Iterator[StageMap]:
        """Yield the stage maps to evaluate for a cut, least recomputation first."""
        if not self.item.modes:
            stage_map = self._least_recompute(sizes)
            if stage_map is not None:
                yield stage_map
            return
        for mode in self.item.modes or ("none",):
            yield self._uniform(sizes, mode)

    def _uniform(self, sizes: Sizes, mode: str) -> StageMap:
        """Return a cut whose layers all have one mode, or their first."""
        prices = self.item.prices
        layers = []
        for layer, kind in enumerate(prices.kind_of):
            offered = [one.mode for one in prices.modes[kind]]
            layers.append((layer, mode if mode in offered else offered[0]))
        return _divided(layers, sizes)

    def _least_recompute(self, sizes: Sizes) -> StageMap | None:
        """Return a cut whose ranks recompute as little as their memory permits."""
        prices, costs = self.item.prices, self.item.costs
        fastest = [
            (layer, prices.fastest[kind].mode)
            for layer, kind in enumerate(prices.kind_of)
        ]
        plain = _divided(fastest, sizes)
        stages = choose(costs, plain)
        chosen = [list(stage) for stage in plain]
        for row in rank_memory(costs, self.schedule, stages):
            if row.fits:
                continue
            if not row.fits_host or not self._recompute(row, stages, chosen):
                return None
        return tuple(tuple(stage) for stage in chosen)

    def _recompute(
        self,
        row: RankMemory,
        stages: Sequence[StageLayers],
        chosen: _Chosen,
    ) -> bool:
        """Choose the modes of one rank; return whether any choice fits."""
        costs, prices = self.item.costs, self.item.prices
        mine = self.schedule.stages_of(row.pipeline_rank)
        moments = in_flight_vectors(self.schedule)[row.pipeline_rank]
        units = [unit_bytes(costs, stages, stage) for stage in mine]
        peak = max(moments, key=lambda held: float(np.dot(held, units)))
        temporary = max(
            cost.temporary_bytes for stage in mine for _, cost in stages[stage]
        )
        chunks = costs.layout.sequence_chunks
        taken = row.peak_bytes - int(np.dot(peak, units)) - temporary
        saved = [kept_bytes(costs, stages, stage) for stage in mine]
        for held in (peak, tuple(map(max, zip(*moments, strict=True)))):
            kept = sum(
                count * -(-size // chunks)
                for count, size in zip(held, saved, strict=True)
            )
            groups, layers = self._groups(mine, stages, held, chunks)
            room = row.capacity_bytes - taken
            found = fewest_nanoseconds(groups, prices.modes, room - kept)
            if found is None:
                return False
            self._apply(chosen, groups, layers, found)
            if self._peak(mine, chosen, saved, moments) <= room:
                return True
        return False

    def _peak(
        self,
        mine: Sequence[int],
        chosen: _Chosen,
        saved: Sequence[int],
        moments: Sequence[Sequence[int]],
    ) -> int:
        """Return the bytes of a rank's saved activations and temporaries at its peak.

        Args:
            mine: stages of the rank.
            chosen: layers and modes of every stage.
            saved: bytes of a micro-batch in addition to its layers' activations, per stage.
            moments: units held of every stage.
        """
        costs = self.item.costs
        chunks = costs.layout.sequence_chunks
        units = []
        temporary = 0
        for stage, size in zip(mine, saved, strict=True):
            layers = [costs.layers[layer][mode] for layer, mode in chosen[stage]]
            whole = sum(cost.activation_bytes for cost in layers) + size
            units.append(-(-whole // chunks))
            temporary = max(temporary, *(cost.temporary_bytes for cost in layers))
        held = max(
            sum(count * size for count, size in zip(moment, units, strict=True))
            for moment in moments
        )
        return held + temporary

    def _groups(
        self,
        mine: Sequence[int],
        stages: Sequence[StageLayers],
        held: Sequence[int],
        chunks: int,
    ) -> tuple[list[Group], list[tuple[int, list[int]]]]:
        """Return the equal layers of every stage, and their places in it."""
        prices = self.item.prices
        groups: list[Group] = []
        layers: list[tuple[int, list[int]]] = []
        for count, stage in zip(held, mine, strict=True):
            kinds = [prices.kind_of[layer] for layer, _ in stages[stage]]
            for kind, times in Counter(kinds).items():
                groups.append(Group(kind, times, count / chunks))
                places = [i for i, each in enumerate(kinds) if each == kind]
                layers.append((stage, places))
        return groups, layers

    def _apply(
        self,
        chosen: _Chosen,
        groups: Sequence[Group],
        layers: Sequence[tuple[int, list[int]]],
        found: Sequence[Choice],
    ) -> None:
        prices = self.item.prices
        for group, (stage, places), choice in zip(groups, layers, found, strict=True):
            for place, mode in zip(places, choice, strict=True):
                layer, _ = chosen[stage][place]
                chosen[stage][place] = (layer, prices.modes[group.kind][mode].mode)


def _free_bytes(memory: RankMemory) -> int:
    """Return the free bytes of a rank's device or, if they are fewer, of its host."""
    on_device = memory.capacity_bytes - memory.peak_bytes
    if memory.host_capacity_bytes is None or not memory.host_bytes:
        return on_device
    return min(on_device, memory.host_capacity_bytes - memory.host_bytes)


def _divided(layers: Sequence[tuple[int, str]], sizes: Sizes) -> StageMap:
    """Return stages of the given numbers of layers."""
    found = []
    first = 0
    for size in sizes:
        found.append(tuple(layers[first : first + size]))
        first += size
    return tuple(found)  # type: ignore[arg-type]
