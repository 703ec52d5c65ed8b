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
from planner.search.engine.constraints import permitted
from planner.search.engine.division import divides
from planner.search.engine.options import Options
from planner.search.engine.space import (
    Offload,
    Space,
    divisors,
    runtime_constraints,
)
from planner.spec.job import Constraint

Column = NDArray[np.int64]
Order = tuple[int, int]
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
    equal shares."""

    def __len__(self) -> int:
        return len(self.data)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Table:
        """Return a table of some rows."""
        columns = (getattr(self, field.name)[rows] for field in fields(self))
        return Table(*columns)

    @property
    def replicas(self) -> Column:
        """Data- and context-parallel ranks."""
        return self.data * self.context

    @property
    def stages(self) -> Column:
        """Stages of all pipeline ranks."""
        return self.pipeline * self.virtual_stages


def enumerate_table(work: Workload, space: Space) -> Table:
    """Return all layouts of a space that divide the devices, batch and layers.

    Every row has an option that the job and its runtime permit. Where replicas do not
    divide the micro-batches, the first ones have one more than the others.
    """
    degrees = _degrees(work, space)
    table = _with_orders(work, space, degrees)
    constraints = runtime_constraints(work)
    table = table.take(permitted(table, constraints))
    table = _with_offloads(table, space)
    options = Options(work, space)
    table = table.take(options.may_recompute(table))
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
    sizes = np.array(space.splits, dtype=np.int64).reshape(-1, 5)[index]
    micro_batch_size, tensor, context, expert, sequence_parallel = (
        column[:, None] for column in sizes.T
    )
    others = tensor * context * pipelines
    data = work.devices // others
    divides_devices = data * others == work.devices
    divides_experts = (data * context) % expert == 0
    every_round, remainder = np.divmod(work.job.global_batch_size, micro_batch_size)
    smaller, larger = np.divmod(every_round, np.maximum(1, data))
    divides_batch = (remainder == 0) & (data >= 1) & (smaller >= 1)
    if space.has_uneven_shares:
        has_shares = (larger == 0) | ((expert == 1) & (chunks[:, None] == 1))
    else:
        has_shares = larger == 0
    divides = divides_devices & divides_experts & divides_batch & has_shares
    rows, columns = np.nonzero(divides)
    more = larger[rows, columns]
    return {
        "data": data[rows, columns],
        "tensor": tensor[rows, 0],
        "pipeline": pipelines[columns],
        "context": context[rows, 0],
        "expert": expert[rows, 0],
        "micro_batch_size": micro_batch_size[rows, 0],
        "micro_batches": smaller[rows, columns] + (more > 0),
        "sequence_parallel": sequence_parallel[rows, 0],
        "sequence_chunks": chunks[rows],
        "split": index[rows],
        "offload": np.zeros(len(rows), dtype=np.int64),
        "larger_shares": more,
    }


def _with_orders(work: Workload, space: Space, degrees: Mapping[str, Column]) -> Table:
    """Return one row for every schedule and number of stages that the degrees take."""
    has_equal_shares = degrees["larger_shares"] == 0
    names = ("pipeline", "micro_batches", "sequence_chunks")
    shapes = np.stack([*(degrees[name] for name in names), has_equal_shares], axis=1)
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
    return Table(schedule=chosen[:, 0], virtual_stages=chosen[:, 1], **columns)


def _orders(
    work: Workload,
    space: Space,
    shape: tuple[int, ...],
    constraints: Mapping[str, Constraint],
) -> list[Order]:
    """Return the schedules and virtual stages that a number of ranks can take."""
    pipeline, micro_batches, chunks, has_equal_shares = shape
    layers = len(work.profile.layers)
    found = []
    for index, name in enumerate(space.schedules):
        if not has_equal_shares and name not in MIXED_SCHEDULES:
            continue
        is_chunked = find(name).takes_sequence_chunks
        if is_chunked != (chunks > 1) or (pipeline == 1 and name not in SIMPLE):
            continue
        for virtual in space.virtual_stages:
            stages = pipeline * virtual
            if stages > layers:
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
    columns = (
        np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(Table)
    )
    return Table(*columns)


@lru_cache(maxsize=1 << 18)
def takes(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, chunks: int
) -> bool:
    """Return whether a schedule exists for these numbers."""
    entry = find(name)
    if not entry.takes_virtual_stages(virtual_stages):
        return False
    try:
        entry.check(Shape(ranks, micro_batches, virtual_stages, chunks))
    except LayoutError:
        return False
    return True
