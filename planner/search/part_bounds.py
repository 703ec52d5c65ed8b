"""Lower bounds of the step on every part of a cluster, told before the layouts of any of them are looked at.

Let layers be split in one way: micro-batches of b samples, tensor degree t, context degree c. w(l) are the fewest ticks
of layer l for one micro-batch, f(l) those of its forward, on the fastest of the part's devices, with tensor-parallel
ranks as near to each other as they can lie. n = d t c P devices are d data ranks of P pipeline ranks; of B samples some
data rank has at least M = ceil(B / (b d)) micro-batches, by (D2). Whatever the schedule, the stage map and the rest:

    (K1)  T >= M times the longest w(l): the rank that holds the layer does that                   -> _Split.least()
    (K2)  T >= (M sum of w(l) + sum over k < P of D(k)) / P, with D(k) the forwards of the first k layers. It is a mean
          over the P ranks: each has a lowest stage of its own, so the k-th of these stands behind k layers at least;
          its rank begins once the first micro-batch has come down to it, and then does all of its work
                                                                                                   -> _Split.least()
    (K3)  T >= sum of w(l) less its weight gradients: one way down and up, equation (B4)           -> _Split.least()
          with Q sequence chunks f(l) and this are those of the first one, as in (Q2)

    (K4)  where b d does not divide B, data ranks differ, and their pipelines run under gpipe or 1f1b alone: (B2) with
          even weights, T >= sum of w(l) + (max(0, M - P) sum of f(l) + (M - 1) sum of the rest) / P -> _Split.least()

    (K5)  what is least over all splits, and all d and P, bounds every layout of the part        -> least_part_ticks()

Of parts with the same kinds of devices, (K5) depends on their number alone, so all are bounded at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import Workload
from planner.cost.communication import Group
from planner.cost.groups import Groups
from planner.cost.pricing import LayerCost, LayerPricing, known_prices
from planner.cost.workload import modes_of
from planner.search.bounds import first_chunk, work_of
from planner.search.chunks import chunks_of
from planner.search.orders import MODES, orders_of, schedules_of
from planner.search.parts import Part
from planner.search.standing import Standing
from planner.spec.cluster import NodeGroup
from planner.spec.job import allows
from planner.spec.layout import Layout
from planner.spec.profile import RecomputeMode

Split = tuple[int, int, int, int, bool]
"""A key of `Workload.sizes`."""
_Ticks = NDArray[np.float64]
_ROUNDING = 1e-9
_ALONE = Group(1, 1, 1)


@dataclass(frozen=True, slots=True)
class _Split:
    """Fewest ticks of layers that are split in one way."""

    size: int
    """Samples of a micro-batch."""
    ranks: int
    """Tensor times context degree."""
    forward: float
    """Of all layers, as `total`."""
    total: float
    longest: float
    passing: float
    down: _Ticks
    """By number of pipeline ranks, from 1: the sum in (K2)."""
    turns: bool
    """(K4) holds."""

    @classmethod
    def of(cls, works: Sequence[Workload], split: Split, chunks: int, *, turns: bool) -> Self:
        """On the fastest of several kinds of devices, layer by layer."""
        each = np.array([_layer_ticks(work, split, chunks) for work in works], dtype=np.float64).min(axis=0)
        forward, work, passing = each
        down = np.concatenate([[0.0], forward[:-1]]).cumsum().cumsum()
        sums = forward.sum(), work.sum(), work.max(), passing.sum()
        return cls(split[0], split[1] * split[2], *sums, down, turns)

    def least(self, batch: int, pipeline: int, data: NDArray[np.int64]) -> _Ticks:
        """By number of data ranks: the largest of (K1) to (K4)."""
        micro_batches = batch // self.size
        count = -(-micro_batches // data)
        mean = (count * self.total + self.down[pipeline - 1]) / pipeline
        bound: _Ticks = np.maximum(np.maximum(count * self.longest, mean), self.passing)
        if self.turns:
            further = np.maximum(0, count - pipeline) * self.forward + (count - 1) * (self.total - self.forward)
            turned = self.total + further / pipeline
            bound = np.where(micro_batches % data == 0, bound, np.maximum(bound, turned))
        return bound


def _layer_ticks(work: Workload, split: Split, chunks: int) -> tuple[list[int], list[int], list[int]]:
    """By layer: the first forward, all work of a micro-batch, and what layers before it wait for, each at its least."""
    alike, costs = _costs(work, split, chunks)
    least = {
        place: (min(first_chunk(cost, chunks)[0] for cost in options.values()), *work_of(options.values(), chunks))
        for place, options in costs.items()
    }
    forward, ticks, passing = zip(*map(least.__getitem__, alike), strict=True)
    return list(forward), list(ticks), list(passing)


def _costs(
    work: Workload, split: Split, chunks: int
) -> tuple[tuple[int, ...], dict[int, dict[RecomputeMode, LayerCost]]]:
    """By layer the first one that costs the same, and what that costs where tensor-parallel ranks lie as near as they
    can, no others exchange anything, and nothing is shared out."""
    layout = Layout.model_construct(tensor_parallel_degree=split[1], sequence_chunks=chunks)
    rows, groups = work.sizes[split], Groups(_nearest(work, split[1]), *(_ALONE,) * 7)
    known, alike, costs = known_prices(work, groups, chunks), work.alike(rows), {}
    for place in set(alike):
        plain, parameters = rows[place][modes_of(rows[place])[0]], work.profile.layers[place].parameters
        costs[place] = LayerPricing(work, layout, groups, parameters, plain, known).costs(rows[place])
    return alike, costs


def _nearest(work: Workload, ranks: int) -> Group:
    """Neighbours in one domain; one rank, which exchanges nothing, where other links might be faster or are not known:
    the cluster has other node groups."""
    intra, inter = work.intra_node, work.inter_node or work.intra_node
    is_slower = inter.bandwidth_bytes_per_second <= intra.bandwidth_bytes_per_second
    is_inside = ranks <= work.domain_devices and not (intra.fits or inter.fits)
    return (
        Group(ranks, 1, ranks) if is_inside and is_slower and inter.latency_seconds >= intra.latency_seconds else _ALONE
    )


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
    found = np.zeros(len(parts))
    for places_of_groups, places in by_kinds.items():
        works = [(work.groups or (work,))[at] for at in places_of_groups]
        found[places] = _least(works, np.array([parts[place].devices for place in places], dtype=np.int64))
    return [float(ticks) for ticks in found]


def _kind(group: NodeGroup) -> tuple[object, ...]:
    """What a node is."""
    device = group.device if isinstance(group.device, str) else group.device.model_dump_json()
    return device, group.devices_per_node, None if group.intra_node is None else group.intra_node.model_dump_json()


def _least(works: Sequence[Workload], devices: NDArray[np.int64]) -> _Ticks:
    """By number of devices: the least of all splits, rounded down."""
    batch, layers = works[0].job.global_batch_size, len(works[0].profile.layers)
    least = np.full(len(devices), np.inf)

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
    return np.floor(least * (1 - _ROUNDING))


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
