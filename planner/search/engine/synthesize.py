"""Orders of micro-batches that are made for the stages of a layout.

Schedules of the catalogue follow from the numbers of ranks and micro-batches alone. A
synthesized one follows from the durations of the stages and the memory of the devices:

    (Y1) layers are assigned by the rule of `planner.search.engine.balance`, and all have
         one recompute mode; several stages per rank lie in a loop or in a V, whichever
         has the shorter step                                                   -> Case
    (Y2) the order runs the durations and tails of the stages within the memory that
         every device has free for activations; backwards are split if nothing
         recomputes                                                    -> order_problem()
    (Y3) no order is shorter than `OrderProblem.bound`                   -> Case.bound
    (Y4) the first order is the best of those that need no search. If it is not proven
         and has at most `SOLVED_ACTIONS` actions, CP-SAT looks for a better one
                                                                      -> CaseSearch.best()

CP-SAT is limited by its own measure of work, so that the same layout always has the same
order. What it does not prove remains open: the bound of the layout counts in the gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner.cost import (
    LayerCost,
    LayoutCosts,
    StageLayers,
    StageMap,
    choose,
    durations,
    evaluate,
    stage_memory,
    tail_ticks,
)
from planner.cost.memory import unit_bytes
from planner.cost.step import by_rank
from planner.errors import UnsupportedError
from planner.schedule import Placement, Schedule, find
from planner.schedule.greedy import backward_first
from planner.schedule.order_bound import SPLIT
from planner.schedule.order_model import Effort
from planner.schedule.order_problem import Objective, OrderProblem
from planner.schedule.room import Room
from planner.schedule.synthesize import (
    MOST_ACTIONS,
    Synthesis,
    best_known,
    best_order,
    best_shape,
)
from planner.schedule.synthesized import NAME
from planner.search.engine.balance import balanced_cut
from planner.search.engine.bound import IMPOSSIBLE
from planner.search.engine.constraints import recompute_modes
from planner.search.engine.division import given_sizes
from planner.search.engine.result import Candidate
from planner.search.engine.solve import Item, RowSolver
from planner.search.engine.stop import CUT_WORK, WORK_PER_SECOND
from planner.spec.profile import RecomputeMode
from planner.spec.recompute import MODES

SOLVED_ACTIONS = 512
"""Actions up to which CP-SAT is asked; it improves no longer order within its work. 8
ranks with 16 micro-batches have 384."""
ORDER_EFFORT = 0.25
"""CP-SAT's deterministic time for the order of one case."""
FREE_SHARE = 0.6
"""Share of that without a limit on the step."""
BRIEF_EFFORT = 0.05
"""The same for an alternative of the plan."""
SEARCH_EFFORT = 2.0
"""The same, over all cases of a search whose first order does not beat the best plan."""
FIRST_ORDER_WORK = 40
"""Work of the orders that need no search, for every action of one of them."""


def is_synthesized(schedule: str) -> bool:
    """Return whether a schedule's order is made for the stages of a layout."""
    return find(schedule).needs_durations


def order_length(ranks: int, micro_batches: int, virtual_stages: int) -> int:
    """Return the most actions that an order of whole sequences has."""
    return len(SPLIT) * ranks * micro_batches * virtual_stages


def order_problem(
    costs: LayoutCosts, stage_map: StageMap, shape: Schedule
) -> OrderProblem:
    """Return the question for the best order of a layout's stages: (Y2).

    Args:
        costs: of the layout, whose ranks are equal.
        stage_map: layers and modes of every stage.
        shape: the rank of every stage; its actions do not count.
    """
    stages = choose(costs, stage_map)
    tails = tail_ticks(costs, by_rank(shape, stages))
    modes = {mode for stage in stage_map for _, mode in stage}
    staggers = costs.work.framework.staggers_steps
    return OrderProblem(
        shape=shape,
        durations=durations(costs, stages),
        room=free_memory(costs, stages, shape),
        tails=tuple(map(sum, tails)),
        is_split=modes == {"none"},
        objective=Objective.SPAN if staggers else Objective.MAKESPAN,
    )


def free_memory(
    costs: LayoutCosts, stages: Sequence[StageLayers], shape: Schedule
) -> Room:
    """Return the bytes of a unit of every stage, and those that ranks have for units.

    A rank whose states overflow its host has none.
    """
    units = [unit_bytes(costs, stages, stage) for stage in range(shape.stages)]
    once = replace(one_by_one(shape), micro_batches=1, sequence_chunks=1)
    free = []
    for row in stage_memory(costs, stages, once):
        mine = shape.stages_of(row.pipeline_rank)
        resident = sum(units[stage] for stage in mine)
        spare = row.capacity_bytes - row.peak_bytes + resident
        free.append(spare if row.fits_host else -1)
    return Room(tuple(units), tuple(free))


def one_by_one(shape: Schedule, micro_batches: int = 1) -> Schedule:
    """Return the order that runs one micro-batch after the other.

    No order of the same stages needs less memory.
    """
    actions = backward_first(shape.stage_ranks, micro_batches, limit=1)
    return replace(shape, actions=actions)


def shapes(costs: LayoutCosts) -> tuple[Schedule, ...]:
    """Return the stages of a layout on its ranks, without actions: a V, then a loop."""
    layout = costs.layout
    virtual_stages = layout.virtual_stages_per_rank
    ranks = layout.pipeline_parallel_degree
    found = []
    for placement in Placement:
        numbers = (ranks, costs.micro_batches, virtual_stages, layout.sequence_chunks)
        found.append(best_shape(*numbers, placement))
    return tuple(found[:1] if virtual_stages == 1 else found)


@dataclass(frozen=True)
class Case:
    """A recompute mode and a placement of the stages, and the question for the order."""

    costs: LayoutCosts
    """Of the layout with the mode."""
    stage_map: StageMap
    problem: OrderProblem

    @classmethod
    def of(cls, costs: LayoutCosts, mode: RecomputeMode, shape: Schedule) -> Case:
        """Assign the layers to stages: (Y1).

        Args:
            costs: of the layout, with any mode.
            mode: of all layers that offer it; others recompute least.
            shape: the rank of every stage.
        """
        layout = costs.layout.model_copy(update={"recompute": mode})
        costs = costs.under(layout)
        layers = [_in_mode(options, mode) for options in costs.layers]
        works = tuple(each.forward_ticks + each.backward_ticks for each in layers)
        sizes = given_sizes(costs.work, shape.stages) or balanced_cut(
            works, shape.stage_ranks
        )
        modes = enumerate(each.mode for each in layers)
        stage_map = tuple(tuple(next(modes) for _ in range(size)) for size in sizes)
        return cls(costs, stage_map, order_problem(costs, stage_map, shape))

    @property
    def fits(self) -> bool:
        """Whether some order fits in memory."""
        return self.problem.room.is_enough(self.problem.shape)

    @cached_property
    def bound(self) -> int:
        """Nanoseconds that no order beats: (Y3)."""
        return math.ceil(self.problem.bound())

    def without_memory_limit(self) -> Case:
        """Return the case on devices with memory for everything."""
        room = Room.of_units(self.problem.shape, None)
        return replace(self, problem=replace(self.problem, room=room))


@dataclass
class CaseSearch:
    """Finds the best order over the placements of one layout with one mode: (Y4).

    The order depends on the layout alone, and not on what else a search found, so that
    `planner predict` returns the order of a plan.
    """

    cases: Sequence[Case]
    """Those of which some order fits."""
    effort: float = ORDER_EFFORT
    """CP-SAT's deterministic time for the order of one case."""

    def __post_init__(self) -> None:
        """Sort the cases by their bounds."""
        self.cases = sorted(self.cases, key=lambda one: one.bound)
        self.bound = min((one.bound for one in self.cases), default=IMPOSSIBLE)
        """Nanoseconds that no order of any case beats."""
        self.spent = 0.0
        """CP-SAT's deterministic time so far."""
        self.work = 0
        """Work so far, in units of `planner.search.engine.stop`."""

    @cached_property
    def first_orders(self) -> list[Synthesis | None]:
        """The best order of every case that needs no search."""
        for case in self.cases:
            self.work += FIRST_ORDER_WORK * case.problem.actions
        return [best_known(case.problem) for case in self.cases]

    def has_first_below(self, limit: int) -> bool:
        """Return whether an order that needs no search is shorter than a limit."""
        return any(one is not None and one.value < limit for one in self.first_orders)

    def best(self) -> tuple[Case, Synthesis] | None:
        """Return the case with the shortest order that was found; None: there is none."""
        best: tuple[Case, Synthesis] | None = None
        bounds = [IMPOSSIBLE]
        for case, first in zip(self.cases, self.first_orders, strict=True):
            bounds.append(case.bound)
            if first is None or (best is not None and case.bound >= best[1].value):
                continue
            found = self._improved(case.problem, first)
            bounds[-1] = math.ceil(found.lower_bound)
            if best is None or found.value < best[1].value:
                best = (case, found)
        self.bound = min(bounds)
        return best

    def _improved(self, problem: OrderProblem, first: Synthesis) -> Synthesis:
        """Return the best order that CP-SAT finds, with the bound that it proves.

        If a first part of the effort proves nothing, the rest looks for an order in the
        lower half between bound and best order: CP-SAT excludes more below a limit.
        """
        if problem.actions > SOLVED_ACTIONS:
            return first
        begun = self.spent
        found = self._ask(problem, first, FREE_SHARE * self.effort, None)
        left = self.effort - (self.spent - begun)
        middle = math.ceil((found.lower_bound + found.value) / 2)
        if not found.lower_bound < middle < found.value or left <= 0:
            return found
        shorter = self._ask(problem, found, left, middle)
        return min(shorter, replace(found, lower_bound=shorter.lower_bound), key=_value)

    def _ask(
        self,
        problem: OrderProblem,
        known: Synthesis,
        effort: float,
        below: int | None,
    ) -> Synthesis:
        limits = Effort(deterministic=effort)
        found = best_order(problem, known, limits, below=below)
        self.spent += found.deterministic
        self.work += int(found.deterministic * WORK_PER_SECOND)
        return found


def _value(order: Synthesis) -> float:
    return order.value


@dataclass
class OrderSolver:
    """Finds the best plan of one row with an option, whose order is synthesized."""

    item: Item
    more: float = 0.0
    """CP-SAT's deterministic time for orders whose first one is not below the limit."""

    def __post_init__(self) -> None:
        """Start without any case."""
        self.actions = 0
        self.bound = 0

    @property
    def has_fixed_cut(self) -> bool:
        """Whether the job or the runtime fixes the layers of every stage."""
        order = self.item.order
        stages = order.ranks * order.virtual_stages
        return given_sizes(self.item.costs.work, stages) is not None

    @cached_property
    def cases(self) -> list[Case]:
        """The modes and placements of which some order fits."""
        every = list(cases_of(self.item.costs))
        self.actions += CUT_WORK * len(every)
        return [case for case in every if case.fits]

    def least(self) -> int:
        """Return the nanoseconds that no order beats without a search: (Y3)."""
        return min((case.bound for case in self.cases), default=IMPOSSIBLE)

    def solve(self, limit: int, *, moves: bool = True) -> Candidate | None:
        """Return the best plan that was found; None: none is below the limit.

        Args:
            limit: nanoseconds of a known step.
            moves: improve the order as far as `planner predict` does; else only the
                case of least bound counts.
        """
        best: tuple[Case, Schedule] | None = None
        bounds = [IMPOSSIBLE]
        for search in self._searches(moves=moves):
            bounds.append(search.bound)
            if search.bound >= limit:
                continue
            is_near = search.has_first_below(limit)
            if is_near or self.more > 0:
                found = search.best()
                bounds[-1] = search.bound
                self.more -= 0.0 if is_near else search.spent
                if found is not None and found[1].value < limit:
                    best = (found[0], found[1].schedule)
                    limit = int(found[1].value)
            self.actions += search.work
        self.bound = min(bounds) if moves else self.least()
        return None if best is None else self._candidate(*best)

    def _searches(self, *, moves: bool) -> list[CaseSearch]:
        """Return a search for every mode, the least bound first."""
        if not moves:
            cases = sorted(self.cases, key=lambda one: one.bound)
            return [CaseSearch(cases[:1], BRIEF_EFFORT)]
        by_mode: dict[str, list[Case]] = {}
        for case in self.cases:
            by_mode.setdefault(case.costs.layout.recompute, []).append(case)
        searches = map(CaseSearch, by_mode.values())
        return sorted(searches, key=lambda one: one.bound)

    def _candidate(self, case: Case, schedule: Schedule) -> Candidate:
        stages = choose(case.costs, case.stage_map)
        step = evaluate(case.costs, schedule, stages)
        item = self.item
        return Candidate(
            item.row, item.option, case.costs, schedule, case.stage_map, step
        )


def cases_of(costs: LayoutCosts) -> Iterator[Case]:
    """Yield every recompute mode and placement of a layout, whether it fits or not."""
    if costs.columns or costs.ranks:
        return
    for mode in uniform_modes(costs):
        for shape in shapes(costs):
            yield Case.of(costs, mode, shape)


def solver_of(item: Item) -> RowSolver | OrderSolver:
    """Return the solver of a row with an option, by its schedule."""
    if is_synthesized(item.order.schedule):
        return OrderSolver(item)
    return RowSolver(item)


def order_of_layout(costs: LayoutCosts) -> tuple[StageMap, Schedule]:
    """Return the stages and the order of one layout, whether they fit or not.

    Raises:
        UnsupportedError: no order is synthesized for such a layout.
    """
    check_synthesis(costs)
    mode = costs.layout.recompute
    assert mode != "per-layer"
    cases = [Case.of(costs, mode, shape) for shape in shapes(costs)]
    fitting = [case for case in cases if case.fits]
    possible = fitting or [case.without_memory_limit() for case in cases]
    found = CaseSearch(possible).best()
    assert found is not None, "some order fits"
    case, order = found
    return case.stage_map, order.schedule


def check_synthesis(costs: LayoutCosts) -> None:
    """Refuse a layout whose order cannot be synthesized.

    Raises:
        UnsupportedError: names the field that prevents it.
    """
    layout = costs.layout
    ranks, virtual_stages = (
        layout.pipeline_parallel_degree,
        layout.virtual_stages_per_rank,
    )
    length = order_length(ranks, costs.micro_batches, virtual_stages)
    if costs.columns or costs.ranks:
        raise _unsupported("schedule", "for ranks that differ", "use gpipe or 1f1b")
    if layout.activation_offload:
        raise _unsupported("activation_offload", "with activation offload", "use false")
    if layout.recompute == "per-layer":
        hint = "use none, selective or full"
        raise _unsupported("recompute", "with recomputation per layer", hint)
    if length > MOST_ACTIONS:
        reason = f"of {length} actions, more than {MOST_ACTIONS}"
        raise _unsupported("schedule", reason, "use another schedule")


def _unsupported(field: str, reason: str, hint: str) -> UnsupportedError:
    return UnsupportedError(
        f"no order is {NAME} {reason}.", field=f"layout.{field}", hint=f"{hint}."
    )


def uniform_modes(costs: LayoutCosts) -> tuple[RecomputeMode, ...]:
    """Return the recompute modes that all layers of a plan may have together.

    Layers that do not offer a mode recompute least. If the job lists modes, they may
    offer none of them.
    """
    constraint = costs.work.job.constraints.get("recompute")
    supported = costs.work.framework.supports.allowed("recompute")
    wanted = set(recompute_modes(constraint, supported))
    offers = [set(costs.layers[first]) for first, _ in costs.kinds]
    offered = set().union(*offers)
    permitted = wanted & offered or offered
    found: list[RecomputeMode] = []
    is_free = wanted >= set(recompute_modes(None, supported))
    for mode in MODES:
        is_uniform = all(mode in one or not one & wanted for one in offers)
        if mode in permitted and (is_uniform or is_free):
            found.append(mode)
    return tuple(found)


def _in_mode(
    options: Mapping[RecomputeMode, LayerCost], mode: RecomputeMode
) -> LayerCost:
    """Return the cost of a layer in a mode, or in its first one."""
    return options.get(mode) or next(iter(options.values()))
