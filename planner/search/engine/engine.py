"""The loop of the search: bound rows, bound their options, solve exactly.

Order is (bound, row, option), and the stop criteria see work instead of time, so that
equal requests have equal answers on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost import Workload
from planner.cost.placement import widest_expert_group
from planner.schedule import find
from planner.search.engine.bound import (
    IMPOSSIBLE,
    Bound,
    Order,
    lower_bound,
    splits_backward,
    timing_of,
    traits_of,
)
from planner.search.engine.options import RANK_ORDERS, Option, Options, Row
from planner.search.engine.prices import Prices, Pricing
from planner.search.engine.result import Candidate, Progress, Result
from planner.search.engine.solve import PROMISING, Item, RowSolver
from planner.search.engine.space import Space, whole_space
from planner.search.engine.stop import OPTION_WORK, GapStop, Stop
from planner.search.engine.table import Table, enumerate_table

BATCH = 64
"""Rows whose options are bounded at a time."""
FIRST_ROWS = 256
"""Rows of the coarse grid that the first plan comes from."""
FIRST_TRIED = 48
"""Rows that are solved for the first plan."""
FIRST_SOLVED = 6
"""Of those, how many after the first that fits."""
FIRST_ROUNDS = 3
"""Rounds of rows around the best plan."""
FIRST_AROUND = 512
FIRST_SCHEDULES = ("1f1b", "interleaved-1f1b", "seqpipe")
_ROUNDING = 1 - 1e-9


def plan_space(
    work: Workload,
    space: Space | None = None,
    stop: Stop | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    ceiling: int = IMPOSSIBLE,
) -> Result:
    """Search a space for the fastest plan.

    Args:
        work: what is planned, on one kind of device.
        space: None: everything that the runtime can run.
        stop: None: when the plan is proven.
        on_progress: called after every batch and improvement.
        ceiling: nanoseconds; only faster plans matter.
    """
    search = Search(work, space or whole_space(work), ceiling)
    return search.run(stop or GapStop(), on_progress)


@dataclass(order=True)
class Node:
    """A row with an option, and a bound on its step."""

    nanoseconds: int
    index: int
    """Of the row."""
    place: int
    """Of the option."""
    bound: Bound = field(compare=False)
    item: Item = field(compare=False)
    is_exact: bool = field(compare=False, default=False)
    """Its bound includes that of the cuts that are evaluated."""

    def branch(self) -> Node:
        """Return the node with a bound on the cuts of the schedule's rule.

        Moves of a layer start from a cut that is at most `PROMISING` times the best
        step; so much less than the bound of the rule's cuts is the node's.
        """
        solver = RowSolver(self.item)
        order = self.item.order
        nanoseconds = self.nanoseconds
        if order.ranks > 1 and not solver.has_few_cuts and not solver.fixed_sizes:
            named = min(float(IMPOSSIBLE), solver.first_bound() / PROMISING)
            nanoseconds = max(nanoseconds, int(named * _ROUNDING))
        return replace(self, nanoseconds=nanoseconds, is_exact=True)

    def solve(self, limit: int, *, moves: bool) -> tuple[Candidate | None, int]:
        """Return the best plan of the row, and the actions that were simulated."""
        solver = RowSolver(self.item)
        found = solver.solve(limit, moves=moves)
        return found, solver.actions


class Search:
    """One search and its state."""

    def __init__(
        self, work: Workload, space: Space, ceiling: int = IMPOSSIBLE
    ) -> None:
        """Enumerate the table and bound all rows by their work."""
        self.work = work
        self.space = space
        self.ceiling = ceiling
        self.options = Options(work, space)
        self.pricing = Pricing(work, self.options)
        self.table = enumerate_table(work, space)
        self.row_bounds = RowBounds(self).of(self.table)
        order = np.argsort(self.row_bounds, kind="stable")
        self.rows = order[self.row_bounds[order] < IMPOSSIBLE]
        self.next_row = 0
        self.is_taken = np.zeros(len(self.table), dtype=np.bool_)
        self.queue: list[Node] = []
        self.best: Candidate | None = None
        self.least_solved = IMPOSSIBLE
        self.done = 0
        self.bounded = 0
        self.solved = 0

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
    def least(self) -> int:
        """The least bound of all that is open."""
        return min(self._least_node(), self._least_row())

    def _least_node(self) -> int:
        return self.queue[0].nanoseconds if self.queue else IMPOSSIBLE

    def run(
        self, stop: Stop, on_progress: Callable[[Progress], None] | None = None
    ) -> Result:
        """Search until a stop criterion is met or nothing is open."""
        self.start()
        if on_progress:
            on_progress(self.progress())
        while self.is_open and not stop(self._total(), self.least, self.done):
            self.advance()
            if on_progress:
                on_progress(self.progress())
        return self.result()

    def start(self) -> None:
        """Look for a first plan."""
        self._first_plan()

    @property
    def is_open(self) -> bool:
        """Whether anything open may beat the limit."""
        return self.least < self.limit

    def advance(self) -> None:
        """Bound the next rows, or take up the node of least bound."""
        if self._least_row() <= self._least_node():
            self._bound_rows(self._next_rows())
        else:
            self._expand(heapq.heappop(self.queue))

    def progress(self) -> Progress:
        """Return the state of the search."""
        return Progress(
            rows=len(self.table),
            rows_bounded=self.next_row,
            options_bounded=self.bounded,
            solved=self.solved,
            best=self._total(),
            lower_bound=min(self.least, self.limit),
            work=self.done,
        )

    def _total(self) -> int | None:
        return None if self.best is None else self.best.total

    def _least_row(self) -> int:
        if self.next_row >= len(self.rows):
            return IMPOSSIBLE
        return int(self.row_bounds[self.rows[self.next_row]])

    def _next_rows(self) -> list[int]:
        """Return the rows with the least bounds that are below the best step."""
        found: list[int] = []
        while len(found) < BATCH and self._least_row() < self.limit:
            index = int(self.rows[self.next_row])
            self.next_row += 1
            if not self.is_taken[index]:
                found.append(index)
        if self._least_row() >= self.limit:
            self.next_row = len(self.rows)
        return found

    def _first_plan(self) -> None:
        """Solve the best rows of a coarse grid, then those around the best plan."""
        self._solve_some(self._coarse_rows(), FIRST_SOLVED, moves=False)
        for _ in range(FIRST_ROUNDS):
            if self.best is None:
                return
            before = self.best.row
            self._solve_some(self._rows_around(before), FIRST_SOLVED, moves=False)
            if self.best.row == before:
                break
        self._solve_some(self._same_rows(), 1, moves=True)

    def _solve_some(self, indices: list[int], count: int, *, moves: bool) -> None:
        """Solve up to a number of rows that fit, least bound first."""
        for index in indices:
            row = Row.of(self.table, index)
            rule = self._rule_bound(row)
            for place, option in self.pricing.undominated(row):
                is_slow = option.zero_stage <= 1 and rule >= self.limit
                if option.shard_degree is None and not is_slow:
                    self._queue(index, place, row, option)
        tried = fitting = 0
        while self.queue and fitting < count and self._least_node() < self.limit:
            if tried >= FIRST_TRIED and self.best is not None:
                break
            if self._expand(heapq.heappop(self.queue), moves=moves):
                tried += 1
                fitting += self.best is not None
        self.queue.clear()
        self.least_solved = IMPOSSIBLE

    def _rows_around(self, row: Row) -> list[int]:
        """Return rows whose degrees and size are a factor of 2 from a row's or equal."""
        table = self.table
        is_near = table.schedule == row.schedule
        for name in ("tensor", "pipeline", "micro_batch_size", "sequence_chunks"):
            value = getattr(row, name)
            is_near &= np.isin(getattr(table, name), (value // 2, value, 2 * value))
        is_near &= (table.context == row.context) & (table.expert == row.expert)
        return self._in_order(is_near)[:FIRST_AROUND]

    def _same_rows(self) -> list[int]:
        """Return the rows with the degrees and stages of the best plan."""
        if self.best is None:
            return []
        row = self.best.row
        is_same = self.table.split == row.split
        is_same &= self.table.pipeline == row.pipeline
        is_same &= self.table.virtual_stages == row.virtual_stages
        is_same &= self.table.sequence_chunks == row.sequence_chunks
        return self._in_order(is_same)

    def _in_order(self, mask: NDArray[np.bool_]) -> list[int]:
        """Return rows in the order of their bounds, as far as below the best step."""
        rows = self.rows[mask[self.rows]]
        found: list[int] = rows[self.row_bounds[rows] < self.limit].tolist()
        return found

    def _coarse_rows(self) -> list[int]:
        """Return the best row for every split of the model and few stages per rank."""
        table = self.table
        names = self.space.schedules
        simple = [i for i, name in enumerate(names) if name in FIRST_SCHEDULES]
        is_coarse = np.isin(table.schedule, simple)
        is_coarse &= np.isin(table.virtual_stages, (1, 2, 4, 8))
        is_coarse &= np.isin(table.micro_batch_size, (1, 2, 4))
        seen: set[tuple[int, ...]] = set()
        chosen: list[int] = []
        for index in self.rows[is_coarse[self.rows]].tolist():
            row = Row.of(table, index)
            key = (*row[1:6], row.virtual_stages)
            if key in seen:
                continue
            seen.add(key)
            chosen.append(index)
            if len(chosen) == FIRST_ROWS:
                break
        return chosen

    def _bound_rows(self, indices: list[int]) -> None:
        """Bound all options of some rows, and queue those below the best step."""
        for index in indices:
            self.is_taken[index] = True
            row = Row.of(self.table, index)
            rule = self._rule_bound(row)
            for place, option in self.pricing.undominated(row):
                if option.zero_stage <= 1 and rule >= self.limit:
                    bound = int(self.row_bounds[index])
                    self.least_solved = min(self.least_solved, bound)
                    continue
                self._queue(index, place, row, option)

    def _rule_bound(self, row: Row) -> int:
        """Return a bound on the cuts of the schedule's rule under ZeRO 0 and 1.

        Layers have equal forwards and backwards under both, so that the cuts are the
        same, and the fewest states under ZeRO 1 over all replicas. See `Node.branch`.
        """
        if self.best is None or row.pipeline == 1 or row.expert > 1:
            return 0
        order = self.order(row)
        is_split = traits_of(order).is_split
        option = Option(1, None, RANK_ORDERS[0])
        prices = self.pricing.prices(row, option, is_split=is_split)
        costs = self.pricing.costs(row, option)
        solver = RowSolver(Item(row, option, prices, costs, order))
        if solver.has_few_cuts or solver.fixed_sizes:
            return 0
        least = solver.first_bound() - prices.fixed_tail
        return int(min(float(IMPOSSIBLE), least / PROMISING) * _ROUNDING)

    def _queue(self, index: int, place: int, row: Row, option: Option) -> None:
        node = self.node(index, place, row, option, self.limit)
        self.bounded += 1
        self.done += OPTION_WORK
        if node.nanoseconds < self.limit:
            heapq.heappush(self.queue, node)

    def node(
        self, index: int, place: int, row: Row, option: Option, limit: int
    ) -> Node:
        """Return a row with an option and its bound.

        Args:
            index: of the row.
            place: of the option.
            row: of the table.
            option: for the row.
            limit: nanoseconds; a bound above them need not be exact.
        """
        order = self.order(row)
        is_split = traits_of(order).is_split
        prices = self.pricing.prices(row, option, is_split=is_split)
        costs = self.pricing.costs(row, option)
        bound = lower_bound(prices, order, timing_of(costs), limit)
        least = max(bound.nanoseconds, int(self.row_bounds[index]))
        item = Item(row, option, prices, costs, order, self._uniform_modes(is_split))
        return Node(least, index, place, bound, item)

    def order(self, row: Row) -> Order:
        """Return the schedule of a row and its numbers."""
        name = self.space.schedules[row.schedule]
        numbers = (row.pipeline, row.micro_batches, row.virtual_stages)
        return Order(name, *numbers, row.sequence_chunks)

    def _uniform_modes(self, is_split: bool) -> tuple[str, ...]:
        """Return the modes that all layers share where a runtime has no mixtures."""
        supported = self.work.framework.supports.allowed("recompute")
        if is_split:
            return ("none",)
        if supported is None or "per-layer" in supported:
            return ()
        return self.pricing.wanted

    def _expand(self, node: Node, *, moves: bool = True) -> bool:
        """Bound a node's cuts or solve it; return whether it was solved."""
        if node.is_exact:
            self._solve(node, moves=moves)
            return True
        self.done += OPTION_WORK
        branched = node.branch()
        if branched.nanoseconds < self.limit:
            heapq.heappush(self.queue, branched)
        else:
            self.least_solved = min(self.least_solved, node.bound.nanoseconds)
        return False

    def _solve(self, node: Node, *, moves: bool) -> None:
        self.least_solved = min(self.least_solved, node.bound.nanoseconds)
        if node.nanoseconds >= self.limit:
            return
        found, actions = node.solve(self.limit, moves=moves)
        self.solved += 1
        self.done += actions
        if found is not None and found.total < self.limit:
            self.best = found

    def result(self) -> Result:
        """Return the best plan so far and what is proven about it."""
        least = min(self.least, self.limit)
        return Result(
            best=self.best,
            lower_bound=least,
            lower_bound_all_cuts=min(least, self.least_solved),
            open_nodes=len(self.queue) + len(self.rows) - self.next_row,
            space=self.space,
            progress=self.progress(),
        )


class RowBounds:
    """Bounds of all rows by the work of their layers, before options are chosen."""

    def __init__(self, search: Search) -> None:
        """Price every split once, without ZeRO and with the nearest experts."""
        self.search = search
        self._prices: dict[tuple[object, ...], Prices] = {}

    def of(self, table: Table) -> NDArray[np.int64]:
        """Return a bound in nanoseconds for every row."""
        keys = np.stack(
            [table.split, table.sequence_chunks, table.data, table.pipeline], axis=1
        )
        if not len(table):
            return np.zeros(0, dtype=np.int64)
        is_dense = table.expert == 1
        keys[is_dense, 2:] = 0
        _, firsts, inverse = np.unique(
            keys, axis=0, return_index=True, return_inverse=True
        )
        work = np.zeros(len(firsts))
        saved = np.zeros(len(firsts))
        free = np.zeros(len(firsts))
        states = np.zeros(len(firsts))
        for place, first in enumerate(firsts.tolist()):
            row = Row.of(table, first)
            options = list(self._priced(row))
            work[place] = min(each.total_work for each in options)
            prices = options[0]
            saved[place] = float(prices.counts @ prices.least_activations)
            states[place] = float(prices.counts @ prices.states)
            free[place] = prices.free_bytes
        inverse = inverse.reshape(-1)
        steps = work[inverse] * self._growth(table)
        lean = states[inverse] / table.replicas + saved[inverse] / table.sequence_chunks
        is_impossible = lean > table.pipeline * free[inverse]
        steps[is_impossible] = IMPOSSIBLE
        return (steps * _ROUNDING).astype(np.int64)

    def _growth(self, table: Table) -> NDArray[np.float64]:
        """Return the least step / work of one micro-batch."""
        names = self.search.space.schedules
        simple = [names.index(name) for name in ("1f1b", "gpipe") if name in names]
        count = table.micro_batches.astype(np.float64)
        plain = np.isin(table.schedule, simple) & (table.sequence_chunks == 1)
        plain &= (count > table.pipeline) | (table.pipeline == 1)
        filled = 1 + (count - 1) / table.pipeline
        busy = count / table.pipeline
        growth: NDArray[np.float64] = np.where(plain, filled, busy)
        whole = [
            index
            for index, name in enumerate(names)
            if not splits_backward(name) and not find(name).takes_sequence_chunks
        ]
        is_whole = np.isin(table.schedule, whole)
        return np.where(is_whole, np.maximum(1.0, growth), growth)

    def _priced(self, row: Row) -> Iterator[Prices]:
        """Yield the prices of a row's split for every distinct group of experts."""
        search = self.search
        orders = RANK_ORDERS if row.expert > 1 else RANK_ORDERS[:1]
        for order in orders:
            option = Option(0, None, order)
            layout = search.options.layout(row, option)
            group: object = None
            if row.expert > 1:
                group = widest_expert_group(layout, search.work.domain_devices)
            key = (row.split, row.sequence_chunks, group)
            if key not in self._prices:
                self._prices[key] = search.pricing.prices(row, option, is_split=False)
            yield self._prices[key]
