"""The loop of the search: bound rows, bound their options, solve exactly.

Order is (bound, row, option), and the stop criteria see work instead of time, so that
equal requests have equal answers on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from planner.cost import Workload
from planner.search.engine.bound import IMPOSSIBLE, Order, lower_bound
from planner.search.engine.cut import all_cuts_of
from planner.search.engine.division import given_sizes
from planner.search.engine.first_plan import find_first_plan
from planner.search.engine.garbage import rare_collection
from planner.search.engine.neighbours import solve_neighbours
from planner.search.engine.options import (
    Option,
    Options,
    Row,
)
from planner.search.engine.prices import Floats, Prices, Pricing
from planner.search.engine.prune import EquivalentRows, prune_rows
from planner.search.engine.result import Candidate, Progress, Result
from planner.search.engine.row_bounds import RowBounds
from planner.search.engine.rule import CutBounds, RuleCuts, Sizes
from planner.search.engine.solve import PROMISING, Item, RowSolver, has_few_cuts
from planner.search.engine.space import Space, whole_space
from planner.search.engine.split_backward import forbids_recompute
from planner.search.engine.stop import (
    BOUND_WORK,
    OPTION_WORK,
    PRICE_WORK,
    GapStop,
    Stop,
)
from planner.search.engine.synthesize import (
    SEARCH_EFFORT,
    OrderSolver,
    is_synthesized,
)
from planner.search.engine.table import enumerate_table

BATCH = 64
"""Rows whose options are bounded at a time."""
_UNKNOWN = -1
"""Bound of a row that is not computed yet."""


def plan_space(
    work: Workload,
    space: Space | None = None,
    stop: Stop | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Search a space for the fastest plan.

    Args:
        work: what is planned, on one kind of device.
        space: None: everything that the runtime can run.
        stop: None: when the plan is proven.
        on_progress: called after every step of the loop and every better first plan.
    """
    search = Search(work, space or whole_space(work))
    return search.run(stop or GapStop(), on_progress)


@dataclass(order=True)
class Node:
    """A row, or a row with an option, and a bound on its step."""

    nanoseconds: int
    """Lower bound over the cuts that the row is solved with."""
    index: int
    """Of the row."""
    place: int
    """Of the option; -1: the option is open."""
    bound_all_cuts: int = field(compare=False)
    """Lower bound in nanoseconds over all cuts."""
    cuts: tuple[Sizes, ...] = field(compare=False)
    """To start from; empty: all cuts, the solver's own, or the node is pruned."""
    item: Item | None = field(compare=False, default=None)
    """What to solve; None: the option is open."""
    solver: OrderSolver | None = field(compare=False, default=None)
    """Of a synthesized order, once the bound is that of all orders."""


class Search:
    """One search and its state."""

    def __init__(self, work: Workload, space: Space, ceiling: int = IMPOSSIBLE) -> None:
        """Enumerate the table."""
        self.work = work
        self.space = space
        self.ceiling = ceiling
        self.options = Options(work, space)
        self.pricing = Pricing(work, self.options)
        self.table = enumerate_table(work, space)
        self.work_bounds = RowBounds(space, self.options, self.pricing)
        self._known_bounds = np.full(len(self.table), _UNKNOWN, dtype=np.int64)
        self.is_started = False
        self.next_row = 0
        self.is_closed = np.zeros(len(self.table), dtype=np.bool_)
        self.queue: list[Node] = []
        self.unproven: list[Node] = []
        self.order_effort = SEARCH_EFFORT
        self.best: Candidate | None = None
        self.solved_around: Row | None = None
        """The row whose neighbours were solved."""
        self.least_excluded = IMPOSSIBLE
        self.counted_work = 0
        """Units of `planner.search.engine.stop`, without those of prices."""
        self.priced_before = 0
        """Layouts that were priced before this search, where it shares prices."""
        self.bounded = 0
        self.solved = 0

    @cached_property
    def row_bounds(self) -> NDArray[np.int64]:
        """Nanoseconds that every row takes at least, by the work of its layers."""
        return self.bounds_by_work(np.arange(len(self.table)))

    @cached_property
    def rows(self) -> NDArray[np.intp]:
        """Rows that may fit, in the order of these bounds."""
        order = np.argsort(self.row_bounds, kind="stable")
        return order[self.row_bounds[order] < IMPOSSIBLE]

    def bounds_by_work(self, indices: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return `row_bounds` of some rows, and compute no others."""
        bounds = self._known_bounds
        unknown = indices[bounds[indices] == _UNKNOWN]
        if len(unknown):
            bounds[unknown] = self.work_bounds.of(self.table.take(unknown))
        return bounds[indices]

    def in_order(self, mask: NDArray[np.bool_]) -> list[int]:
        """Return rows of a mask that may beat the limit, least `row_bounds` first."""
        rows = np.flatnonzero(mask)
        bounds = self.bounds_by_work(rows)
        order = np.argsort(bounds, kind="stable")
        found: list[int] = rows[order[bounds[order] < self.limit]].tolist()
        return found

    @property
    def limit(self) -> int:
        """Nanoseconds that a plan has to beat; `IMPOSSIBLE` where any plan counts."""
        if self.best is None:
            return self.ceiling
        return min(self.best.total, self.ceiling)

    def lower_ceiling(self, nanoseconds: int) -> None:
        """From now on let only plans below a step count."""
        self.ceiling = min(self.ceiling, nanoseconds)

    @property
    def work_done(self) -> int:
        """Work so far, in units of `planner.search.engine.stop`."""
        priced = self.pricing.priced - self.priced_before
        return self.counted_work + PRICE_WORK * priced

    @property
    def least(self) -> int:
        """The least bound of all that is open."""
        return min(self.least_node_bound, self._least_row_bound())

    @property
    def lower_bound(self) -> int:
        """The least bound of all that may beat the limit, open or unproven.

        A layout is unproven if its synthesized order may not be the best one.
        """
        unproven = (node.nanoseconds for node in self.unproven)
        return min(self.least, min(unproven, default=IMPOSSIBLE), self.limit)

    @property
    def least_node_bound(self) -> int:
        """The least bound of the queue."""
        return self.queue[0].nanoseconds if self.queue else IMPOSSIBLE

    def run(
        self, stop: Stop, on_progress: Callable[[Progress], None] | None = None
    ) -> Result:
        """Search until a stop criterion is met or nothing is open."""

        def report() -> None:
            if on_progress:
                on_progress(self.progress())

        def is_over() -> bool:
            return stop(self._total(), 0, self.work_done)

        with rare_collection():
            self.start(is_over, report)
            while self.is_open and not self._is_stopped(stop):
                self.advance()
                report()
            # A stop may end the proof, but the rows around a proven plan are still solved.
            while self.least >= self.limit and self._has_neighbours:
                self.advance()
                report()
        return self.result()

    def _is_stopped(self, stop: Stop) -> bool:
        return stop(self._total(), self.lower_bound, self.work_done)

    def start(
        self,
        is_over: Callable[[], bool] = lambda: False,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        """Find an incumbent, then prune the rows that cannot beat it.

        Args:
            is_over: whether to stop as soon as there is an incumbent.
            report: called whenever the incumbent may be better.
        """
        find_first_plan(self, is_over, report)
        prune_rows(self, is_over)
        self.is_started = True
        report()

    @property
    def is_open(self) -> bool:
        """Whether a node may beat the limit, or the incumbent's neighbours are unsolved."""
        return self.least < self.limit or self._has_neighbours

    @property
    def _has_neighbours(self) -> bool:
        """Whether the rows around the best one are still to be solved."""
        return self.best is not None and self.best.row != self.solved_around

    def advance(self) -> None:
        """Bound the next rows, or take up the node of least bound, or the neighbours."""
        if self.least >= self.limit:
            assert self.best is not None
            self.solved_around = self.best.row
            solve_neighbours(self)
        elif self._least_row_bound() <= self.least_node_bound:
            self.bound_rows(self._next_rows())
        else:
            self.expand(heapq.heappop(self.queue))

    def progress(self) -> Progress:
        """Return the state of the search; nothing is bounded before it is started."""
        return Progress(
            rows=len(self.table),
            rows_passed=self.next_row,
            options_bounded=self.bounded,
            solved=self.solved,
            best=self._total(),
            lower_bound=self.lower_bound if self.is_started else 0,
            work_done=self.work_done,
        )

    def _total(self) -> int | None:
        return None if self.best is None else self.best.total

    def _least_row_bound(self) -> int:
        if self.next_row >= len(self.rows):
            return IMPOSSIBLE
        return int(self.row_bounds[self.rows[self.next_row]])

    def _next_rows(self) -> list[int]:
        """Return the rows with the least bounds that are below the best step."""
        found: list[int] = []
        while len(found) < BATCH and self._least_row_bound() < self.limit:
            index = int(self.rows[self.next_row])
            self.next_row += 1
            if not self.is_closed[index]:
                found.append(index)
        if self._least_row_bound() >= self.limit:
            self.next_row = len(self.rows)
        return found

    def bound_rows(self, indices: Iterable[int]) -> None:
        """Bound some rows over all their options, and queue those below the limit."""
        for index in indices:
            self.is_closed[index] = True
            node = self.bound_row(index)
            self.push(node)

    def push(self, node: Node) -> None:
        """Queue a node that may beat the limit."""
        if node.nanoseconds < self.limit:
            heapq.heappush(self.queue, node)
        else:
            self.least_excluded = min(self.least_excluded, node.bound_all_cuts)

    def bound_row(self, index: int) -> Node:
        """Return a row with a bound on its step over all its options."""
        self.counted_work += BOUND_WORK
        row = Row.of(self.table, index)
        order = self.order(row)
        prices = self.pricing.least(row)
        if prices is None:
            return Node(IMPOSSIBLE, index, -1, IMPOSSIBLE, ())
        work_only = int(self.bounds_by_work(np.array([index]))[0])
        bound = lower_bound(prices, order, self.limit)
        bound_all_cuts = max(work_only, bound)
        if bound_all_cuts >= self.limit:
            return Node(bound_all_cuts, index, -1, bound_all_cuts, ())
        rule = RuleCuts(prices, order)
        cuts = self._rule_cuts(rule)
        if not cuts:
            bound_all_cuts = max(bound_all_cuts, self._least_of_all_cuts(rule))
            return Node(bound_all_cuts, index, -1, bound_all_cuts, cuts)
        least = max(bound_all_cuts, int(self._rule_bounds(rule.bounds, cuts)[0]))
        return Node(least, index, -1, bound_all_cuts, cuts)

    def _least_of_all_cuts(self, rule: RuleCuts) -> int:
        """Return nanoseconds that no cut beats where all are evaluated; else 0."""
        if is_synthesized(rule.order.schedule):
            return 0
        stages = rule.order.ranks * rule.order.virtual_stages
        cuts = all_cuts_of(len(rule.prices.kind_of), stages)
        least = rule.bounds.bounds(cuts, float(self.limit)).min()
        return int(min(float(IMPOSSIBLE), least))

    def _rule_cuts(self, rule: RuleCuts) -> tuple[Sizes, ...]:
        """Return the cuts that a row is solved with; empty: all, or the solver's own."""
        if is_synthesized(rule.order.schedule):
            return ()
        stages = rule.order.ranks * rule.order.virtual_stages
        fixed = given_sizes(self.work, stages)
        if fixed is not None:
            return (fixed,)
        if has_few_cuts(len(rule.prices.kind_of), stages):
            return ()
        return rule.sizes

    def _rule_bounds(self, bounds: CutBounds, cuts: tuple[Sizes, ...]) -> Floats:
        """Return the nanoseconds by which options are ordered and pruned.

        They are the least bound on a cut of the rule. Moves of layers start from cuts
        within `PROMISING` times the best step, so that the bound is divided by that.
        """
        limit = PROMISING * self.limit
        if bounds.has_one_option:
            least = bounds.bounds(cuts, limit).min(keepdims=True)
        else:
            least = np.min([bounds.bounds([sizes], limit) for sizes in cuts], axis=0)
        stages = len(cuts[0])
        if stages > 1 and given_sizes(self.work, stages) is None:
            least = least / PROMISING
        limited: Floats = np.minimum(float(IMPOSSIBLE), least)
        return limited

    def expand(
        self,
        node: Node,
        *,
        moves: bool = True,
        options: Sequence[tuple[int, Option]] | None = None,
    ) -> bool:
        """Bound the options of a row, or solve a row with an option.

        Args:
            node: least of the queue.
            moves: try to move layers between stages.
            options: those that count; None: all that no other one dominates.

        Returns:
            Whether it was solved.
        """
        if node.item is not None:
            if is_synthesized(node.item.order.schedule):
                return self._expand_order(node, node.item, moves=moves)
            self._solve(node, node.item, moves=moves)
            return True
        row = Row.of(self.table, node.index)
        if options is None:
            options = self._promising_options(row)
        for one in self.bound_options(node, row, options):
            self.push(one)
        self.bounded += len(options)
        self.counted_work += OPTION_WORK * len(options)
        return False

    def _promising_options(self, row: Row) -> list[tuple[int, Option]]:
        """Return options of a row that may beat the limit and that none dominates."""
        options = self.options.of(row)
        self.counted_work += OPTION_WORK * len(options)
        may = EquivalentRows(self, row, [self.order(row)]).options_may_beat(options)[
            :, 0
        ]
        return self.pricing.undominated(row, list(compress(enumerate(options), may)))

    def bound_options(
        self, node: Node, row: Row, options: Sequence[tuple[int, Option]]
    ) -> Iterator[Node]:
        """Yield a row with each of some options, and a bound on its step."""
        if not options:
            return
        order = self.order(row)
        chosen = [option for _, option in options]
        least = np.full(len(options), float(node.nanoseconds))
        if node.cuts:
            stacks = self.pricing.stacks(row, chosen)
            bounds = CutBounds(stacks, order)
            by_rule = self._rule_bounds(bounds, node.cuts)
            least = np.maximum(least, by_rule)
            may_fit = self._may_repair(bounds, node.cuts) & (by_rule >= IMPOSSIBLE)
        for number, (place, option) in enumerate(options):
            bound_all_cuts, cuts = node.bound_all_cuts, node.cuts
            nanoseconds = float(least[number])
            if cuts and may_fit[number]:
                prices = self.pricing.prices(row, option)
                rule = RuleCuts(prices, order)
                cuts = rule.sizes
                nanoseconds = float(self._rule_bounds(rule.bounds, cuts)[0])
                nanoseconds = max(float(node.nanoseconds), nanoseconds)
            if nanoseconds >= self.limit:
                yield Node(int(nanoseconds), node.index, place, bound_all_cuts, ())
                continue
            prices = self.pricing.prices(row, option)
            if row.virtual_stages == 1 or not node.cuts:
                bound = lower_bound(prices, order, self.limit)
                bound_all_cuts = max(bound_all_cuts, bound)
            if not node.cuts and bound_all_cuts < self.limit:
                rule = RuleCuts(prices, order)
                bound_all_cuts = max(bound_all_cuts, self._least_of_all_cuts(rule))
            item = self._item(row, option, prices, cuts)
            bound = max(int(nanoseconds), bound_all_cuts)
            yield Node(bound, node.index, place, bound_all_cuts, cuts, item)

    def _may_repair(
        self, bounds: CutBounds, cuts: tuple[Sizes, ...]
    ) -> NDArray[np.bool_]:
        """Return per option whether cuts may fit after moves to ranks with free memory."""
        if given_sizes(self.work, len(cuts[0])) is not None:
            return np.zeros(len(bounds.free(cuts[:1])), dtype=np.bool_)
        free = [bounds.free([sizes]).max(axis=1) for sizes in cuts]
        least = np.min([bounds.times(sizes) for sizes in cuts], axis=0)
        has_memory = np.max(free, axis=0) > 0
        is_fast = least < PROMISING * self.limit
        may_repair: NDArray[np.bool_] = has_memory & is_fast
        return may_repair

    def _item(
        self, row: Row, option: Option, prices: Prices, cuts: tuple[Sizes, ...]
    ) -> Item:
        """Return what is solved of a row with an option."""
        order = self.order(row)
        return Item(
            row=row,
            option=option,
            prices=prices,
            costs=self.pricing.costs(row, option),
            order=order,
            cuts=cuts,
            modes=self._uniform_modes(order.schedule),
        )

    def order(self, row: Row) -> Order:
        """Return the schedule of a row and its numbers."""
        name = self.space.schedules[row.schedule]
        numbers = (row.pipeline, row.micro_batches, row.virtual_stages)
        return Order(name, *numbers, row.sequence_chunks)

    def orders(self, indices: NDArray[np.intp]) -> list[Order]:
        """Return the schedules of several rows and their numbers."""
        rows = self.table.take(indices)
        schedules = [self.space.schedules[place] for place in rows.schedule.tolist()]
        numbers = (rows.pipeline, rows.micro_batches, rows.virtual_stages)
        columns = [each.tolist() for each in (*numbers, rows.sequence_chunks)]
        return list(map(Order, schedules, *columns))

    def _uniform_modes(self, schedule: str) -> tuple[str, ...]:
        """Return the modes that all layers share where a runtime has no mixtures."""
        supported = self.work.framework.supports.allowed("recompute")
        if forbids_recompute(schedule):
            return ("none",)
        if supported is None or "per-layer" in supported:
            return ()
        return self.pricing.wanted

    def _solve(self, node: Node, item: Item, *, moves: bool) -> None:
        """Solve a row with an option, and keep its plan if it is the best."""
        if node.cuts:
            self.least_excluded = min(self.least_excluded, node.bound_all_cuts)
        solver = RowSolver(item)
        self._keep(solver, solver.solve(self.limit, moves=moves))

    def _keep(self, solver: RowSolver, found: Candidate | None) -> None:
        """Count the work of a solver, and keep its plan if it is the best."""
        self.solved += 1
        self.counted_work += solver.actions
        if found is not None and found.total < self.limit:
            self.best = found

    def exchange_recomputation(self) -> None:
        """Exchange recomputation between the incumbent's stages if that makes it faster."""
        best = self.best
        assert best is not None
        if is_synthesized(best.schedule.name):
            return
        prices = self.pricing.prices(best.row, best.option)
        solver = RowSolver(self._item(best.row, best.option, prices, ()))
        found = solver.exchanged(best.stage_map)
        self.counted_work += solver.actions
        if found.total < self.limit:
            self.best = found

    def solve_from_any_cut(self, row: Row, option: Option, cut: Sizes) -> None:
        """Solve a row with an option, moving layers from every cut to start from.

        Args:
            row: of the table.
            option: for the row.
            cut: a further one to start from, if it has as many stages.
        """
        order = self.order(row)
        stages = order.ranks * order.virtual_stages
        if given_sizes(self.work, stages) is not None:
            return
        prices = self.pricing.prices(row, option)
        if lower_bound(prices, order, self.limit) >= self.limit:
            return
        cuts = [*RuleCuts(prices, order).sizes]
        least = self.pricing.least(row)
        if least is not None:
            cuts += RuleCuts(least, order).sizes
        if len(cut) == stages:
            cuts.append(cut)
        distinct = tuple(dict.fromkeys(cuts))
        solver = RowSolver(self._item(row, option, prices, distinct))
        self._keep(solver, solver.solve(self.limit, from_any_cut=True))

    def _expand_order(self, node: Node, item: Item, *, moves: bool) -> bool:
        """Bound the orders of a layout, or look for its best order.

        Returns:
            Whether it was looked for.
        """
        solver = node.solver or OrderSolver(item)
        before = solver.actions
        if node.solver is None:
            least = max(node.nanoseconds, solver.least())
            bound_all_cuts = least if solver.has_fixed_cut else node.bound_all_cuts
            self.push(
                replace(
                    node,
                    nanoseconds=least,
                    bound_all_cuts=bound_all_cuts,
                    solver=solver,
                )
            )
            self.counted_work += solver.actions - before
            return False
        solver.more = self.order_effort
        found = solver.solve(self.limit, moves=moves)
        self.order_effort = solver.more
        self.solved += 1
        self.counted_work += solver.actions - before
        if found is not None and found.total < self.limit:
            self.best = found
        self.least_excluded = min(self.least_excluded, node.bound_all_cuts)
        bound = max(node.nanoseconds, solver.bound)
        if bound < self.limit:
            self.unproven.append(replace(node, nanoseconds=bound, solver=None))
        return True

    def result(self) -> Result:
        """Return the best plan so far and what is proven about it."""
        least = self.lower_bound
        open_rows = np.flatnonzero(~self.is_closed[self.rows[self.next_row :]])
        return Result(
            best=self.best,
            lower_bound=least,
            lower_bound_all_cuts=min(least, self.least_excluded),
            open_nodes=len(self.queue) + len(open_rows),
            space=self.space,
            progress=self.progress(),
        )
