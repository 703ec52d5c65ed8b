"""How a row's optimizer states are sharded and how its ranks lie on the devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from math import lcm
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost import Workload
from planner.cost.derived import DerivedRows, Rows
from planner.runtimes.supports import IDLE_RANKS
from planner.search.engine.arrangement import RANK_ORDERS, Arrangement
from planner.search.engine.constraints import COLUMNS, recompute_modes
from planner.search.engine.space import (
    Offload,
    Space,
    Split,
    runtime_constraints,
)
from planner.search.engine.split_backward import forbids_recompute, splits_backward
from planner.spec.job import WHOLE_PARAMETERS, Constraint, allows
from planner.spec.layout import Layout, RankOrder, RecomputeWord, ZeroStage

if TYPE_CHECKING:
    from planner.search.engine.table import Table

STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)


class Option(NamedTuple):
    """Choices of a layout that its row leaves open."""

    zero_stage: ZeroStage
    shard_degree: int | None
    """Ranks that share one set of states; None: all replicas."""
    rank_order: RankOrder


class Row(NamedTuple):
    """One row of the table, as Python integers, and its arrangement."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    """0: the tensor degree of all layers."""
    micro_batch_size: int
    micro_batches: int
    sequence_parallel: int
    sequence_chunks: int
    schedule: int
    virtual_stages: int
    split: int
    offload: int
    larger_shares: int
    arrangement: Arrangement | None
    """Of ranks on several node groups."""

    @classmethod
    def of(cls, table: Table, index: int) -> Row:
        """Return one row of a table."""
        values = {name: int(getattr(table, name)[index]) for name in _ROW_COLUMNS}
        arrangement = table.arrangements[int(table.arrangement[index])]
        return cls(**values, arrangement=arrangement)

    @property
    def price_key(self) -> tuple[object, ...]:
        """Columns that decide prices; rows that agree in them differ in order only."""
        others = (self.split, self.offload, self.larger_shares, self.arrangement)
        return (*self[:_BEFORE_SCHEDULE], *others)

    @property
    def has_unequal_replicas(self) -> bool:
        """Whether replicas differ in devices or in micro-batches."""
        if self.arrangement is not None:
            return not self.arrangement.has_identical_replicas
        return self.larger_shares > 0

    @property
    def shares(self) -> tuple[int, ...] | None:
        """Micro-batches of every data-parallel rank; None: all have the same number."""
        if self.arrangement is not None:
            return self.arrangement.shares
        if not self.larger_shares:
            return None
        others = self.data - self.larger_shares
        larger = (self.micro_batches,) * self.larger_shares
        return larger + (self.micro_batches - 1,) * others


_ROW_COLUMNS = Row._fields[:-1]
_BEFORE_SCHEDULE = Row._fields.index("schedule")
"""Number of a row's columns before its schedule."""
PRICE_COLUMNS = (
    *Row._fields[:_BEFORE_SCHEDULE],
    *("split", "offload", "larger_shares", "arrangement"),
)
"""Columns of a table that decide prices, as `Row.price_key`."""


class ShardDegrees(NamedTuple):
    """Options of a row with one rank order and ZeRO stage."""

    options: tuple[Option, ...]
    """Smallest shard degree first."""
    simplest: Option
    """Of lowest ZeRO stage in this rank order."""

    def extremes(self, place: int) -> tuple[Option, ...]:
        """Return options whose least prices bound all options up to a place.

        They bound them as `Options.extremes` bound all options of a row.
        """
        return tuple(dict.fromkeys((self.simplest, self.options[place])))


@dataclass
class Options:
    """The options of rows of one workload."""

    work: Workload
    space: Space

    def __post_init__(self) -> None:
        """Read the constraints once."""
        self.constraints: Mapping[str, Constraint] = runtime_constraints(self.work)
        self._least_shards = np.array(
            [_least_shards(split) for split in self.space.splits], dtype=np.int64
        )
        self._shared: dict[tuple[int, int], bool] = {}
        self._modes: dict[int, frozenset[frozenset[str]]] = {}
        self._known: dict[tuple[object, ...], tuple[Option, ...]] = {}
        self._extremes: dict[tuple[object, ...], tuple[Option, ...]] = {}

    def of(self, row: Row) -> tuple[Option, ...]:
        """Return every option that the job and the runtime permit, simplest first."""
        key = self._key(row)
        if key not in self._known:
            self._known[key] = tuple(self._permitted(row))
        return self._known[key]

    def _key(self, row: Row) -> tuple[object, ...]:
        """Return what decides the options of a row."""
        depends_on_order = self.work.framework.supports.limits_plans
        depends_on_order |= self.offload(row).activations
        return tuple(row) if depends_on_order else row.price_key

    def _permitted(self, row: Row) -> Iterator[Option]:
        if self.offload(row).activations and not self._may_offload_activations(row):
            return
        orders = self._rank_orders(row)
        supports = self.work.framework.supports
        for (stage, degree, ranks), order in product(self._shardings(row), orders):
            if not allows(self.constraints.get("zero_stage"), stage):
                continue
            if not allows(self.constraints.get("zero_shard_degree"), ranks):
                continue
            option = Option(stage, degree, order)
            if not supports.limits_plans:
                yield option
                continue
            layout = self.layout(row, option)
            if supports.violation(layout, self.work.job) is None:
                yield option

    def extremes(self, row: Row) -> tuple[Option, ...]:
        """Return options that together have the least prices of all options of a row.

        Layers take least time under the lowest ZeRO stage, and states least bytes under
        the highest one, over as many ranks as permitted; gradients under stage 2, where
        the runtime adds them up whole under stage 3. Reductions have no least price.
        """
        key = self._key(row)
        if key not in self._extremes:
            self._extremes[key] = tuple(self._found_extremes(row))
        return self._extremes[key]

    def _found_extremes(self, row: Row) -> list[Option]:
        found: list[Option] = []
        for options in _by_rank_order(row, self.of(row)):
            chosen = [options[0], options[-1]]
            if self.work.framework.accumulates_whole:
                chosen += [each for each in options if each.zero_stage < 3][-1:]
            found += dict.fromkeys(chosen)
        return found

    def by_zero_stage(
        self, row: Row, options: Iterable[Option]
    ) -> Iterator[ShardDegrees]:
        """Yield options of a row by their rank order and ZeRO stage."""
        for alike in _by_rank_order(row, options):
            for _, of_stage in groupby(alike, key=attrgetter("zero_stage")):
                yield ShardDegrees(tuple(of_stage), alike[0])

    def layout(
        self, row: Row, option: Option, recompute: RecomputeWord = "none"
    ) -> Layout:
        """Return the layout of a row with an option; all its parts are valid."""
        offload = self.offload(row)
        return Layout.model_construct(
            data_parallel_degree=row.data,
            tensor_parallel_degree=row.tensor,
            pipeline_parallel_degree=row.pipeline,
            context_parallel_degree=row.context,
            expert_parallel_degree=row.expert,
            expert_tensor_parallel_degree=row.expert_tensor or None,
            virtual_stages_per_rank=row.virtual_stages,
            zero_stage=option.zero_stage,
            zero_shard_degree=option.shard_degree,
            sequence_parallel=bool(row.sequence_parallel),
            micro_batch_size=row.micro_batch_size,
            schedule=self.space.schedules[row.schedule],
            sequence_chunks=row.sequence_chunks,
            rank_order=option.rank_order,
            micro_batch_shares=row.shares,
            recompute=recompute,
            activation_offload=offload.activations,
            optimizer_offload=offload.optimizer,
        )

    def offload(self, row: Row) -> Offload:
        """Return what a row has in the host's memory."""
        return self.space.offloads[row.offload]

    def are_any(self, table: Table) -> NDArray[np.bool_]:
        """Return a mask of the rows that have an option."""
        constrained = ("zero_stage", "zero_shard_degree", "rank_order")
        is_free = not any(field in self.constraints for field in constrained)
        offloads = any(offload.activations for offload in self.space.offloads)
        limits = self.work.framework.supports.limits_plans
        if (is_free and not offloads and not limits) or not len(table):
            return np.ones(len(table), dtype=np.bool_)
        _, firsts, inverse = np.unique(
            self.keys(table), axis=0, return_index=True, return_inverse=True
        )
        rows = (Row.of(table, first) for first in firsts.tolist())
        found = [bool(self.of(row)) for row in rows]
        return np.array(found, dtype=np.bool_)[inverse.reshape(-1)]

    def has_permitted_modes(self, table: Table) -> NDArray[np.bool_]:
        """Return a mask of the rows whose schedule permits the job's recompute modes.

        Layers do not recompute under split backwards: all of them must offer ``none``,
        and those that offer a permitted mode must be permitted to have it.
        """
        names = self.space.schedules
        splits = range(len(self.space.splits))
        forbids = np.array(list(map(forbids_recompute, names)), dtype=bool)
        is_free = np.array([self._may_save_all(split) for split in splits], dtype=bool)
        mask: NDArray[np.bool_] = ~forbids[table.schedule] | is_free[table.split]
        return mask

    def _may_save_all(self, split: int) -> bool:
        """Return whether the job permits that no layer of a split recomputes."""
        supported = self.work.framework.supports.allowed("recompute")
        wanted = set(recompute_modes(self.constraints.get("recompute"), supported))
        return all(
            "none" in modes and ("none" in wanted or not wanted & modes)
            for modes in self._offered_modes(split)
        )

    def _offered_modes(self, split: int) -> frozenset[frozenset[str]]:
        """Return the distinct sets of recompute modes that layers offer.

        Derived rows offer the same modes for every size, so that one is derived.
        """
        sizes = self.work.sizes
        one = self.space.splits[split]
        is_derived = isinstance(sizes, DerivedRows) and one.size not in sizes.profiled
        key = -1 if is_derived else split
        if key not in self._modes:
            rows = one.rows_of(self.work)
            offered = frozenset(frozenset(options) for options in rows)
            self._modes[key] = offered
        return self._modes[key]

    def representatives(self, table: Table) -> Iterator[Row]:
        """Yield one row for every set of options that rows have."""
        if not len(table):
            return
        _, firsts = np.unique(self.keys(table), axis=0, return_index=True)
        for first in firsts.tolist():
            yield Row.of(table, first)

    def keys(self, table: Table) -> NDArray[np.int64]:
        """Return columns that decide which options a row has."""
        columns: list[NDArray[np.int64] | NDArray[np.bool_]] = [
            table.replicas,
            self._least_shards[table.split],
            table.data > 1,
            table.pipeline > 1,
            table.sequence_chunks > 1,
            table.larger_shares > 0,
            table.offload,
            table.arrangement,
        ]
        splits = range(len(self.space.splits))
        if self.work.profile.shared_parameters:
            shares = np.array([self.splits_shared(split) for split in splits])
            columns.append(shares[table.split])
        if any(offload.activations for offload in self.space.offloads):
            offers = np.array([self._has_none(split) for split in splits])
            names = self.space.schedules
            is_split = np.array(list(map(splits_backward, names)))
            columns += [offers[table.split], is_split[table.schedule]]
        columns += self._rule_columns(table)
        return np.stack(columns, axis=1).astype(np.int64)

    def _rule_columns(self, table: Table) -> Iterator[NDArray[np.bool_]]:
        """Yield a mask of the rows that meet a condition of the runtime, for each one."""
        supports = self.work.framework.supports
        columns = {field: getattr(table, name) for field, name in COLUMNS.items()}
        columns[IDLE_RANKS] = np.maximum(0, table.pipeline - table.micro_batches)
        for name, values in (*supports.limits.items(), *supports.planned.items()):
            if name in columns:
                yield np.isin(columns[name], values)
        names = self.space.schedules
        for condition in (each for rule in supports.rules for each in rule.when):
            if condition.field == "schedule":
                holds = np.array([condition.holds(name) for name in names])
                yield holds[table.schedule]
            elif condition.field in columns:
                column = columns[condition.field]
                known = np.unique(column)
                holding = [each for each in known.tolist() if condition.holds(each)]
                yield np.isin(column, holding)

    def _may_offload_activations(self, row: Row) -> bool:
        """Return whether activations can be offloaded.

        Sequences are whole, backwards are full, and every layer may have the mode ``none``.
        """
        name = self.space.schedules[row.schedule]
        is_whole = row.sequence_chunks == 1 and not splits_backward(name)
        return is_whole and self._has_none(row.split)

    def _has_none(self, split: int) -> bool:
        """Return whether all layers may have the recompute mode ``none``."""
        supported = self.work.framework.supports.allowed("recompute")
        wanted = recompute_modes(self.constraints.get("recompute"), supported)
        offered = self._offered_modes(split)
        return "none" in wanted and all("none" in modes for modes in offered)

    def _rank_orders(self, row: Row) -> tuple[RankOrder, ...]:
        """Return the orders of ranks, without those that cost the same as another."""
        if row.arrangement is not None:
            return (row.arrangement.rank_order,)
        constraint = self.constraints.get("rank_order")
        permitted = tuple(order for order in RANK_ORDERS if allows(constraint, order))
        is_one_domain = self.work.devices <= self.work.domain_devices
        if row.pipeline == 1 or row.data == 1 or is_one_domain:
            return permitted[:1]
        return permitted

    def _shardings(self, row: Row) -> tuple[tuple[ZeroStage, int | None, int], ...]:
        replicas = row.data * row.context
        is_whole = self.work.job.optimizer in WHOLE_PARAMETERS
        splits_shared = row.pipeline > 1 and self.splits_shared(row.split)
        if replicas == 1 or is_whole or splits_shared:
            return ((0, None, 1),)
        most = 3
        if row.sequence_chunks > 1 or row.has_unequal_replicas:
            most = 1
        elif self.offload(row).activations:
            most = 2
        least = int(self._least_shards[row.split])
        found = [each for each in shardings(replicas, least) if each[0] <= most]
        if row.arrangement is not None:
            near = row.arrangement.shard_degrees
            found = [each for each in found if each[1] in near]
        return tuple(found)

    def splits_shared(self, split: int) -> bool:
        """Return whether layers may split a parameter that they share differently.

        Only tensor and expert parallelism split parameters.
        """
        one = self.space.splits[split]
        degrees = (one.tensor, one.expert)
        if degrees not in self._shared:
            rows = one.rows_of(self.work)
            self._shared[degrees] = splits_shared(self.work, rows)
        return self._shared[degrees]


def _by_rank_order(row: Row, options: Iterable[Option]) -> Iterable[list[Option]]:
    """Return options by their rank order, lowest ZeRO stage and shard degree first."""
    replicas = row.data * row.context

    def sharding(option: Option) -> tuple[int, int]:
        return option.zero_stage, option.shard_degree or replicas

    by_order: dict[RankOrder, list[Option]] = {}
    for option in sorted(options, key=sharding):
        by_order.setdefault(option.rank_order, []).append(option)
    return by_order.values()


def _least_shards(split: Split) -> int:
    """Return the least number of replicas that together hold all experts."""
    return lcm(split.expert_ranks, split.tensor) // split.tensor


@lru_cache(maxsize=4096)
def shardings(
    replicas: int, least: int
) -> tuple[tuple[ZeroStage, int | None, int], ...]:
    """Return ZeRO stages and group sizes, each with its number of ranks.

    Args:
        replicas: ranks that may share states.
        least: every size is a multiple of it, so that a group has all experts.
    """
    groups: list[int | None] = [None]
    for size in range(replicas // 2, 1, -1):
        if replicas % size == 0 and size % least == 0:
            groups.append(size)
    found: list[tuple[ZeroStage, int | None, int]] = [(0, None, 1)]
    for stage in STAGES[1:]:
        found += [(stage, size, size or replicas) for size in groups]
    return tuple(found)


def splits_shared(work: Workload, rows: Rows) -> bool:
    """Return whether layers may share a parameter but split it in different ways.

    Some rank has only a shard of it then. ZeRO needs the same shards on every stage.
    """
    profile = work.profile
    for shared in profile.shared_parameters:
        if profile.is_vocabulary(shared):
            continue
        for name in shared.layers:
            place = work.order[name]
            row = next(iter(rows[place].values()))
            whole = profile.layers[place].parameters
            local = row.local_parameters
            if local is None:
                local = -(-whole // row.tensor_parallel_degree)
            if local < shared.parameters:
                return True
    return False
