"""A good plan first: the best rows of a coarse grid, then the rows around them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planner.search.engine.bound import IMPOSSIBLE
from planner.search.engine.options import Option, Row
from planner.search.engine.synthesize import is_synthesized

if TYPE_CHECKING:
    from planner.search.engine.engine import Node, Search

MOST_ROWS = 128
"""Rows of the coarse grid."""
MOST_TRIED = 48
"""Rows after which a round ends, if a plan is known."""
MOST_COMPARED = 6
"""Rows that a round compares with a known plan."""
MOST_MOVED = 2
"""Rows in which layers are moved."""
ROUNDS = 3
"""Rounds of rows around the best plan."""
MOST_AROUND = 512
DEGREES = ("tensor", "pipeline", "context", "expert")
KEPT = (
    "tensor",
    "sequence_parallel",
    "pipeline",
    "expert",
    "expert_tensor",
    "micro_batch_size",
    "offload",
)
"""Columns that stay the same where rows with more sequence chunks are tried."""
SIZES = ("micro_batch_size", "sequence_chunks")
SCHEDULES = ("1f1b", "interleaved-1f1b", "seqpipe")
"""Of the coarse grid. A space without any of them has synthesized orders there."""
VIRTUAL_STAGES = (1, 2, 4, 8)
MICRO_BATCH_SIZES = (1, 2, 4)


class _Round(NamedTuple):
    """Rows that are compared with the best plan of the rounds before."""

    rows: list[int]
    most_compared: int = MOST_COMPARED
    """Rows that are compared once a plan is known."""
    moves: bool = False
    """Try to move layers between stages."""


def find_first_plan(
    search: Search,
    is_over: Callable[[], bool] = lambda: False,
    report: Callable[[], None] = lambda: None,
) -> None:
    """Give a search a plan to beat, if one of the rows that are tried fits.

    Args:
        search: to look for rows in.
        is_over: whether the time is over; then the first plan that is found will do.
        report: called whenever there is a better plan.
    """

    def is_enough() -> bool:
        return search.best is not None and is_over()

    for each in _rounds(search):
        if is_enough():
            return
        _solve_some(search, each, is_enough, report)


def _rounds(search: Search) -> Iterator[_Round]:
    """Yield rows of a coarse grid, then rows around the best plan so far."""
    yield _Round(_coarse_rows(search, is_wide=False))
    if search.best is None:
        yield _Round(_coarse_rows(search, is_wide=True))
    for _ in range(ROUNDS):
        if search.best is None:
            return
        before = search.best.row
        yield _Round(_rows_near(search, before))
        if search.best.row == before:
            break
    yield _Round(_rows_with_more_chunks(search))
    same = _same_rows(search)
    yield _Round(_best_by_schedule(search, same), len(search.space.schedules))
    yield _Round(same, MOST_MOVED, moves=True)


def _best_by_schedule(search: Search, indices: Iterable[int]) -> list[int]:
    """Return the row with the least bound of every schedule."""
    found: dict[int, Node] = {}
    for node in sorted(map(search.bound_row, indices)):
        found.setdefault(int(search.table.schedule[node.index]), node)
    return [node.index for node in found.values()]


def _solve_some(
    search: Search,
    round_: _Round,
    is_enough: Callable[[], bool],
    report: Callable[[], None],
) -> None:
    """Solve rows of a round, least bound first.

    The queue is empty afterwards, and what it excluded is forgotten.

    Args:
        search: that owns the rows.
        round_: with these rows.
        is_enough: whether to stop with the best plan so far.
        report: called whenever there is a better plan.
    """
    indices, most_compared, moves = round_
    by_work = search.bounds_by_work(np.array(indices, dtype=np.intp))
    waiting = deque(sorted(zip(by_work.tolist(), indices, strict=True)))
    tried = compared = 0
    while compared < most_compared and not is_enough():
        least_row = waiting[0][0] if waiting else IMPOSSIBLE
        if min(least_row, search.least_node_bound) >= search.limit:
            break
        if least_row <= search.least_node_bound:
            _, index = waiting.popleft()
            search.push(search.bound_row(index))
            continue
        if tried >= MOST_TRIED and search.best is not None:
            break
        node = heapq.heappop(search.queue)
        row = Row.of(search.table, node.index)
        before = search.best
        if search.expand(node, moves=moves, options=_simple_options(search, row)):
            tried += 1
            compared += search.best is not None
        if search.best is not before:
            report()
    search.queue.clear()
    search.unproven.clear()
    search.least_excluded = IMPOSSIBLE


def _simple_options(search: Search, row: Row) -> list[tuple[int, Option]]:
    """Return the options that shard states over all replicas or not at all."""
    options = enumerate(search.options.of(row))
    return [pair for pair in options if pair[1].shard_degree is None]


def _rows_near(search: Search, row: Row) -> list[int]:
    """Return rows whose degrees and size are a factor of 2 from a row's or equal."""
    table = search.table
    is_near = table.schedule == row.schedule
    for name in (*DEGREES, *SIZES):
        value = getattr(row, name)
        is_near &= np.isin(getattr(table, name), (value // 2, value, 2 * value))
    return search.in_order(is_near)[:MOST_AROUND]


def _rows_with_more_chunks(search: Search) -> list[int]:
    """Return rows with more sequence chunks, whose context degree is the same or half.

    All other degrees are those of the best row. Chunks make activations smaller, so that
    there may be fewer context-parallel ranks.
    """
    assert search.best is not None
    table, row = search.table, search.best.row
    is_like = table.sequence_chunks > row.sequence_chunks
    is_like &= np.isin(table.context, (row.context // 2, row.context))
    for name in KEPT:
        is_like &= getattr(table, name) == getattr(row, name)
    return search.in_order(is_like)


def _same_rows(search: Search) -> list[int]:
    """Return the rows with the degrees of the best plan, under every schedule."""
    assert search.best is not None
    row = search.best.row
    is_same = search.table.split == row.split
    is_same &= search.table.pipeline == row.pipeline
    is_same &= search.table.sequence_chunks == row.sequence_chunks
    return search.in_order(is_same)


def _coarse_rows(search: Search, *, is_wide: bool) -> list[int]:
    """Return the best row for every split of the model and few stages per rank.

    Args:
        search: to look for rows in.
        is_wide: tensor parallelism spans domains of fast links; else it stays in one.
    """
    table = search.table
    names = search.space.schedules
    simple = [place for place, name in enumerate(names) if name in SCHEDULES]
    if not simple:
        simple = [place for place, name in enumerate(names) if is_synthesized(name)]
    is_coarse = np.isin(table.schedule, simple)
    is_coarse &= np.isin(table.virtual_stages, VIRTUAL_STAGES)
    is_coarse &= np.isin(table.micro_batch_size, MICRO_BATCH_SIZES)
    is_coarse &= (table.tensor > search.work.domain_devices) == is_wide
    if len(table):
        is_coarse &= table.sequence_chunks == table.sequence_chunks.min()
    seen: set[tuple[int, ...]] = set()
    chosen: list[int] = []
    for index in search.in_order(is_coarse):
        row = Row.of(table, index)
        degrees = (row.tensor, row.pipeline, row.context, row.expert, row.expert_tensor)
        key = (*degrees, row.micro_batch_size, row.virtual_stages)
        if key in seen:
            continue
        seen.add(key)
        chosen.append(index)
        if len(chosen) == MOST_ROWS:
            break
    return chosen
