"""The layouts that nearly fit in memory, where none does.

Rows are chosen by an estimate and computed by the memory model. A row that has few cuts
is computed with all of them and all recompute modes, so that its miss is exact; so is
that of a row with one stage. Of other rows the cut that balances the bytes of layers is
computed, and those that moves of one layer from the fullest pipeline rank to the
emptiest reach. Of synthesized orders it is the cut by their rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost import (
    LayoutCosts,
    StageMap,
    choose,
    evaluate,
    rank_memory,
    schedule_of,
)
from planner.schedule import Schedule
from planner.search.engine.arrangement import RANK_ORDERS
from planner.search.engine.balance import balanced_cut
from planner.search.engine.bound import traits_of
from planner.search.engine.cut import all_cuts
from planner.search.engine.division import given_sizes
from planner.search.engine.engine import Search
from planner.search.engine.options import Option, Row
from planner.search.engine.prices import Modes, Prices
from planner.search.engine.result import Candidate
from planner.search.engine.solve import has_few_cuts
from planner.search.engine.synthesize import cases_of, is_synthesized, one_by_one
from planner.search.result import Limits
from planner.spec.plan import Miss, RankMemory
from planner.spec.profile import RecomputeMode

MOST_MISSES = 3
ESTIMATED_ROWS = 256
"""Rows whose memory is estimated from the units that their schedule holds."""
ROWS_PER_DEGREES = 8
"""Of those, how many may have the same degrees."""
COMPUTED_ROWS = 24
"""Rows whose memory is computed."""
MOST_MOVES = 32
"""Layers that are moved from a full rank to an empty one."""

Sizes = tuple[int, ...]
"""Layers of every stage."""


@dataclass(frozen=True, slots=True)
class Need:
    """The least memory that was found for a row with an option."""

    row: Row
    option: Option
    costs: LayoutCosts
    schedule: Schedule
    stage_map: StageMap
    fullest: RankMemory
    """Of the pipeline rank that lacks most."""

    @property
    def missing_bytes(self) -> int:
        """Bytes that the fullest rank lacks; the stage map fits if it is zero or less."""
        return missing_bytes(self.fullest)

    def candidate(self) -> Candidate:
        """Return the plan with this stage map, whether it fits or not."""
        stages = choose(self.costs, self.stage_map)
        step = evaluate(self.costs, self.schedule, stages)
        return Candidate(
            self.row, self.option, self.costs, self.schedule, self.stage_map, step
        )

    def miss(self) -> Miss:
        """Return the document."""
        row = self.fullest
        is_host = _missing_on_host(row) > _missing_on_device(row)
        needed, capacity = row.peak_bytes, row.capacity_bytes
        if is_host:
            needed, capacity = row.host_bytes, row.host_capacity_bytes or 0
        return Miss(
            layout=self.candidate().layout,
            pipeline_rank=row.pipeline_rank,
            needed_bytes=needed,
            capacity_bytes=capacity,
            missing_bytes=needed - capacity,
            memory="host" if is_host else "device",
        )


def missing_bytes(row: RankMemory) -> int:
    """Return the bytes that a rank lacks, of its device or its host."""
    return max(_missing_on_device(row), _missing_on_host(row))


def _missing_on_device(row: RankMemory) -> int:
    return row.peak_bytes - row.capacity_bytes


def _missing_on_host(row: RankMemory) -> int:
    if row.host_capacity_bytes is None:
        return _missing_on_device(row)
    return row.host_bytes - row.host_capacity_bytes


def misses(search: Search, limits: Limits) -> tuple[Miss, ...]:
    """Return the layouts that lack least memory, of different degrees.

    `Miss.needed_bytes` is the minimum over recompute modes, and over the cuts that are
    computed: all of a row with few cuts or one stage.

    Args:
        search: over rows of which none fits.
        limits: when to stop.
    """
    found: dict[tuple[int, ...], Need] = {}
    for need in sorted(needs(search, limits), key=lambda one: one.missing_bytes):
        if need.missing_bytes > 0:
            found.setdefault(need.row[:5], need)
    nearest = list(found.values())[:MOST_MISSES]
    return tuple(need.miss() for need in nearest)


def needs(search: Search, limits: Limits) -> Iterator[Need]:
    """Yield the least memory of the rows that need least by an estimate.

    Args:
        search: over the rows.
        limits: when to stop.
    """
    for row in _least_rows(search):
        for option in _least_options(search, row):
            if limits.should_stop():
                return
            if is_synthesized(search.order(row).schedule):
                yield from _needs_of_orders(search, row, option)
            else:
                yield _LeastMemory(search, row, option).need()


def _least_rows(search: Search) -> list[Row]:
    """Return the rows that need least memory by an estimate, in its order."""
    table = search.table
    shares = _even_shares(search)
    order = np.lexsort((table.virtual_stages, shares))
    counts: Counter[tuple[int, ...]] = Counter()
    estimates: list[tuple[float, int, Row]] = []
    for index in order.tolist():
        row = Row.of(table, index)
        degrees = row[:5]
        if counts[degrees] == ROWS_PER_DEGREES or not _least_options(search, row):
            continue
        counts[degrees] += 1
        estimates.append((_estimate(search, row), index, row))
        if len(estimates) == ESTIMATED_ROWS:
            break
    estimates.sort()
    return [row for _, _, row in estimates[:COMPUTED_ROWS]]


def _even_shares(search: Search) -> NDArray[np.float64]:
    """Return the bytes of a device if it holds one micro-batch of an even share."""
    table = search.table
    keys = np.stack([table.split, table.data, table.pipeline], axis=1)
    _, firsts, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    states = np.zeros(len(firsts))
    saved = np.zeros(len(firsts))
    for place, first in enumerate(firsts.tolist()):
        row = Row.of(table, first)
        option = next(iter(_least_options(search, row)), None)
        if option is None:
            states[place] = np.inf
            continue
        prices = search.pricing.prices_with_recompute(row, option)
        states[place] = float(prices.counts @ prices.states)
        saved[place] = float(prices.counts @ prices.least_activations)
    inverse = inverse.reshape(-1)
    whole = states[inverse] + saved[inverse] / table.sequence_chunks
    shares: NDArray[np.float64] = whole / table.pipeline
    return shares


def _estimate(search: Search, row: Row) -> float:
    """Return the bytes of every device if all have equally many.

    A rank that holds h micro-batches at its peak takes a part x of the model with
    x (h A + S) bytes, for A saved bytes and S bytes of states of the whole model.
    """
    order = search.order(row)
    option = _least_options(search, row)[0]
    prices = search.pricing.prices(row, option)
    saved = float(prices.counts @ prices.least_activations)
    states = float(prices.counts @ prices.states)
    bytes_ = traits_of(order).held * saved + states
    return 1 / float((1 / np.maximum(1.0, bytes_)).sum())


def _least_options(search: Search, row: Row) -> list[Option]:
    """Return options that shard states over most ranks, the highest ZeRO stage first."""
    replicas = row.data * row.context
    best: dict[tuple[object, ...], Option] = {}
    for option in search.options.of(row):
        key = option._replace(shard_degree=None, rank_order=RANK_ORDERS[0])
        known = best.get(key)
        ranks = option.shard_degree or replicas
        if known is None or ranks > (known.shard_degree or replicas):
            best[key] = option
    return sorted(best.values(), key=lambda one: -one.zero_stage)


def _needs_of_orders(search: Search, row: Row, option: Option) -> Iterator[Need]:
    """Yield the memory of a row with a synthesized order, for every mode and placement.

    The micro-batches run one by one.
    """
    for case in cases_of(search.pricing.costs(row, option)):
        costs, stage_map = case.costs, case.stage_map
        schedule = one_by_one(case.problem.shape, costs.micro_batches)
        memory = rank_memory(costs, schedule, choose(costs, stage_map))
        fullest = max(memory, key=missing_bytes)
        yield Need(row, option, costs, schedule, stage_map, fullest)


@dataclass
class _LeastMemory:
    """Finds the stage map of a row with an option that lacks least memory."""

    search: Search
    row: Row
    option: Option

    @cached_property
    def costs(self) -> LayoutCosts:
        """The costs of the layout."""
        return self.search.pricing.costs(self.row, self.option)

    @cached_property
    def schedule(self) -> Schedule:
        """The order of actions."""
        return schedule_of(self.costs)

    @cached_property
    def prices(self) -> Prices:
        """The prices of the layers."""
        return self.search.pricing.prices(self.row, self.option)

    def need(self) -> Need:
        """Return the least memory of the cuts that are computed."""
        fixed = given_sizes(self.search.work, self.schedule.stages)
        layers = len(self.prices.kind_of)
        if fixed is not None:
            return self._of_cut(fixed)
        if has_few_cuts(layers, self.schedule.stages):
            cuts = all_cuts(layers, self.schedule.stages)
            return min(map(self._of_cut, cuts), key=lambda one: one.missing_bytes)
        return self._improved(self._of_cut(self._balanced_sizes()))

    def _balanced_sizes(self) -> Sizes:
        """Return the cut that balances the bytes of states and saved activations."""
        prices = self.prices
        bytes_ = np.maximum(1, prices.states + prices.least_activations)
        layers = tuple(int(bytes_[kind]) for kind in prices.kind_of)
        return balanced_cut(layers, self.schedule.stage_ranks)

    def _improved(self, best: Need) -> Need:
        """Return the least memory that moves of one layer reach."""
        for _ in range(MOST_MOVES):
            sizes = self._moved(best)
            if sizes is None:
                break
            found = self._of_cut(sizes)
            if found.missing_bytes >= best.missing_bytes:
                break
            best = found
        return best

    def _moved(self, need: Need) -> Sizes | None:
        """Return the cut with a layer moved from the fullest rank to the emptiest."""
        sizes = [len(stage) for stage in need.stage_map]
        rows = self._memory(need.stage_map)
        source = max(rows, key=missing_bytes).pipeline_rank
        target = min(rows, key=missing_bytes).pipeline_rank
        givers = [
            stage for stage in self.schedule.stages_of(source) if sizes[stage] > 1
        ]
        if source == target or not givers:
            return None
        takers = self.schedule.stages_of(target)
        sizes[max(givers, key=lambda stage: sizes[stage])] -= 1
        sizes[min(takers, key=lambda stage: sizes[stage])] += 1
        return tuple(sizes)

    def _of_cut(self, sizes: Sizes) -> Need:
        """Return the memory of a cut with the recompute modes that need least.

        The modes of a rank's layers do not change the memory of other ranks, so that
        every rank has the best choice of its own, unless all layers share one mode.
        """
        maps = [_divided(modes, sizes) for modes in self._choices]
        rows = [self._memory(stage_map) for stage_map in maps]
        if self._shares_modes:
            worst = [max(map(missing_bytes, each)) for each in rows]
            return self._need(maps[worst.index(min(worst))])
        chosen = list(maps[0])
        for rank in range(self.schedule.ranks):
            missing = [missing_bytes(each[rank]) for each in rows]
            best = maps[missing.index(min(missing))]
            for stage in self.schedule.stages_of(rank):
                chosen[stage] = best[stage]
        return self._need(tuple(chosen))

    @cached_property
    def _choices(self) -> list[list[RecomputeMode]]:
        """Modes of all layers: those that save least under a limit on temporaries."""
        prices = self.prices
        if self._shares_modes:
            names = self.search.pricing.wanted
            chosen = [[_named(modes, name) for modes in prices.modes] for name in names]
        else:
            limits = {one.temporary_bytes for modes in prices.modes for one in modes}
            chosen = [
                [_least_saved(modes, limit) for modes in prices.modes]
                for limit in sorted(limits, reverse=True)
            ]
        distinct = dict.fromkeys(map(tuple, chosen))
        return [[modes[kind] for kind in prices.kind_of] for modes in distinct]

    @cached_property
    def _shares_modes(self) -> bool:
        """Whether the runtime recomputes all layers in one mode."""
        supported = self.search.work.framework.supports.allowed("recompute")
        return supported is not None and "per-layer" not in supported

    def _memory(self, stage_map: StageMap) -> tuple[RankMemory, ...]:
        stages = choose(self.costs, stage_map)
        return rank_memory(self.costs, self.schedule, stages)

    def _need(self, stage_map: StageMap) -> Need:
        fullest = max(self._memory(stage_map), key=missing_bytes)
        return Need(
            self.row, self.option, self.costs, self.schedule, stage_map, fullest
        )


def _named(modes: Modes, name: str) -> RecomputeMode:
    """Return a mode of a layer by its name, or its first one."""
    found = next((one for one in modes if one.mode == name), modes[0])
    return found.mode


def _least_saved(modes: Modes, limit: int) -> RecomputeMode:
    """Return the mode of a layer that saves least, with temporaries up to a limit."""
    small = [one for one in modes if one.temporary_bytes <= limit]
    if not small:
        return min(modes, key=lambda one: one.temporary_bytes).mode
    return min(small, key=lambda one: (one.activation_bytes, one.temporary_bytes)).mode


def _divided(modes: Sequence[RecomputeMode], sizes: Sizes) -> StageMap:
    """Return stages of the given numbers of layers, each layer with its mode."""
    found = []
    first = 0
    for size in sizes:
        layers = range(first, first + size)
        found.append(tuple((layer, modes[layer]) for layer in layers))
        first += size
    return tuple(found)
