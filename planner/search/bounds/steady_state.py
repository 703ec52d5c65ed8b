"""What a long schedule takes at least, told by a short one: a bound on layouts whose stages are dealt.

Once its pipeline is full, a rank repeats the same actions for every next P micro-batches, until the pipeline drains.
Let M = M0 + k P. Where the rows of M micro-batches are those of M0 with k such periods put in between, a chain of
actions that wait for each other, and that comes from an action x to the same one of P micro-batches later, can go
round k times more. With the longest chain of the short schedule, simulated with the layout's own times:

    (E11) T(M) >= T(M0) + floor(k / q) (end(x') - end(x)), x' that action of q P micro-batches later, both on the
          longest chain, where all actions before x' stand before what was put in, and all behind x behind it; q is 1 or
          2, whichever tells more                                                                     -> steady_ticks()

    (E12) a period begins and frees as many units of every stage; so the short schedule's ranks hold just what those of
          the long one hold, whenever they hold most                                                      -> holding()

(E11) is the cycle time of a max-plus system (Baccelli et al. 1992, "Synchronization and Linearity", chapter 3): where
the stages of a round differ between ranks, it tells what waiting for the slower one costs, which no sum of work does.
Full and split backwards, whole sequences and one rank per stage only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayoutCosts, evaluate
from planner.cost.memory import StageLayers
from planner.errors import LayoutError
from planner.schedule import Schedule, Simulation, find
from planner.schedule.entry import Shape, no_copies
from planner.schedule.rows import Numbers, Row
from planner.search.stage_maps.dealt import built, layout_schedule

_ROUNDS = 3
"""Micro-batches per rank of the short schedule."""
_TURNS = (1, 2)
"""Periods in which a longest chain may come back to the same action."""
_WORTH = 2
"""Times as long the long one is at least."""


@dataclass(frozen=True, slots=True)
class Short:
    """A schedule of which a longer one is made by repeating its middle."""

    schedule: Schedule
    times: int
    """How often P more micro-batches are put in."""
    period: int
    """Actions of a rank on P micro-batches."""
    starts: Numbers
    """By rank: the first action from which on the row goes on alike behind what was put in."""
    stops: Numbers
    """By rank: the first one that stands behind it only."""


def steady_ticks(costs: LayoutCosts, stages: Sequence[StageLayers]) -> int:
    """Ticks that these stages take at least under the layout's schedule: equation (E11); 0 where it says nothing.

    Args:
        costs: of the layout.
        stages: every layer in its mode.
    """
    short = _short(costs)
    if short is None or costs.work.framework.staggers_steps:
        return 0
    step = evaluate(costs, short.schedule, stages)
    return step.total_ticks + _further_ticks(short, step.simulation, step.last_rank)


def holding(costs: LayoutCosts) -> Schedule:
    """A schedule whose ranks hold at some moment what those of the layout's hold, and never anything else: equation
    (E12)."""
    short = _short(costs)
    return short.schedule if short else layout_schedule(costs)


def _short(costs: LayoutCosts) -> Short | None:
    layout = costs.layout
    if layout.sequence_chunks > 1:
        return None
    numbers = (
        layout.pipeline_parallel_degree,
        costs.micro_batches,
        layout.virtual_stages_per_rank,
    )
    return short_of(layout.schedule, *numbers)


@lru_cache(maxsize=1024)
def short_of(
    name: str, ranks: int, micro_batches: int, virtual_stages: int
) -> Short | None:
    """The short schedule of a long one of these numbers; None where that is not longer by much, or repeats nothing."""
    few = _ROUNDS * ranks + micro_batches % ranks
    entry = find(name)
    if (
        micro_batches < _WORTH * few
        or entry.replica_ranks is not no_copies
        or entry.has_pairs
    ):
        return None
    try:
        schedule = built(name, ranks, few, virtual_stages, 1)
    except LayoutError:  # interleaved-1f1b runs only numbers of micro-batches that its groups share out evenly
        return None
    shape, times = (
        Shape(ranks, micro_batches, virtual_stages),
        (micro_batches - few) // ranks,
    )
    period = len(schedule.actions[0]) // few * ranks
    starts, stops = [], []
    for rank in range(ranks):
        bounds = _repeated(
            Row.read(schedule.actions[rank]),
            Row.read(entry.rank_actions(shape, rank)),
            period,
            ranks,
        )
        if bounds is None:
            return None
        starts.append(bounds[0])
        stops.append(bounds[1])
    return Short(schedule, times, period, np.array(starts), np.array(stops))


def _repeated(short: Row, long: Row, period: int, more: int) -> tuple[int, int] | None:
    """Where, between these places, the short row can have any number of periods put in; None: nowhere.

    Args:
        short: of a rank.
        long: of the same rank, with more micro-batches.
        period: actions that are put in at once.
        more: micro-batches of a period.
    """
    put_in = len(long) - len(short)
    if put_in % period:
        return None
    before = _alike(short, _part(long, 0, len(short)), 0)
    behind = _alike(short, _part(long, put_in, len(long)), put_in // period * more)
    start, stop = _shared(behind, before)
    if stop - start < period:
        return None
    first, last = start, stop + put_in - period
    repeats = _alike(
        _part(long, first, last), _part(long, first + period, last + period), more
    )
    return (start, stop) if repeats.all() else None


def _part(row: Row, start: int, stop: int) -> Row:
    return Row(row.stages[start:stop], row.kinds[start:stop], row.units[start:stop])


def _alike(one: Row, other: Row, more: int) -> NDArray[np.bool_]:
    """By place: the same action, of so many micro-batches later."""
    is_same: NDArray[np.bool_] = (one.stages == other.stages) & (
        one.kinds == other.kinds
    )
    is_same &= one.units + more == other.units
    return is_same


def _further_ticks(short: Short, simulation: Simulation, rank: int) -> int:
    """Ticks that the longest chain to a rank's end takes more at least, with all periods put in."""
    graph, ends = simulation.graph, simulation.times[1]
    place_of = np.empty(len(graph.work), dtype=np.int64)
    for nodes in graph.rank_actions:
        place_of[np.asarray(nodes)] = np.arange(len(nodes))
    chain = np.array(simulation.longest_chain(rank)[::-1])
    ranks, places = np.asarray(graph.rank)[chain], place_of[chain]
    start, stop = _shared(places >= short.starts[ranks], places < short.stops[ranks])
    seen = {
        (int(ranks[at]), int(places[at])): int(ends[chain[at]])
        for at in range(start, stop)
    }

    def turn(periods: int) -> int:
        """Most ticks between an action and the same one of so many periods later."""
        moved = periods * short.period
        return max(
            (
                seen.get((rank, place + moved), 0) - end
                for (rank, place), end in seen.items()
            ),
            default=0,
        )

    return max(0, *(short.times // periods * turn(periods) for periods in _TURNS))


def _shared(
    is_behind: NDArray[np.bool_], is_before: NDArray[np.bool_]
) -> tuple[int, int]:
    """Where all that follows is behind, up to where all that came is before."""
    start = 0 if is_behind.all() else len(is_behind) - int(is_behind[::-1].argmin())
    return start, len(is_before) if is_before.all() else int(is_before.argmin())
