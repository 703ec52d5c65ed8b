"""Where a search stands: what is open, what is proven, and the best plan so far.

The parts of the space, from the coarsest to the finest: a family, those of it that share out states in one way, those
of these whose stage map is dealt, single layouts. Equation (F4) of `planner.search.solve` is `State.report`.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field, replace

from planner.cost import TICK_SECONDS, LayoutCosts, StageMap, Workload
from planner.search.bounds.layout import Totals
from planner.search.layouts.orders import Order, recompute_wish
from planner.search.layouts.space import Family, Zero
from planner.search.result import Callbacks, Candidate, Progress
from planner.search.stage_maps.dealt import Uniform
from planner.search.stage_maps.dealt_on_groups import RankUniform
from planner.search.stage_maps.dealt_recompute import PerLayer
from planner.search.stage_maps.inside import NO_LIMIT
from planner.search.stage_maps.segments import LayerModes
from planner.search.stage_maps.synthesized import SEARCH_WORK, Unordered
from planner.spec.layout import Layout, RankOrder
from planner.spec.plan import SearchReport

_OPTIMAL_GAP = 1e-6
_MET = 8
"""Degrees of which a plan is kept."""


@dataclass(frozen=True, slots=True)
class Group:
    """The layouts of a family that share out states and stand on the devices in one way: their layers cost the same."""

    family: Family
    zero: Zero
    rank_order: RankOrder
    costs: LayoutCosts
    modes: tuple[LayerModes, ...]
    """Permitted recompute choices of every layer."""
    totals: Totals
    """Theirs."""
    is_tight: bool = False
    """Bounded by the micro-batches too that every order holds."""

    def costs_of(self, order: Order) -> LayoutCosts:
        """The costs of one of them."""
        return self.costs.under(self.family.layout(self.zero, order, self.rank_order))


@dataclass(frozen=True, slots=True)
class Alike:
    """Those of a group whose stage map is dealt and whose layers recompute by one rule: all alike, or per layer."""

    group: Group
    totals: Totals
    layers: Uniform | RankUniform | PerLayer
    orders: tuple[Order, ...]

    @property
    def family(self) -> Family:
        """Theirs."""
        return self.group.family

    def numbers(self, order: Order) -> tuple[str, int, int, int, int]:
        """Schedule, pipeline ranks, micro-batches, stages per rank and sequence chunks of one of them."""
        counts = (
            self.family.pipeline,
            self.group.costs.micro_batches,
            order.virtual_stages,
        )
        return order.schedule, *counts, self.family.sequence_chunks


@dataclass(frozen=True, slots=True)
class Searched:
    """A layout whose stage map is to be searched."""

    costs: LayoutCosts
    modes: tuple[LayerModes, ...]
    is_tight: bool = False
    """Bounded over its segments too."""
    is_narrowed: bool = False
    """Its best stage map is nearly known: `LayoutSearch.narrow`."""
    trials: int = 0
    """Limits that have excluded all of its stage maps since it got its bound."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """A layout whose stage map is dealt by a rule."""

    costs: LayoutCosts
    layers: Uniform | RankUniform
    sizes: tuple[int, ...] = ()
    """Layers of every stage; empty: not dealt yet."""
    is_steady: bool = False
    """Bounded by its steady state too."""


@dataclass(frozen=True, slots=True)
class DealtPerLayer:
    """A layout whose stage map is dealt by a rule, and which layers recompute, too."""

    costs: LayoutCosts
    layers: PerLayer
    sizes: tuple[int, ...] = ()
    """Layers of every stage; empty: not dealt yet."""
    stage_map: StageMap = ()
    """Bounded by its steady state; empty: what recomputes is not chosen yet."""


@dataclass(frozen=True, slots=True, order=True)
class Open:
    """What is bounded but not solved; least bound first."""

    bound_ticks: int
    order: tuple[int, ...]
    """Place in the enumeration of the space."""
    item: Family | Group | Alike | Searched | Dealt | DealtPerLayer | Unordered = field(
        compare=False
    )

    @property
    def count(self) -> int:
        """Number of layouts."""
        match self.item:
            case Family(count=count):
                return count
            case Group(family=family):
                return len(family.orders)
            case Alike(orders=orders):
                return len(orders)
        return 1


@dataclass
class State:
    """The search as it runs."""

    work: Workload
    considered: int
    deadline: float
    callbacks: Callbacks
    started: float = field(default_factory=time.monotonic)
    heap: list[Open] = field(default_factory=list)
    solved: int = 0
    best: Candidate | None = None
    met: dict[tuple[int, ...], Candidate] = field(default_factory=dict)
    """The fastest plans that were come by, by their degrees."""
    bounds: dict[tuple[int, ...], Open] = field(default_factory=dict)
    """Latest bound of everything that may fit, by its place in the enumeration."""
    ceiling: int = NO_LIMIT
    """Only plans of fewer ticks matter."""
    fitting: set[tuple[Layout, tuple[int, ...]]] = field(default_factory=set)
    """Dealt layouts that offload nothing and fit, with the layers of their stages: equation (F7)."""
    nearest: set[tuple[int, ...]] = field(default_factory=set)
    """Places of those groups of layouts whose bound is clearly the least of their family and ZeRO stage, else of those
    that need least memory."""
    unproven: list[Open] = field(default_factory=list)
    """Layouts whose best order may be better than the one that was found."""
    synthesis_work: float = SEARCH_WORK
    """Left for CP-SAT on orders: equation (Y4)."""

    @property
    def wish(self) -> tuple[str, ...]:
        """Recompute modes that the job permits."""
        return recompute_wish(self.work.job.constraints.get("recompute"))

    @property
    def limit_ticks(self) -> int:
        """What a further layout has to beat."""
        return min(self.best.ticks, self.ceiling) if self.best else self.ceiling

    @property
    def is_open(self) -> bool:
        """Something open may beat the limit."""
        return bool(self.heap) and self.heap[0].bound_ticks < self.limit_ticks

    @property
    def is_proven(self) -> bool:
        """Nothing may beat the limit, open or not."""
        return self.least_ticks >= self.limit_ticks

    @property
    def left(self) -> list[Open]:
        """What may beat the limit."""
        return [
            one
            for one in (*self.heap, *self.unproven)
            if one.bound_ticks < self.limit_ticks
        ]

    @property
    def least_ticks(self) -> int:
        """Least bound of what is left; without any, the limit."""
        unproven = min(
            (one.bound_ticks for one in self.unproven), default=self.limit_ticks
        )
        return min(
            self.heap[0].bound_ticks if self.heap else self.limit_ticks,
            unproven,
            self.limit_ticks,
        )

    def settle(self) -> None:
        """What is no better than the limit is closed."""
        if not self.is_open:
            self.heap.clear()

    def seconds_left(self) -> float:
        """Until the time limit; nothing once the caller wants to stop."""
        if self.callbacks.should_stop and self.callbacks.should_stop():
            return 0.0
        return self.deadline - time.monotonic()

    def take(self, found: Candidate) -> None:
        """Keep a plan that beats the incumbent; of others, the best of a few degrees."""
        if found.ticks < self.limit_ticks:
            self.best = found
        known = self.met.get(found.degrees)
        if known is None or found.ticks < known.ticks:
            self.met[found.degrees] = found
        if len(self.met) > _MET:
            del self.met[max(self.met, key=lambda degrees: self.met[degrees].ticks)]

    def close(self, one: Open) -> None:
        """No stage map of it fits and beats the incumbent; without anything to beat, none fits at all."""
        if self.limit_ticks == NO_LIMIT:
            self.bounds.pop(one.order, None)
        else:
            self.bounds[one.order] = replace(
                one, bound_ticks=max(one.bound_ticks, self.limit_ticks)
            )

    def push(self, one: Open) -> None:
        """Open a part of the space, again with a better bound or for the first time."""
        self.bounds[one.order] = one
        heapq.heappush(self.heap, one)

    def report(self) -> SearchReport:
        """Equation (F4)."""
        incumbent, bound = self.best.ticks if self.best else None, self.least_ticks
        gap = (incumbent - bound) / incumbent if incumbent else 0.0
        still_open = sum(one.count for one in self.left)
        solved = solved_of(
            self.solved, is_proven=incumbent is not None and gap <= _OPTIMAL_GAP
        )
        return SearchReport(
            layouts_considered=self.considered,
            layouts_pruned=self.considered - solved - still_open,
            layouts_solved=solved,
            seconds=round(time.monotonic() - self.started, 3),
            lower_bound_seconds=bound * TICK_SECONDS if bound < NO_LIMIT else 0.0,
            gap=gap,
            optimal=gap <= _OPTIMAL_GAP
            and (incumbent is not None or not (self.heap or self.unproven)),
        )

    def tell(self) -> None:
        """Report progress."""
        if self.callbacks.on_progress is None:
            return
        report = self.report()
        self.callbacks.on_progress(
            Progress(
                layouts_considered=self.considered,
                layouts_done=report.layouts_pruned + report.layouts_solved,
                incumbent_seconds=self.best.ticks * TICK_SECONDS if self.best else None,
                lower_bound_seconds=report.lower_bound_seconds,
                gap=report.gap if self.best else None,
                elapsed_seconds=report.seconds,
            )
        )


def solved_of(solved: int, *, is_proven: bool) -> int:
    """How many layouts were solved: that of a proven plan is one, even if the first plan met the least bound."""
    return max(solved, int(is_proven))
