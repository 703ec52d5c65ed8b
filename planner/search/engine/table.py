"""The table of layouts: one row for every combination of degrees, sizes and schedule.

A row leaves open how states are sharded, the order of ranks, the cut and which layers
recompute: `planner.search.engine.options` and `planner.search.engine.solve` choose them.
All columns are integers, and every comparison is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cost import Workload
from planner.cost.mixed import MIXED_SCHEDULES
from planner.errors import LayoutError
from planner.schedule import find
from planner.schedule.entry import Shape
from planner.schedule.order_bound import SPLIT
from planner.schedule.synthesize import MOST_ACTIONS
from planner.search.engine.arrangement import Arrangement, Arrangements
from planner.search.engine.constraints import permitted
from planner.search.engine.division import divides
from planner.search.engine.options import Options
from planner.search.engine.space import (
    Offload,
    Space,
    cuts_sequences,
    divisors,
    runtime_constraints,
)
from planner.spec.job import Constraint

Column = NDArray[np.int64]
ScheduleStages = tuple[int, int]
"""Index of a schedule, and virtual stages per rank."""
SIMPLE = ("gpipe", "1f1b")
"""Schedules that one pipeline rank can take; all others need several."""


@dataclass(frozen=True, slots=True)
class Table:
    """Integer columns of equal length; row i is one layout without its options."""

    data: Column
    tensor: Column
    pipeline: Column
    context: Column
    expert: Column
    expert_tensor: Column
    """Tensor-parallel degree inside experts; 0: that of all layers."""
    micro_batch_size: Column
    micro_batches: Column
    """Per step of one data-parallel rank, the largest share."""
    sequence_parallel: Column
    """0 or 1."""
    sequence_chunks: Column
    schedule: Column
    """Index into `Space.schedules`."""
    virtual_stages: Column
    split: Column
    """Index into `Space.splits`."""
    offload: Column
    """Index into `Space.offloads`."""
    larger_shares: Column
    """Data-parallel ranks that have one micro-batch more than the others; 0: all have
    equal shares, or those of the arrangement."""
    arrangement: Column
    """Index into `arrangements`; 0: on one node group."""
    arrangements: tuple[Arrangement | None, ...]
    """Of ranks on several node groups; the first one is None."""

    def __len__(self) -> int:
        return len(self.data)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Table:
        """Return a table of some rows."""
        columns = {name: getattr(self, name)[rows] for name in COLUMN_NAMES}
        return Table(**columns, arrangements=self.arrangements)

    @property
    def replicas(self) -> Column:
        """Data- and context-parallel ranks."""
        return self.data * self.context

    @property
    def most_shards(self) -> Column:
        """The largest number of ranks that share the states of a layer.

        States of experts are shared by all ranks of a stage with the same experts.
        """
        own = np.where(self.expert_tensor > 0, self.expert_tensor, self.tensor)
        of_experts = self.replicas * self.tensor // (self.expert * own)
        most: Column = np.maximum(self.replicas, of_experts)
        return most

    @property
    def stages(self) -> Column:
        """Stages of all pipeline ranks."""
        return self.pipeline * self.virtual_stages


COLUMN_NAMES = tuple(
    field.name for field in fields(Table) if field.name != "arrangements"
)


def _differs(arrangement: Arrangement | None) -> bool:
    """Return whether the replicas of an arrangement differ."""
    return arrangement is not None and not arrangement.has_identical_replicas


def enumerate_table(work: Workload, space: Space) -> Table:
    """Return all layouts of a space that divide the devices, batch and layers.

    Every row has an option that the job and its runtime permit. Where replicas do not
    divide the micro-batches, the first ones have one more than the others.
    """
    degrees = _degrees(work, space)
    arrangements: tuple[Arrangement | None, ...] = (None,)
    if work.groups:
        degrees, arrangements = _arranged(work, space, degrees)
    table = _with_orders(work, space, degrees, arrangements)
    constraints = runtime_constraints(work)
    table = table.take(permitted(table, constraints))
    table = _with_offloads(table, space)
    options = Options(work, space)
    table = table.take(options.has_permitted_modes(table))
    return table.take(options.are_any(table))


def _degrees(work: Workload, space: Space) -> dict[str, Column]:
    """Return split, chunks and degrees of every combination that divides."""
    pairs = [
        (index, count) for index, counts in enumerate(space.chunks) for count in counts
    ]
    pipelines = np.array(
        [p for p in divisors(work.devices) if p <= len(work.profile.layers)],
        dtype=np.int64,
    )
    index, chunks = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    sizes = np.array(space.splits, dtype=np.int64).reshape(-1, 6)[index]
    micro_batch_size, tensor, context, expert, sequence_parallel, expert_tensor = (
        column[:, None] for column in sizes.T
    )
    all_experts = np.array([split.expert_ranks for split in space.splits])[index, None]
    others = tensor * context * pipelines
    data = work.devices // others
    divides_devices = data * others == work.devices
    divides_experts = (data * context * tensor) % all_experts == 0
    of_all_replicas, remainder = np.divmod(work.job.global_batch_size, micro_batch_size)
    least_share, larger_shares = np.divmod(of_all_replicas, np.maximum(1, data))
    divides_batch = (remainder == 0) & (data >= 1) & (least_share >= 1)
    if work.groups:
        has_shares = least_share >= 1
    elif space.has_uneven_shares:
        is_plain = (expert == 1) & (expert_tensor == 0) & (chunks[:, None] == 1)
        has_shares = (larger_shares == 0) | is_plain
    else:
        has_shares = larger_shares == 0
    is_layout = divides_devices & divides_experts & divides_batch & has_shares
    rows, columns = np.nonzero(is_layout)
    more = larger_shares[rows, columns]
    return {
        "data": data[rows, columns],
        "tensor": tensor[rows, 0],
        "pipeline": pipelines[columns],
        "context": context[rows, 0],
        "expert": expert[rows, 0],
        "expert_tensor": expert_tensor[rows, 0],
        "micro_batch_size": micro_batch_size[rows, 0],
        "micro_batches": least_share[rows, columns] + (more > 0),
        "sequence_parallel": sequence_parallel[rows, 0],
        "sequence_chunks": chunks[rows],
        "split": index[rows],
        "offload": np.zeros(len(rows), dtype=np.int64),
        "larger_shares": more,
        "arrangement": np.zeros(len(rows), dtype=np.int64),
    }


def _arranged(
    work: Workload, space: Space, degrees: Mapping[str, Column]
) -> tuple[dict[str, Column], tuple[Arrangement | None, ...]]:
    """Return every combination of degrees once for each arrangement of its ranks."""
    constraint = runtime_constraints(work).get("rank_order")
    every = Arrangements(work, constraint, has_shares=space.has_uneven_shares)
    found: list[Arrangement | None] = [None]
    rows: list[int] = []
    names = ("data", "pipeline", "split", "sequence_chunks")
    combinations = np.stack([degrees[name] for name in names], axis=1)
    for row, (data, pipeline, split, chunks) in enumerate(combinations.tolist()):
        if chunks > 1:
            continue
        for one in every.of((data, pipeline), space.splits[split]):
            rows.append(row)
            found.append(one)
    columns = {name: column[rows] for name, column in degrees.items()}
    numbers = [one.micro_batches for one in found if one is not None]
    columns["micro_batches"] = np.array(numbers, dtype=np.int64)
    columns["larger_shares"] = np.zeros(len(rows), dtype=np.int64)
    columns["arrangement"] = np.arange(1, len(rows) + 1)
    return columns, tuple(found)


def _with_orders(
    work: Workload,
    space: Space,
    degrees: Mapping[str, Column],
    arrangements: tuple[Arrangement | None, ...],
) -> Table:
    """Return one row for every schedule and number of stages that the degrees take."""
    differs = np.array([_differs(each) for each in arrangements], dtype=bool)
    is_unlike = (degrees["larger_shares"] > 0) | differs[degrees["arrangement"]]
    names = ("pipeline", "micro_batches", "sequence_chunks")
    shapes = np.stack([*(degrees[name] for name in names), is_unlike], axis=1)
    distinct, inverse = np.unique(shapes, axis=0, return_inverse=True)
    constraints = runtime_constraints(work)
    orders = [
        _orders(work, space, tuple(shape), constraints) for shape in distinct.tolist()
    ]
    counts = np.array([len(found) for found in orders], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    every = [order for found in orders for order in found]
    listed = np.array(every, dtype=np.int64).reshape(-1, 2)
    inverse = inverse.reshape(-1)
    repeats = counts[inverse]
    rows = np.repeat(np.arange(len(inverse)), repeats)
    first = np.cumsum(repeats) - repeats
    place = np.arange(len(rows)) - np.repeat(first, repeats)
    chosen = listed[starts[inverse[rows]] + place]
    columns = {name: column[rows] for name, column in degrees.items()}
    return Table(
        schedule=chosen[:, 0],
        virtual_stages=chosen[:, 1],
        **columns,
        arrangements=arrangements,
    )


def _orders(
    work: Workload,
    space: Space,
    shape: tuple[int, ...],
    constraints: Mapping[str, Constraint],
) -> list[ScheduleStages]:
    """Return the schedules and virtual stages that a number of ranks can take."""
    pipeline, micro_batches, chunks, is_unlike = shape
    layers = len(work.profile.layers)
    found = []
    for index, name in enumerate(space.schedules):
        if is_unlike and name not in MIXED_SCHEDULES:
            continue
        if cuts_sequences(name) != (chunks > 1) or (
            pipeline == 1 and name not in SIMPLE
        ):
            continue
        for virtual in space.virtual_stages:
            stages = pipeline * virtual
            if stages > layers or (is_unlike and virtual > 1):
                break
            if not takes(name, pipeline, micro_batches, virtual, chunks):
                continue
            if divides(work.profile, constraints, work.framework, stages):
                found.append((index, virtual))
    return found


def _with_offloads(table: Table, space: Space) -> Table:
    """Return the rows once for everything that may be offloaded, nothing first.

    Nothing is offloaded where replicas have unequal shares.
    """
    parts = []
    for place, offload in enumerate(space.offloads):
        part = table
        if offload != Offload():
            part = table.take(table.larger_shares == 0)
        parts.append(replace(part, offload=np.full(len(part), place)))
    if not parts:
        return table.take(np.zeros(len(table), dtype=np.bool_))
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in COLUMN_NAMES
    }
    return Table(**columns, arrangements=table.arrangements)


@lru_cache(maxsize=1 << 18)
def takes(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, chunks: int
) -> bool:
    """Return whether a schedule exists for these numbers."""
    entry = find(name)
    if not entry.takes_virtual_stages(virtual_stages):
        return False
    if entry.needs_durations:
        actions = len(SPLIT) * ranks * micro_batches * virtual_stages
        return actions <= MOST_ACTIONS
    try:
        entry.check(Shape(ranks, micro_batches, virtual_stages, chunks))
    except LayoutError:
        return False
    return True
