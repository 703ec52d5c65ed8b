"""One layout exactly: a rule's cuts, recomputation that fits, simulation, moves of a layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import comb

import numpy as np

from planner.cost import LayoutCosts, StageMap, choose, rank_memory
from planner.cost.step import schedule_of
from planner.schedule import Schedule
from planner.search.engine.bound import Order
from planner.search.engine.cut import all_cuts
from planner.search.engine.cut_costs import CutCosts, Solution
from planner.search.engine.division import given_sizes
from planner.search.engine.exchanges import exchanges
from planner.search.engine.options import Option, Row
from planner.search.engine.prices import Modes, Prices
from planner.search.engine.recompute import ModeChooser
from planner.search.engine.result import Candidate
from planner.search.engine.rule import MOST_REPAIRS, RuleCuts, Sizes
from planner.search.engine.stop import CUT_WORK
from planner.spec.plan import RankMemory

PROMISING = 1.02
"""A cut is improved by moves if its step is below this multiple of the best step."""
NEARLY_PROMISING = 1.03
"""Below this multiple it is improved if one move makes it promising."""
FEW_CUTS = 256
"""All cuts of a row are evaluated if they are not more than this."""
MOST_MOVES = 40
"""Accepted moves from one cut, and accepted exchanges after them."""
MOST_EXCHANGES = 24
"""Stage maps that are simulated for one exchange, those whose path is shortened most."""
MOST_EXCHANGES_OF_BEST = 256
"""The same for the best plan of a search."""
MOST_NEIGHBOURS = 24
"""Cuts that are evaluated for one move, those of least bound."""
MOST_SOURCES = 64
"""Stages that a layer is moved from, where a rank has several stages."""


def has_few_cuts(layers: int, stages: int) -> bool:
    """Return whether all cuts of a row are evaluated."""
    return comb(layers - 1, stages - 1) <= FEW_CUTS


class CutSolver:
    """Finds the best cut of one layout among those of a rule and moves of one layer."""

    def __init__(
        self,
        prices: Prices,
        costs: LayoutCosts,
        order: Order,
        cuts: Sequence[Sizes],
        modes: Sequence[str] = (),
    ) -> None:
        """Start without any evaluated cut.

        Args:
            prices: of the layout's layers.
            costs: of the layout.
            order: its schedule and numbers.
            cuts: to start from; empty: all cuts are evaluated.
            modes: that all layers have together; empty: each layer has its own.
        """
        self.prices = prices
        self.costs = costs
        self.order = order
        self.cuts = cuts
        self.modes = modes
        self.actions = 0
        """Work so far: simulated actions, and `CUT_WORK` per stage map."""
        self.cutoff = float("inf")
        self._known: dict[Sizes, Solution | None] = {}

    @cached_property
    def schedule(self) -> Schedule:
        """The order of actions."""
        return schedule_of(self.costs)

    @cached_property
    def rule(self) -> RuleCuts:
        """Cuts of the schedule's rule, and the bound on a cut."""
        return RuleCuts(self.prices, self.order)

    @cached_property
    def chooser(self) -> ModeChooser:
        """Chooses the recompute modes of every rank."""
        return ModeChooser(self.cut_costs, self.prices)

    @cached_property
    def cut_costs(self) -> CutCosts:
        """Memory and steps of stage maps."""
        return CutCosts(self.costs, self.schedule, self.prices.kind_of)

    def solve(
        self, limit: int, *, moves: bool = True, from_any_cut: bool = False
    ) -> Solution | None:
        """Return the best stage map found; None: every cut is too large or too slow.

        Args:
            limit: nanoseconds of a known step.
            moves: try to move layers between stages.
            from_any_cut: not only from cuts that are nearly as fast as the limit.
        """
        stages = self.schedule.stages
        if not self.cuts:
            self.cutoff = float(limit)
            best = self._best_of_all()
            return self._exchanged_near(limit, best) if moves else best
        if given_sizes(self.costs.work, stages) or stages == 1:
            best = self._best_of(self.cuts)
            return self._exchanged_near(limit, best) if moves else best
        self.cutoff = float("inf") if from_any_cut else PROMISING * limit
        best = self._best_of(self.cuts)
        if best is None:
            best = self._best_of(self._fitting_cuts())
        if best is None or not moves:
            return best
        if from_any_cut:
            return self._improve_every_cut(best)
        promising = int(PROMISING * limit)
        if promising < best.total < NEARLY_PROMISING * limit:
            best = self._neighbour_below(promising, best) or best
        return self._improve(best) if best.total <= promising else best

    def _best_of_all(self) -> Solution | None:
        """Return the best stage map of all cuts, taken in the order of their bounds."""
        cuts = list(all_cuts(len(self.prices.kind_of), self.schedule.stages))
        bounds = self.rule.bounds.bounds(cuts)
        order = np.argsort(bounds, kind="stable")
        promising = order[bounds[order] < self.cutoff]
        return self._best_of(cuts[place] for place in promising.tolist())

    def _best_of(self, cuts: Iterable[Sizes]) -> Solution | None:
        best: Solution | None = None
        for sizes in cuts:
            found = self.evaluate(sizes)
            if found is not None and (best is None or found.total < best.total):
                best = found
                self.cutoff = min(self.cutoff, float(found.total))
        return best

    def evaluate(self, sizes: Sizes) -> Solution | None:
        """Return the fastest stage map of a cut that is tried, with its step.

        None: it does not fit, or its bound is not below the cutoff.
        """
        if sizes not in self._known:
            if self.rule.bound(sizes) >= self.cutoff:
                return None
            self._known[sizes] = self.simulate(sizes)
        return self._known[sizes]

    def simulate(self, sizes: Sizes) -> Solution | None:
        """Return the fastest stage map of a cut that fits; None: none does."""
        return self._fastest(self._stage_maps(sizes))

    def _fastest(self, stage_maps: Iterable[StageMap]) -> Solution | None:
        """Return the fastest of some stage maps that fits."""
        best: Solution | None = None
        for stage_map in stage_maps:
            self.actions += CUT_WORK
            if not self.cut_costs.fits(stage_map):
                continue
            found = self._played(stage_map)
            if best is None or found.total < best.total:
                best = found
        return best

    def _played(self, stage_map: StageMap) -> Solution:
        """Return a stage map with its simulated step."""
        self.actions += sum(map(len, self.schedule.actions))
        return self.cut_costs.simulate(stage_map)

    def _stage_maps(self, sizes: Sizes) -> Iterator[StageMap]:
        """Yield the stage maps to evaluate for a cut, least recomputation first."""
        if not self.modes:
            yield from self.chooser.stage_maps(sizes)
        for mode in self.modes:
            if self._rules_by_mode[mode].bound(sizes) < self.cutoff:
                yield self._uniform(sizes, mode)

    @cached_property
    def _rules_by_mode(self) -> dict[str, RuleCuts]:
        """The bound on a cut whose layers all have one mode, or their first."""
        found = {}
        for mode in self.modes:
            modes = tuple(_only(each, mode) for each in self.prices.modes)
            found[mode] = RuleCuts(replace(self.prices, modes=modes), self.order)
        return found

    def _uniform(self, sizes: Sizes, mode: str) -> StageMap:
        """Return a cut whose layers all have one mode, or their first."""
        layers = []
        for layer, kind in enumerate(self._kinds):
            offered = [one.mode for one in self.prices.modes[kind]]
            layers.append((layer, mode if mode in offered else offered[0]))
        return _divided(layers, sizes)

    def _fitting_cuts(self) -> Iterator[Sizes]:
        """Yield cuts with one more layer moved from the fullest rank to the emptiest."""
        sizes = list(self.cuts[0])
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
        stages = choose(self.costs, self._least_saved(tuple(sizes)))
        memory = rank_memory(self.costs, self.schedule, stages)
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

    def _least_saved(self, sizes: Sizes) -> StageMap:
        """Return a cut whose layers save as few bytes as their modes permit."""
        if self.modes:
            return self._uniform(sizes, self.modes[-1])
        least = []
        for modes in self.prices.modes:
            least.append(min(modes, key=lambda each: each.activation_bytes).mode)
        layers = [(layer, least[kind]) for layer, kind in enumerate(self._kinds)]
        return _divided(layers, sizes)

    @property
    def _kinds(self) -> tuple[int, ...]:
        """Kind of every layer."""
        return self.prices.kind_of

    def _improve_every_cut(self, best: Solution) -> Solution:
        """Return the best stage map that moves reach from the best cut, or any other."""
        found = [self._improve(best)]
        for sizes in self.cuts:
            self.cutoff = float("inf")
            start = self.evaluate(sizes)
            if start is not None and start is not best:
                found.append(self._improve(start))
        return min(found, key=lambda each: each.total)

    def _improve(self, best: Solution) -> Solution:
        """Return the best stage map that moves of one layer reach, then exchanges."""
        for _ in range(MOST_MOVES):
            self.cutoff = float(best.total)
            better = self._neighbour_below(best.total, best)
            if better is None:
                break
            best = better
        return self._exchanged(best)

    def _exchanged_near(self, limit: int, best: Solution | None) -> Solution | None:
        """Return what exchanges reach from a stage map that is nearly as fast as a limit."""
        if best is None or best.total > PROMISING * limit:
            return best
        return self._exchanged(best)

    def exchanged(self, stage_map: StageMap) -> Solution:
        """Exchange recomputation of the incumbent as long as that makes it faster."""
        start = self._played(stage_map)
        return self._exchanged(start, MOST_EXCHANGES_OF_BEST)

    def _exchanged(self, best: Solution, most: int = MOST_EXCHANGES) -> Solution:
        """Exchange recomputation as long as that makes a stage map faster."""
        if self.modes or self.order.virtual_stages == 1:
            return best
        for _ in range(MOST_MOVES):
            better = self._faster_exchange(best, most)
            if better is None:
                break
            best = better
        return best

    def _faster_exchange(self, best: Solution, most: int) -> Solution | None:
        """Return a faster stage map after an exchange; None: there is none."""
        path = self.cut_costs.learn(best)
        if path is None:
            return None
        replicas = self.cut_costs.replicas(best.stage_map)[best.last_class]
        simulated = 0
        for stage_map in exchanges(best.stage_map, replicas, path, self.prices):
            if self.cut_costs.is_slower(stage_map, best.total):
                continue
            self.actions += CUT_WORK
            if not self.cut_costs.fits(stage_map):
                continue
            if simulated == most:
                break
            simulated += 1
            found = self._played(stage_map)
            if found.total < best.total:
                return found
            self.cut_costs.learn(found)
        return None

    def _neighbour_below(self, total: int, solution: Solution) -> Solution | None:
        """Return a stage map with one layer moved that is faster than a step, if any."""
        for sizes in self._promising(self._neighbours(solution))[:MOST_NEIGHBOURS]:
            if sizes not in self._known:
                maps = list(self._stage_maps(sizes))
                if maps and all(self.cut_costs.is_slower(each, total) for each in maps):
                    continue
                self._known[sizes] = self._fastest(maps)
            found = self._known[sizes]
            if found is None:
                continue
            if found.total < total:
                return found
            self.cut_costs.learn(found)
        return None

    def _promising(self, cuts: Sequence[Sizes]) -> list[Sizes]:
        """Return the cuts whose bound is below the cutoff, the least first."""
        if not cuts:
            return []
        bounds = self.rule.bounds.bounds(cuts)
        order = np.argsort(bounds, kind="stable")
        return [cuts[place] for place in order[bounds[order] < self.cutoff].tolist()]

    def _neighbours(self, best: Solution) -> list[Sizes]:
        """Return cuts with one layer moved.

        With several stages per rank it is moved from the stages with most work.
        """
        sizes = best.sizes
        sources: Sequence[int] = range(len(sizes))
        if self.order.virtual_stages > 1:
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

    def _slow_stages(self, best: Solution) -> Sequence[int]:
        """Return the stages with most work, the longest first."""
        prices = self.prices
        works = []
        for stage in best.stage_map:
            kinds = [prices.kind_of[layer] for layer, _ in stage]
            works.append(float(prices.work[kinds].sum()))
        order = np.argsort(-np.array(works), kind="stable")
        return [int(stage) for stage in order[:MOST_SOURCES]]


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
    """Finds the best plan of one row with an option."""

    item: Item

    def __post_init__(self) -> None:
        """Start without any evaluated cut."""
        item = self.item
        numbers = (item.prices, item.costs, item.order)
        self.cuts = CutSolver(*numbers, item.cuts, item.modes)

    @property
    def actions(self) -> int:
        """Work so far."""
        return self.cuts.actions

    def solve(
        self, limit: int, *, moves: bool = True, from_any_cut: bool = False
    ) -> Candidate | None:
        """Return the best plan found; None: every cut is too large or too slow.

        Args:
            limit: nanoseconds of a known step.
            moves: try to move layers between stages.
            from_any_cut: not only from cuts that are nearly as fast as the limit.
        """
        found = self.cuts.solve(limit, moves=moves, from_any_cut=from_any_cut)
        return None if found is None else self._candidate(found)

    def exchanged(self, stage_map: StageMap) -> Candidate:
        """Exchange recomputation between stages as long as that makes a plan faster."""
        return self._candidate(self.cuts.exchanged(stage_map))

    def _candidate(self, found: Solution) -> Candidate:
        item, schedule = self.item, self.cuts.schedule
        layout = item.row, item.option, item.costs, schedule
        return Candidate(*layout, found.stage_map, found.step)


def _only(modes: Modes, mode: str) -> Modes:
    """Return the costs of a layer in one mode, or in its first."""
    return tuple(each for each in modes if each.mode == mode) or modes[:1]


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
