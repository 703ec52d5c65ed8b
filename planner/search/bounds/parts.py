"""Lower bounds of the step on every part of a cluster, told before the layouts of any of them are looked at.

n = d t c P devices are d data ranks of P pipeline ranks, each of tensor degree t and context degree c. With
micro-batches of b samples out of B, some data rank has at least M = ceil(B / (b d)) of them, by (D2); its P ranks take
as long as (K1) to (K3) of `bounds.least_work` and (K5) to (K9) of `bounds.splits` say, with
tensor-parallel ranks, and those that share experts, as near to each other as they can lie.

    (K4)  where devices differ, and where sequences are cut, each layer takes the ticks of the fastest device, or of the
          first chunk, and nothing is known of memory                                                -> _Split.of()

    (K10) what is least over all splits, and all d and P, bounds every layout of the part; what is least for one split,
          d and P, every layout of that family; and of these, (K8) and (K9) tell apart ZeRO stages, and those whose
          orders recompute and split backwards in one way (`planner.search.layouts.order_classes`)
                                                                              -> PartBounds.least, PartBounds.of_part()

Of parts with the same kinds of devices, these depend on their number alone, so all are bounded at once; some devices of
one node, which the same links join, are of that node's kind. Where a plan to beat is known, what may still beat it is
looked at more closely, by (K11) to (K13) of `planner.search.bounds.depth` and (K14) to (K16) of
`planner.search.bounds.ranks`, and where experts are shared out, by how many ranks share out the states of the same ones
                                                                                               -> PartBounds.raised_to()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import Workload, reserved_bytes
from planner.cost.nearest import (
    Layers,
    Split,
    exchanging_costs,
    expert_shares,
    nearest_costs,
    stand_apart,
)
from planner.cost.pricing import LayerCost
from planner.search.bounds.depth import Depth
from planner.search.bounds.least_work import by_layer
from planner.search.bounds.ranks import InFlight, Ranks, falling, mixed, rising
from planner.search.bounds.splits import (
    PLENTY,
    Alike,
    Floats,
    Held,
    Mask,
    Mixed,
    Pipelines,
    Ticks,
)
from planner.search.engine.offloading import NOTHING, offloadings_of
from planner.search.layouts import order_classes
from planner.search.layouts.chunks import chunks_of
from planner.search.layouts.order_classes import (
    ALIKE,
    CLASSES,
    MADE,
    PER_LAYER,
    SEARCHED,
    SPLIT,
    FamilyBounds,
)
from planner.search.layouts.orders import MODES, SYNTHESIZED, schedules_of
from planner.search.parts import Part
from planner.spec.cluster import Cluster, NodeGroup
from planner.spec.devices import links_of
from planner.spec.job import allows
from planner.spec.layout import ZeroStage
from planner.spec.profile import RecomputeMode

_LESS = 1 - 1e-9
"""For rounding of floating-point sums."""
_STAGES: tuple[tuple[ZeroStage, int], ...] = ((0, 1), (2, 2), (3, 3))
"""ZeRO's, and how much it shares out: optimizer states (0 stands for 1, too), gradients, parameters."""
_OF_NODE = {"name", "nodes", "devices_per_node", "host_memory_bytes"}
"""Fields of a node group in which some devices of a node differ from it."""
_ALIKE_NEAR: tuple[tuple[int, float], ...] = ((1, 1), (2, math.inf))
_ALIKE_APART: tuple[tuple[int, float], ...] = ((1, 1), (2, 2), (3, 4), (5, math.inf))
"""Fewest and most ranks that share out the states of the same experts: more of them exchange more, and hold less."""


_Asked = Callable[[Pipelines, Floats], Mask]
"""Do all steps of pipelines take more than so many ticks?"""


class PartBounds:
    """What the parts of a cluster, and the families of their layouts, take at least."""

    def __init__(self, work: Workload, parts: Sequence[Part]) -> None:
        """Bound all of them: equation (K10).

        Args:
            work: of the whole cluster.
            parts: of it.
        """
        self._parts = {
            (part.nodes, part.devices): place for place, part in enumerate(parts)
        }
        self._found: list[_Found] = []
        unknown = np.ones(len(parts), dtype=bool)
        for works, places in _by_kinds(work, parts):
            unknown[places] = False
            devices = np.array(
                [parts[place].devices for place in places], dtype=np.int64
            )
            self._found += [one.on(places) for one in _families(works, devices)]
        self._unbounded = np.where(unknown, 0.0, math.inf)

    @property
    def least(self) -> list[float]:
        """Ticks of a step that no layout beats, by part; infinite where there is no layout."""
        least = self._unbounded.copy()
        for one in self._found:
            np.minimum.at(least, one.places, one.ticks.min(axis=(0, 1)))
        found: list[float] = least.tolist()
        return found

    def is_known(self, part: Part) -> bool:
        """Are the families of the part bounded?"""
        return bool(self._unbounded[self._place(part)] > 0)

    def of_part(self, part: Part) -> FamilyBounds:
        """Ticks that no layout of a family on the part beats, by its split, sequence chunks and pipeline ranks, by ZeRO
        stages and class of the order; infinite where none fits."""
        place, found = self._place(part), {}
        for one in self._found:
            for at in np.flatnonzero(one.places == place).tolist():
                found[one.split.key, one.split.chunks, int(one.ranks[at])] = one.ticks[
                    :, :, at
                ]
        return found

    def raised_to(self, limits: Sequence[float]) -> None:
        """What may take less than these ticks, by part, and does not by (K11) to (K16), takes so many from now on."""
        by_part = np.array(limits, dtype=np.float64)
        self._found = [one.raised_to(by_part) for one in self._found]

    def _place(self, part: Part) -> int:
        return self._parts[part.nodes, part.devices]


@dataclass(frozen=True, slots=True)
class _Zero:
    """Layers under some ZeRO stages."""

    stage: int | None
    """Place in `_STAGES`; None: any."""
    least_replicas: int
    held: Held
    modes: tuple[Alike, ...]
    """Split backwards first, then full ones in every mode; or what holds of all."""
    mixed: Mixed | None = None
    fuller: _Fuller | None = None

    def least(self, at: Pipelines) -> Floats:
        """Ticks that no step beats, rounded down, [class, pipeline]; never, where there are too few replicas."""
        left = self.held.left(at)
        split, *full = (mode.least(at, left) for mode in self.modes)
        alike = np.minimum.reduce(full or [split])
        mixed = alike if self.mixed is None else self.mixed.least(at, left)
        rows = {
            SEARCHED: np.where(at.are_alike, mixed, alike),
            PER_LAYER: mixed,
            ALIKE: alike,
            SPLIT: split,
        }
        rows[MADE] = np.minimum(alike, split)
        least = np.floor(np.array([rows[each] for each in range(CLASSES)]) * _LESS)
        return np.where(at.replicas < self.least_replicas, np.inf, least)

    def raised(self, at: Pipelines, limits: Floats) -> Floats:
        """The same, but the limit, rounded up, where no step takes so little."""
        least = self.least(at)
        for kind in range(CLASSES if self.fuller else 0):
            some = np.flatnonzero(least[kind] < limits)
            if len(some) and self.fuller:
                is_beaten = self.fuller.is_too_little(at.some(some), limits[some], kind)
                least[kind, some] = np.where(
                    is_beaten, np.ceil(limits[some]), least[kind, some]
                )
        return least


@dataclass(frozen=True)
class _Fuller:
    """What takes longer to bound, and is asked of what may beat a plan alone."""

    layers: Layers
    modes: tuple[Alike, ...]
    """Split backwards first, then full ones in every mode."""
    held: Held

    @cached_property
    def _depth(self) -> Depth:
        return Depth.of(self.layers, self.held)

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks.of(self.layers, self.held)

    @cached_property
    def _alike(self) -> tuple[Ranks, ...]:
        """By mode."""
        return tuple(
            Ranks.of_alike(self.layers, mode, self.held) for mode in self.modes
        )

    def is_too_little(self, at: Pipelines, ticks: Floats, kind: int) -> Mask:
        """Does every step of these pipelines and this class take more ticks?"""
        match kind:
            case order_classes.SEARCHED:
                asked = (
                    self._ranks.leave_neighbours,
                    partial(self._depth.is_too_little, are_dealt=False),
                )
                return _any(asked, at, ticks)
            case order_classes.PER_LAYER:
                counted = partial(self._ranks.leave_alike, in_flight=mixed)
                return _any(
                    (counted, partial(self._depth.is_too_little, are_dealt=True)),
                    at,
                    ticks,
                )
            case order_classes.ALIKE:
                return self._all_modes(
                    range(1, len(self.modes)), (rising, falling), at, ticks
                )
            case order_classes.SPLIT:
                return self._all_modes(range(1), (rising,), at, ticks)
        return np.zeros(len(ticks), dtype=bool)

    def _all_modes(
        self, modes: range, ways: Sequence[InFlight], at: Pipelines, ticks: Floats
    ) -> Mask:
        """Do all layouts whose layers take one of these modes, and ranks hold in one of these ways?"""
        found, left = np.ones(len(ticks), dtype=bool), self.held.left(at)
        for mode in modes:
            in_time = np.flatnonzero(
                found & (self.modes[mode].least(at, left) * _LESS <= ticks)
            )
            for way in ways if len(in_time) else ():
                found[in_time] &= self._alike[mode].leave_alike(
                    at.some(in_time), ticks[in_time], way
                )
        return found


def _any(asked: Sequence[_Asked], at: Pipelines, ticks: Floats) -> Mask:
    """Does one of these say so? Each is asked of what is left."""
    found = np.zeros(len(ticks), dtype=bool)
    for one in asked:
        rest = np.flatnonzero(~found)
        if len(rest):
            found[rest] = one(at.some(rest), ticks[rest])
    return found


@dataclass(frozen=True)
class _Split:
    """Layers that are split in one way."""

    key: Split
    chunks: int
    zeros: tuple[_Zero, ...]
    work: Workload | None = None
    """Where devices are alike and sequences whole."""

    @cached_property
    def _finer_zeros(self) -> tuple[_Zero, ...]:
        """Where experts are shared out, by how many share the same ones."""
        if self.work is None or self.key[3] == 1:
            return self.zeros
        return tuple(_zeros_of_experts(self.work, self.key))

    @classmethod
    def of(cls, works: Sequence[Workload], key: Split, chunks: int) -> Self:
        """On several kinds of devices, or in chunks, by (K4)."""
        if len(works) == 1 and chunks == 1 and len(works[0].cluster.node_groups) == 1:
            return cls(key, chunks, tuple(_zeros(works[0], key)), works[0])
        rows = [nearest_costs(work, key, chunks) for work in works]
        first, total, passing = np.minimum.reduce(
            [by_layer(one, chunks) for one in rows]
        )
        if chunks == 1:
            total = first + np.minimum.reduce(
                [list(map(_least_backward, one)) for one in rows]
            )
        fastest = Alike.unheld(first, total, passing, may_differ=chunks == 1)
        return cls(key, chunks, (_Zero(None, 1, PLENTY, (fastest,)),))

    @property
    def devices(self) -> int:
        """Of a pipeline rank."""
        return self.key[1] * self.key[2]

    def pipelines(self, batch: int, ranks: Ticks, data: Ticks) -> Pipelines:
        """By numbers of pipeline and data ranks."""
        micro_batches = batch // self.key[0]
        return Pipelines(
            ranks,
            data * self.key[2],
            -(-micro_batches // data),
            micro_batches % data == 0,
        )

    def least(self, at: Pipelines) -> Floats:
        """Ticks, [ZeRO stages, class, pipeline]."""
        return _by_stage(self.zeros, [zero.least(at) for zero in self.zeros])

    def raised(self, at: Pipelines, limits: Floats) -> Floats:
        """The same, raised up to these limits."""
        return _by_stage(
            self._finer_zeros, [zero.raised(at, limits) for zero in self._finer_zeros]
        )


def _by_stage(zeros: Sequence[_Zero], ticks: Sequence[Floats]) -> Floats:
    """The least of each of `_STAGES`."""
    every = [
        np.minimum.reduce(
            [
                each
                for zero, each in zip(zeros, ticks, strict=True)
                if zero.stage in (None, place)
            ]
        )
        for place in range(len(_STAGES))
    ]
    least: Floats = np.array(every)
    return least


@dataclass(frozen=True, slots=True)
class _Found:
    """Bounds of pipelines of one split."""

    split: _Split
    places: NDArray[np.intp]
    """Part of each."""
    at: Pipelines
    ticks: Floats
    """[ZeRO stages, class, pipeline]."""

    @property
    def ranks(self) -> Ticks:
        """P of each."""
        return self.at.ranks

    def on(self, places: NDArray[np.intp]) -> Self:
        """With other numbers for the parts."""
        return replace(self, places=places[self.places])

    def raised_to(self, limits: Floats) -> Self:
        """What may take less than these ticks, by part, bounded again."""
        limits = limits[self.places]
        some = np.flatnonzero(self.ticks.min(axis=(0, 1)) < limits)
        if not len(some):
            return self
        ticks, raised = (
            self.ticks.copy(),
            self.split.raised(self.at.some(some), limits[some]),
        )
        ticks[:, :, some] = np.maximum(ticks[:, :, some], raised)
        return replace(self, ticks=ticks)


def _least_backward(options: Mapping[RecomputeMode, LayerCost]) -> int:
    return min(cost.backward_ticks for cost in options.values())


def _zeros(work: Workload, key: Split) -> Iterator[_Zero]:
    """ZeRO 0 and 1, 2, and 3: with what exchanges take at least, and what OGP is left."""
    yield from (_zero(work, key, stage, shared) for stage, shared in _STAGES)


def _zeros_of_experts(work: Workload, key: Split) -> Iterator[_Zero]:
    """The same by the number of ranks with the same experts that share out their states."""
    ranges = _ALIKE_APART if stand_apart(work, key) else _ALIKE_NEAR
    for stage, shared in _STAGES:
        for fewest, most in ranges if stage else ((1, math.inf),):
            yield _zero(work, key, stage, shared, fewest, most)


def _zero(
    work: Workload,
    key: Split,
    stage: ZeroStage,
    shared: int,
    fewest: int = 1,
    most: float = math.inf,
) -> _Zero:
    layers = exchanging_costs(work, key, stage, fewest)
    ogp, experts = _ogp_bytes(work, key, exchanging_costs(work, key, 0))
    gathered = 2 * max(
        next(iter(options.values())).gathered_bytes for options in layers
    )
    temporary = min(
        cost.temporary_bytes for options in layers for cost in options.values()
    )
    room, of_experts = (
        _room_bytes(work) - gathered - temporary,
        experts[:shared].sum(axis=0),
    )
    others = ogp[:shared].sum(axis=0) - of_experts
    held = Held(
        room, ogp[shared:].sum(axis=0), others, of_experts, key[3], most * key[3]
    )
    if offloadings_of(work, dict(work.job.constraints)) != (NOTHING,):
        held = PLENTY
    modes = [mode for mode in MODES if any(mode in options for options in layers)]
    rows = [
        [options.get(mode, next(iter(options.values()))) for options in layers]
        for mode in modes
    ]
    alike = [Alike.of(each, splits=False) for each in rows]
    every = (Alike.of(rows[0], splits=True), *alike)
    return _Zero(
        stage=[each for each, _ in _STAGES].index(stage),
        least_replicas=max(1 + (stage > 0), fewest * key[3]),
        held=held,
        modes=every,
        mixed=Mixed.of(alike, held.room_bytes),
        fuller=None if held is PLENTY else _Fuller(layers, every, held),
    )


def _ogp_bytes(work: Workload, key: Split, plain: Layers) -> tuple[Floats, Floats]:
    """Optimizer states, gradients and parameters by layer, that no rank shares out, and what of them is of experts."""
    rows = [next(iter(options.values())) for options in plain]
    ogp = np.array(
        [
            (one.optimizer_bytes, one.gradients_bytes, one.parameters_bytes)
            for one in rows
        ],
        dtype=np.float64,
    )
    ogp[_stored_again(work)] = 0.0
    shares = np.array(
        [(trained, trained, of_all) for of_all, trained in expert_shares(work, key)]
    )
    return ogp.T, (ogp * shares).T


def _stored_again(work: Workload) -> list[int]:
    """Layers whose parameters a layer before them shares: a rank that holds both stores them once."""
    again = {
        name for shared in work.profile.shared_parameters for name in shared.layers[1:]
    }
    return [
        place for place, layer in enumerate(work.profile.layers) if layer.name in again
    ]


def _room_bytes(work: Workload) -> int:
    return (
        work.capacity_bytes - reserved_bytes(work) - int(work.constants.workspace_bytes)
    )


def _by_kinds(
    work: Workload, parts: Sequence[Part]
) -> Iterator[tuple[list[Workload], NDArray[np.intp]]]:
    """Parts with the same kinds of devices: on which these are, and the places of the parts."""
    known = [_kind(group) for group in work.cluster.node_groups]
    found: dict[tuple[int, ...], list[int]] = {}
    for place, part in enumerate(parts):
        kinds = {_kind(group) for group in part.cluster.node_groups}
        alone = [
            at
            for at, group in enumerate(work.cluster.node_groups)
            if _is_of_node(part.cluster, group)
        ]
        if (
            kinds.issubset(known) or alone
        ):  # else other links may join so few devices of a node
            every = tuple(at for at, kind in enumerate(known) if kind in kinds)
            found.setdefault(every or tuple(alone[:1]), []).append(place)
    for kinds_of_parts, places in found.items():
        yield [(work.groups or (work,))[at] for at in kinds_of_parts], np.array(places)


def _kind(group: NodeGroup) -> tuple[object, ...]:
    """What a node is."""
    device = (
        group.device
        if isinstance(group.device, str)
        else group.device.model_dump_json()
    )
    return (
        device,
        group.devices_per_node,
        None if group.intra_node is None else group.intra_node.model_dump_json(),
    )


def _is_of_node(part: Cluster, group: NodeGroup) -> bool:
    """Are these some devices of one node of the group, which the same links join? Whatever ranks exchange there, they
    exchange on one node of the group, too."""
    mine = part.node_groups[0]
    is_one = (
        len(part.node_groups) == 1
        and mine.nodes == 1
        and mine.devices_per_node < group.devices_per_node
    )
    if not is_one or mine.model_dump(exclude=_OF_NODE) != group.model_dump(
        exclude=_OF_NODE
    ):
        return False
    return mine.devices_per_node == 1 or links_of(mine)[0] == links_of(group)[0]


def _families(works: Sequence[Workload], devices: Ticks) -> Iterator[_Found]:
    """Every split, with all numbers of pipeline and data ranks on so many devices."""
    batch, layers = works[0].job.global_batch_size, len(works[0].profile.layers)
    may_be_made = SYNTHESIZED in schedules_of(works[0].job.constraints.get("schedule"))

    @cache
    def dividing(ranks: int) -> NDArray[np.intp]:
        return np.flatnonzero(devices % ranks == 0)

    for one in _splits(works):
        by_ranks = [
            dividing(one.devices * pipeline) for pipeline in range(1, layers + 1)
        ]
        places = np.concatenate(by_ranks)
        ranks = np.repeat(np.arange(1, layers + 1), list(map(len, by_ranks)))
        data = devices[places] // (one.devices * ranks)
        enough = data * one.key[0] <= batch
        if enough.any():
            places, ranks = places[enough], ranks[enough]
            at = one.pipelines(batch, ranks, data[enough])
            least = one.least(at)
            if not may_be_made:
                least[:, MADE] = np.inf
            yield _Found(one, places, at, least)


def _splits(works: Sequence[Workload]) -> Iterator[_Split]:
    """Every split and number of sequence chunks that the job permits and its batch divides into."""
    job, sizes = (
        works[0].job,
        set(works[0].sizes).intersection(*(work.sizes for work in works)),
    )
    schedules = schedules_of(job.constraints.get("schedule"))
    fields = (
        "micro_batch_size",
        "tensor_parallel_degree",
        "context_parallel_degree",
        "expert_parallel_degree",
    )
    for key in sorted(sizes):
        permitted = all(
            allows(job.constraints.get(field), value)
            for field, value in zip(fields, key, strict=False)
        )
        if permitted and job.global_batch_size % key[0] == 0:
            for chunks in (1, *chunks_of(works[0], key, job.constraints, schedules)):
                yield _Split.of(works, key, chunks)
