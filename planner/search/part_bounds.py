"""Lower bounds of the step on every part of a cluster, told before the layouts of any of them are looked at.

n = d t c P devices are d data ranks of P pipeline ranks, each of tensor degree t and context degree c. With
micro-batches of b samples out of B, some data rank has at least M = ceil(B / (b d)) of them, by (D2); its P ranks take
as long as (K1) to (K3) of `planner.search.least_work` say, with the ticks of the fastest of the part's devices, and
tensor-parallel ranks as near to each other as they can lie.

    (K4)  where b d does not divide B, data ranks differ, and their pipelines run under gpipe or 1f1b alone: (B2) with
          even weights, T >= sum of w(l) + (max(0, M - P) sum of f(l) + (M - 1) sum of the rest) / P -> _Split.least()

    (K5)  what is least over all splits, and all d and P, bounds every layout of the part        -> least_part_ticks()

Of parts with the same kinds of devices, (K5) depends on their number alone, so all are bounded at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import Workload
from planner.cost.nearest import Split, nearest_costs
from planner.search.chunks import chunks_of
from planner.search.least_work import LeastWork, Ticks, by_layer
from planner.search.orders import MODES, orders_of, schedules_of
from planner.search.parts import Part
from planner.search.standing import Standing
from planner.spec.cluster import NodeGroup
from planner.spec.job import allows

_NONE = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class _Split:
    """Layers that are split in one way."""

    size: int
    """Samples of a micro-batch."""
    ranks: int
    """Tensor times context degree."""
    work: LeastWork
    turns: bool
    """(K4) holds."""

    @classmethod
    def of(cls, works: Sequence[Workload], split: Split, chunks: int, *, turns: bool) -> Self:
        """On the fastest of several kinds of devices, layer by layer."""
        rows = np.minimum.reduce([by_layer(nearest_costs(work, split, chunks), chunks) for work in works])
        return cls(split[0], split[1] * split[2], LeastWork.of(rows), turns)

    def least(self, batch: int, pipeline: int, data: Ticks) -> Ticks:
        """By number of data ranks: the largest of (K1) to (K4)."""
        micro_batches, work = batch // self.size, self.work
        count = -(-micro_batches // data)
        bound = work.steps(pipeline, count)
        if self.turns:
            further = np.maximum(0, count - pipeline) * work.forward + (count - 1) * (work.total - work.forward)
            turned = work.total + further // pipeline
            bound = np.where(micro_batches % data == 0, bound, np.maximum(bound, turned))
        return bound


def least_part_ticks(work: Workload, parts: Sequence[Part]) -> list[float]:
    """Ticks of a step that no layout on a part beats, by part: equation (K5); infinite where there is no layout.

    Args:
        work: of the whole cluster.
        parts: of it.
    """
    known = [_kind(group) for group in work.cluster.node_groups]
    by_kinds: dict[tuple[int, ...], list[int]] = {}
    for place, part in enumerate(parts):
        kinds = {_kind(group) for group in part.cluster.node_groups}
        if kinds.issubset(known):  # else fewer devices of a node than it has, which other links may join
            by_kinds.setdefault(tuple(at for at, kind in enumerate(known) if kind in kinds), []).append(place)
    found = np.zeros(len(parts), dtype=np.int64)
    for places_of_groups, places in by_kinds.items():
        works = [(work.groups or (work,))[at] for at in places_of_groups]
        found[places] = _least(works, np.array([parts[place].devices for place in places], dtype=np.int64))
    return [math.inf if ticks == _NONE else ticks for ticks in found.tolist()]


def _kind(group: NodeGroup) -> tuple[object, ...]:
    """What a node is."""
    device = group.device if isinstance(group.device, str) else group.device.model_dump_json()
    return device, group.devices_per_node, None if group.intra_node is None else group.intra_node.model_dump_json()


def _least(works: Sequence[Workload], devices: Ticks) -> Ticks:
    """By number of devices: the least of all splits."""
    batch, layers = works[0].job.global_batch_size, len(works[0].profile.layers)
    least = np.full(len(devices), _NONE)

    @cache
    def dividing(ranks: int) -> NDArray[np.intp]:
        return np.flatnonzero(devices % ranks == 0)

    for one in _splits(works):
        for pipeline in range(1, layers + 1):
            places = dividing(one.ranks * pipeline)
            data = devices[places] // (one.ranks * pipeline)
            places, data = places[data * one.size <= batch], data[data * one.size <= batch]
            if len(places):
                least[places] = np.minimum(least[places], one.least(batch, pipeline, data))
    return least


def _splits(works: Sequence[Workload]) -> Iterator[_Split]:
    """Every split and number of sequence chunks that the job permits and its batch divides into."""
    job, sizes = works[0].job, set(works[0].sizes).intersection(*(work.sizes for work in works))
    schedules = schedules_of(job.constraints.get("schedule"))
    fields = "micro_batch_size", "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"
    turns = all(_turns(work, schedules) for work in works)
    for split in sorted(sizes):
        permitted = all(allows(job.constraints.get(field), value) for field, value in zip(fields, split, strict=False))
        if permitted and job.global_batch_size % split[0] == 0:
            for chunks in (1, *chunks_of(works[0], split, job.constraints, schedules)):
                yield _Split.of(works, split, chunks, turns=chunks == 1 and turns)


def _turns(work: Workload, schedules: tuple[str, ...]) -> bool:
    """Do pipelines of data ranks that differ run under gpipe or 1f1b alone?"""
    differing = Standing(micro_batches=2, shares=(2, 1), are_alike=False)
    return not any(order.is_dealt for order in orders_of(work, 2, differing, 1, schedules, (1, 2), MODES))
