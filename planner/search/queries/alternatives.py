"""The next best plans: other degrees first, then other choices of the same degrees.

Every alternative is a real plan with an evaluated cut. Of a group of rows, such as those
of equal degrees, only a few are looked at, so that an alternative is not proven to be
the best of its group. The work is counted and not timed: equal searches have equal
alternatives.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.engine.bound import IMPOSSIBLE
from planner.search.engine.engine import Search
from planner.search.engine.first_plan import SCHEDULES
from planner.search.engine.options import Option, Row
from planner.search.engine.result import Candidate
from planner.search.engine.solve import Item
from planner.search.engine.split_backward import splits_backward
from planner.search.engine.synthesize import solver_of
from planner.search.queries.masked import masked
from planner.search.queries.outcome import Outcome
from planner.search.result import Limits

DEGREES = ("data", "tensor", "pipeline", "context", "expert")
CHOICES = (*DEGREES, "schedule", "micro_batch_size")
WORK = 2_000_000
"""Work for every alternative, in units of `planner.search.engine.stop`."""
IMPROVEMENT_WORK = 400_000
"""The same to improve it by a search over its group."""
CLOSE = 1.03
"""No further row is solved that is at most this factor faster."""
FAR = 1.5
"""Slower plans, by this factor, are looked for only where there are too few others."""
SMALL_TABLE = 60
"""Rows up to which all rows, schedules and options are looked at."""
MOST_GROUPS = 24
"""Groups of rows that are looked at, and as many more as plans are wanted."""
MOST_ROWS = 200
"""Rows whose bounds are low enough, over all groups and schedules."""
LEAST_ROWS = 2
"""Of one group with one schedule."""
BOUNDED_ROWS = 4
"""Rows that are bounded, as a multiple of those."""
TRIED_NODES = 3
"""Rows of a group, each with an option, whose cuts are simulated."""
LATE_GROUPS = 12
"""Groups, each with one schedule, that are looked at although the time is over, so that
a search that its time limit ended has some alternatives."""
LATE_NODES = 4
"""The same of nodes, for every plan."""
SPARE = 2
"""Plans that are improved in addition to those that are wanted."""

Key = tuple[int, ...]
"""What distinguishes one alternative from another."""


def alternatives(outcome: Outcome, top: int, limits: Limits) -> tuple[Candidate, ...]:
    """Return the next best plans, fastest first.

    Plans whose degrees differ from the best plan's and from each other's come first;
    then plans with another schedule or micro-batch size, then any other plans.

    Args:
        outcome: of the search.
        top: number of plans.
        limits: when to stop looking; a caller that wants to stop gets no plans.
    """
    best = outcome.best
    if best is None or top == 0 or _is_cancelled(limits):
        return ()
    names = outcome.search.space.schedules
    similar = frozenset({names[best.row.schedule], *SCHEDULES})
    far = int(FAR * best.total)
    passes = (
        _Pass(DEGREES, similar, far),
        _Pass(DEGREES, None, far),
        _Pass(DEGREES, None, IMPOSSIBLE),
        _Pass(CHOICES, None, far),
        _Pass(CHOICES, None, IMPOSSIBLE),
        _Pass(Row._fields, None, IMPOSSIBLE),
    )
    found: list[Candidate] = []
    for one in passes:
        ranking = _Ranking(outcome, (best, *found), one, limits)
        found += ranking.best(top - len(found))
        if len(found) == top or limits.should_stop():
            break
    return tuple(sorted(found, key=_step))


class _Pass(NamedTuple):
    """What plans differ in, and which rows are looked at."""

    columns: Sequence[str]
    schedules: frozenset[str] | None
    """None: all."""
    ceiling: int
    """Nanoseconds; slower plans do not count."""


def _is_cancelled(limits: Limits) -> bool:
    should_stop = limits.callbacks.should_stop
    return should_stop is not None and should_stop()


def _step(candidate: Candidate) -> int:
    return candidate.total


@dataclass
class _Ranking:
    """Best plans that differ from known plans, and from each other, in some columns."""

    outcome: Outcome
    known: Sequence[Candidate]
    rule: _Pass
    limits: Limits
    plans: dict[Key, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start a search that compares rows with the ceiling instead of a plan."""
        self.is_small = len(self.outcome.search.rows) <= SMALL_TABLE
        self.search = masked(self.outcome.search, ceiling=self.rule.ceiling)

    def best(self, top: int) -> list[Candidate]:
        """Return up to a number of plans, fastest first."""
        search = self.search
        self._queue_rows(top)
        tried: Counter[Key] = Counter()
        late = 0
        while search.queue and search.work_done < WORK * top:
            node = heapq.heappop(search.queue)
            late += self.limits.should_stop()
            is_enough = self._last_step(top) <= CLOSE * node.nanoseconds
            if is_enough or late > LATE_NODES * top:
                break
            row = Row.of(search.table, node.index)
            key = self._key(row)
            if tried[key] >= TRIED_NODES and not self.is_small:
                continue
            if node.item is not None:
                tried[key] += self._solve(node.item, key)
                continue
            options = self._options(row)
            if options:
                search.expand(node, options=options)
        found = sorted(self.plans.values(), key=_step)[: top + SPARE]
        return sorted(map(self._improved, found), key=_step)[:top]

    def _improved(self, plan: Candidate) -> Candidate:
        """Return the best plan that a short search over a plan's group finds."""
        if self.rule.columns == Row._fields:
            return plan
        table = self.search.table
        mask = np.ones(len(table), dtype=np.bool_)
        for name, value in zip(self.rule.columns, self._key(plan.row), strict=True):
            mask &= getattr(table, name) == value
        group = masked(self.outcome.search, mask, plan.total)
        while group.work_done < IMPROVEMENT_WORK and not self.limits.should_stop():
            if group.limit <= CLOSE * group.least:
                break
            group.advance()
        return group.best or plan

    def _last_step(self, top: int) -> int:
        """Return nanoseconds of the last plan that counts."""
        if len(self.plans) < top:
            return IMPOSSIBLE
        return sorted(map(_step, self.plans.values()))[top - 1]

    def _solve(self, item: Item, key: Key) -> bool:
        """Solve a row with an option; return whether any cut was simulated."""
        before = self.plans.get(key)
        limit = self.rule.ceiling if before is None else before.total
        solver = solver_of(item)
        found = solver.solve(limit, moves=False)
        self.search.counted_work += solver.actions
        if found is not None and found.total < limit:
            self.plans[key] = found
        return solver.actions > 0

    def _queue_rows(self, top: int) -> None:
        """Bound and queue the rows that are looked at, for a number of plans."""
        groups = self._groups(MOST_GROUPS + top)
        share = max(LEAST_ROWS, MOST_ROWS // max(1, len(groups)))
        if self.is_small:
            share = SMALL_TABLE
        for place, rows in enumerate(groups):
            is_late = place >= LATE_GROUPS and self.limits.should_stop()
            if is_late or self.search.work_done >= WORK * top:
                return
            before = len(self.search.queue)
            for index in rows[: BOUNDED_ROWS * share]:
                self.search.bound_rows([index])
                if len(self.search.queue) - before == share:
                    break

    def _options(self, row: Row) -> list[tuple[int, Option]]:
        """Return options of a row: those over all replicas, unless the table is small."""
        found = []
        for place, option in self.search.pricing.undominated(row):
            is_simple = option.shard_degree is None or self.is_small
            if is_simple and not self._is_known(row, option):
                found.append((place, option))
        return found

    def _is_known(self, row: Row, option: Option) -> bool:
        return any(one.row == row and one.option == option for one in self.known)

    def _groups(self, most: int) -> list[list[int]]:
        """Return rows that may be looked at, by key and schedule, in order."""
        table = self.search.table
        rows = self._rows()
        names = (*self.rule.columns, "schedule")
        keys = np.stack([getattr(table, name)[rows] for name in names], axis=1)
        taken = self._known_keys()
        groups: dict[Key, dict[int, list[int]]] = {}
        for index, whole in zip(rows.tolist(), keys.tolist(), strict=True):
            key, schedule = tuple(whole[:-1]), whole[-1]
            if key in taken:
                continue
            if key not in groups and len(groups) == most:
                continue
            groups.setdefault(key, {}).setdefault(schedule, []).append(index)
        return [rows for group in groups.values() for rows in group.values()]

    def _rows(self) -> NDArray[np.intp]:
        """Return the rows that may be looked at, in order.

        Degrees near those of the best plan come first, then short estimates.
        """
        search, rule = self.search, self.rule
        is_open = search.row_bounds < rule.ceiling
        rows = search.rows[(is_open & self._differs())[search.rows]]
        if rule.schedules is not None and not self.is_small:
            names = enumerate(search.space.schedules)
            places = [place for place, name in names if name in rule.schedules]
            is_listed = np.isin(search.table.schedule, places)
            is_listed |= search.table.pipeline == 1
            rows = rows[is_listed[rows]]
        estimates = estimated_steps(search)[rows]
        distances = self._distances()[rows]
        found: NDArray[np.intp] = rows[np.lexsort((estimates, distances))]
        return found

    def _differs(self) -> NDArray[np.bool_]:
        """Return a mask of rows without those that are equal to another one.

        On one pipeline rank all schedules take the same time; 1f1b, the first one, needs
        least memory.
        """
        table = self.search.table
        is_alone = table.pipeline == 1
        first = table.schedule[is_alone].min(initial=len(self.search.space.schedules))
        found: NDArray[np.bool_] = ~is_alone | (table.schedule == first)
        for one in self.known:
            is_same = is_alone & (table.schedule != one.row.schedule)
            for name in Row._fields:
                if name != "schedule":
                    is_same &= getattr(table, name) == getattr(one.row, name)
            found &= ~is_same
        return found

    def _distances(self) -> NDArray[np.float64]:
        """Return how far the degrees of every row are from those of the best plan.

        The distance is the number of factors of 2 in which they differ, rounded.
        """
        table, best = self.search.table, self.known[0].row
        found = np.zeros(len(table))
        for name in DEGREES:
            found += np.abs(np.log2(getattr(table, name) / getattr(best, name)))
        return np.rint(found)

    def _known_keys(self) -> set[Key]:
        """Return keys without other plans; a row's other options are other plans."""
        if self.rule.columns == Row._fields:
            return set()
        return {self._key(one.row) for one in self.known}

    def _key(self, row: Row) -> Key:
        return tuple(getattr(row, name) for name in self.rule.columns)


def estimated_steps(search: Search) -> NDArray[np.float64]:
    """Return nanoseconds of every row with the time to fill its pipeline.

    The bounds of rows include that time for few schedules, so that they compare badly
    with those of others. A schedule that splits backwards fills it with weight
    gradients, down to a third.
    """
    table, names = search.table, search.space.schedules
    is_included = [name in ("1f1b", "gpipe") for name in names]
    shares = np.array([1 / 3 if splits_backward(name) else 1.0 for name in names])
    units = table.micro_batches * table.virtual_stages * table.sequence_chunks
    fill = shares[table.schedule] * (table.pipeline - 1) / units
    is_plain = np.array(is_included)[table.schedule] & (table.virtual_stages == 1)
    growth: NDArray[np.float64] = np.where(is_plain, 1.0, 1.0 + fill)
    return growth * search.row_bounds.astype(np.float64)
