"""Stage maps that are dealt out by a rule instead of searched: several stages per rank, and split backwards.

All layers recompute alike, in mode r; w(l) = f(l) + b(l, r); where ranks differ see `stage_maps.dealt_on_groups`:

    (E1), (E2)  the rule by which the layers are dealt                                       -> engine.dealing

Whatever the order, a rank runs nothing before its lowest stage has its first input, and all of its work after that:

    (E3)  T >= sum of F(k) below the rank's lowest stage s + M w(rank) + tail(rank)                   -> Uniform.bound()
    (E4)  where the last rank ends with a backward of its lowest stage, that gradient still has the way up:
          T >= the same + sum of B(k) below s + tail(rank 0)                                    -> Uniform.bound()
          with Q sequence chunks, for F(k) and B(k) below s those of the first chunk: it comes down first, and its
          gradient goes up last
    (E5)  no rank holds fewer micro-batches when there are more of them, so a short schedule tells what a long one
          holds at least                                                                -> Traits, may_hold()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayoutCosts, StageMap
from planner.schedule import Schedule, build, find
from planner.schedule.entry import Shape
from planner.schedule.in_flight import most_held
from planner.schedule.rows import BACKWARD, Row
from planner.search.bounds.layout import first_chunk, host_room_bytes, room_bytes
from planner.search.engine.dealing import dealt_in_proportion, holders
from planner.search.engine.division import Sizes, given_sizes
from planner.search.stage_maps.segments import LayerModes
from planner.search.stage_maps.windows import Kinds

_Sizes = NDArray[np.int64]


_ROUNDS = 2
"""Micro-batches per rank of the short schedule that tells a long one's traits."""


@dataclass(frozen=True)
class Traits:
    """What the first and the last rank of a schedule tell, without building it for all ranks and micro-batches."""

    held: tuple[dict[int, int], ...]
    """Of either rank: micro-batches held of each stage, at least: equation (E5)."""
    ends_low: bool
    """The last rank ends with the full backward of its lowest stage."""

    @cached_property
    def columns(self) -> tuple[tuple[_Sizes, _Sizes], ...]:
        """Of either rank: stages, and micro-batches held of them."""
        return tuple(
            (np.array(list(held)), np.array(list(held.values()))) for held in self.held
        )


def traits_of(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, chunks: int = 1
) -> Traits:
    """Traits of a schedule of these numbers."""
    return _short_traits(
        name, ranks, min(ranks * _ROUNDS, micro_batches), virtual_stages, chunks
    )


@lru_cache(maxsize=4096)
def _short_traits(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, chunks: int
) -> Traits:
    entry, shape = find(name), Shape(ranks, micro_batches, virtual_stages, chunks)
    first, last = (Row.read(entry.rank_actions(shape, rank)) for rank in (0, ranks - 1))
    ends_low = last.kinds[-1] == BACKWARD and last.stages[-1] == last.stages.min()
    return Traits((most_held(first), most_held(last)), bool(ends_low))


def held_of(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, chunks: int = 1
) -> _Sizes:
    """Micro-batches held of every stage at once with the others of its rank, at least: equation (E5)."""
    return _short_held(
        name, ranks, min(ranks * _ROUNDS, micro_batches), virtual_stages, chunks
    )


@lru_cache(maxsize=4096)
def _short_held(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, chunks: int
) -> _Sizes:
    entry, shape = find(name), Shape(ranks, micro_batches, virtual_stages, chunks)
    held: dict[int, int] = {}
    for rank in range(ranks):
        held |= most_held(entry.rank_actions(shape, rank))
    return np.array(
        [held.get(stage, 0) for stage in range(ranks * virtual_stages)], dtype=np.int64
    )


def wholly_held(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, chunks: int = 1
) -> tuple[float, ...]:
    """Micro-batches of all its stages that every rank holds at once, at least: the first one is when it comes back."""
    return _short_wholly(
        name, ranks, min(ranks * _ROUNDS, micro_batches), virtual_stages, chunks
    )


@lru_cache(maxsize=4096)
def _short_wholly(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, chunks: int
) -> tuple[float, ...]:
    numbers = name, ranks, micro_batches, virtual_stages, chunks
    least = np.full(ranks, np.iinfo(np.int64).max)
    np.minimum.at(least, np.array(stage_ranks(*numbers)), _short_held(*numbers))
    return tuple(np.maximum(1.0, least / chunks).tolist())


@lru_cache(maxsize=64)
def built(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, chunks: int
) -> Schedule:
    """A schedule, built once for all layouts that use it."""
    return build(
        name,
        ranks=ranks,
        micro_batches=micro_batches,
        virtual_stages=virtual_stages,
        sequence_chunks=chunks,
    )


def layout_traits(costs: LayoutCosts) -> Traits:
    """The traits of a layout's schedule."""
    return traits_of(*_numbers(costs))


def layout_held(costs: LayoutCosts) -> _Sizes:
    """What a layout's schedule holds at least: `held_of`."""
    return held_of(*_numbers(costs))


def layout_schedule(costs: LayoutCosts) -> Schedule:
    """A layout's schedule."""
    return built(*_numbers(costs))


def _numbers(costs: LayoutCosts) -> tuple[str, int, int, int, int]:
    layout = costs.layout
    numbers = (
        layout.pipeline_parallel_degree,
        costs.micro_batches,
        layout.virtual_stages_per_rank,
    )
    return layout.schedule, *numbers, layout.sequence_chunks


@dataclass(frozen=True)
class Uniform:
    """The layers of a layout that all recompute alike, as arrays: whatever the order, these stay the same."""

    modes: tuple[LayerModes, ...]
    """One for every layer."""
    forward: _Sizes
    backward: _Sizes
    tail: _Sizes
    """Reduction and optimizer, less what compute may hide."""
    ogp_bytes: _Sizes
    activation_bytes: _Sizes
    temporary_bytes: _Sizes
    boundary_bytes: _Sizes
    """What a stage puts out whose last layer it is."""
    waiting_ticks: int
    """Of every action of a stage."""
    latency_ticks: int
    """Of the reduction and the step, once per rank, less what ranks spare that hold several users of a shared
    parameter."""
    room_bytes: int
    """Of a device, and what a rank spares likewise."""
    micro_batches: int
    host_bytes: tuple[_Sizes, _Sizes]
    """In the host's memory: states, and activations of a micro-batch."""
    host_room_bytes: int | None
    """Likewise for a device; None: nothing is kept there."""
    keeps_outputs: bool
    """Of stages, for every micro-batch in flight: equation (M2)."""
    keeps_inputs: bool
    """Of stages, for every micro-batch in flight: equation (O2)."""
    first_forward: _Sizes
    """Of the first sequence chunk; where sequences stay whole, all."""
    first_backward: _Sizes
    chunks: int
    given: Callable[[int], Sizes | None]
    """Layers of so many stages, where the job fixes them."""

    @classmethod
    def of(cls, costs: LayoutCosts, modes: tuple[LayerModes, ...]) -> Self:
        """Layers of a layout, each in the first of its modes."""
        kinds = Kinds.of(modes)
        layers = [options[0] for options in kinds.options]
        extra = [(len(shared.layers) - 1, shared) for shared in costs.shared]
        chunks = costs.layout.sequence_chunks
        firsts = [first_chunk(cost, chunks) for cost in layers]
        host = host_room_bytes(costs)

        def by_layer(values: Iterable[int]) -> _Sizes:
            return np.array(list(values), dtype=np.int64)[kinds.places]

        return cls(
            modes=modes,
            forward=by_layer(cost.forward_ticks for cost in layers),
            backward=by_layer(cost.backward_ticks for cost in layers),
            tail=by_layer(costs.least_tail_ticks(cost) for cost in layers),
            ogp_bytes=by_layer(cost.ogp_bytes for cost in layers),
            activation_bytes=by_layer(cost.activation_bytes for cost in layers),
            temporary_bytes=by_layer(cost.temporary_bytes for cost in layers),
            boundary_bytes=np.array(costs.all_boundary_bytes(), dtype=np.int64),
            waiting_ticks=costs.waiting_ticks,
            latency_ticks=costs.fixed_tail_ticks
            - sum(times * shared.tail_ticks for times, shared in extra),
            room_bytes=room_bytes(costs)
            + sum(times * shared.ogp_bytes for times, shared in extra),
            micro_batches=costs.micro_batches,
            host_bytes=(
                by_layer(cost.host_optimizer_bytes for cost in layers),
                by_layer(cost.host_activation_bytes for cost in layers),
            ),
            host_room_bytes=None
            if host is None
            else host
            + sum(times * shared.host_optimizer_bytes for times, shared in extra),
            keeps_outputs=not costs.work.framework.frees_outputs,
            keeps_inputs=costs.layout.activation_offload,
            first_forward=by_layer(each[0] for each in firsts),
            first_backward=by_layer(each[1] for each in firsts),
            chunks=chunks,
            given=partial(given_sizes, costs.work),
        )

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Ticks of one micro-batch, of every layer."""
        return tuple((self.forward + self.backward).tolist())

    def dealt(self, stage_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Layers of every stage, as the job fixes them, or `deal` has them."""
        given = self.given(len(stage_ranks))
        return given or dealt_in_proportion(
            (self.proportions,), (0,) * (max(stage_ranks) + 1), stage_ranks
        )

    def stage_map(self, sizes: Sequence[int]) -> StageMap:
        """Stages of so many layers."""
        layers = iter(enumerate(options[0].mode for options in self.modes))
        return tuple(tuple(next(layers) for _ in range(size)) for size in sizes)

    @cached_property
    def proportions(self) -> tuple[int, ...]:
        """Of the work of all layers, in the smallest whole numbers."""
        unit = math.gcd(*self.work) or 1
        return tuple(each // unit for each in self.work)

    def bound(
        self,
        sizes: tuple[int, ...],
        ranks: tuple[int, ...],
        *,
        ends_low: bool,
        again: _Sizes | NDArray[np.float64] | None = None,
    ) -> int:
        """Ticks that these stages take at least, transfers for nothing: (E3), and (E4) where ranks end low.

        Args:
            sizes: layers of every stage.
            ranks: pipeline rank of every stage.
            ends_low: the last rank ends with the full backward of its lowest stage.
            again: ticks that a micro-batch takes every rank besides.
        """
        stages, (lowest, holds) = self.stages_of(sizes), holders(ranks)
        tails, first = stages.tail @ holds, stages.starts[lowest]
        work = stages.work @ holds if again is None else stages.work @ holds + again
        done = self._down[first] + self.micro_batches * work
        bound = int((done + tails).max())
        if ends_low:
            up = int(self.first_backward[: first[-1]].sum())
            bound = max(bound, int(done[-1] + up + tails[0]))
        return bound + self.latency_ticks

    def may_hold(self, sizes: tuple[int, ...], traits: Traits) -> bool:
        """False only if the first or the last rank overflows, on the device, without its receive buffers, or on the
        host."""
        return all(self.may_hold_on(sizes, *each) for each in traits.columns)

    def may_hold_on(
        self, sizes: tuple[int, ...], stages: _Sizes, units: _Sizes
    ) -> bool:
        """Likewise of a rank with these stages, which holds so many micro-batches of each."""
        sums = self.stages_of(sizes)
        device = sums.ogp_bytes[stages].sum() + (units * sums.unit_bytes[stages]).sum()
        if device + sums.temporary_bytes[stages].max() > self.room_bytes:
            return False
        if self.host_room_bytes is None:
            return True
        states, saved = sums.host_bytes
        return bool(
            states[stages].sum() + (units * saved[stages]).sum() <= self.host_room_bytes
        )

    def lacking_bytes(
        self, sizes: tuple[int, ...], ranks: tuple[int, ...], held: _Sizes
    ) -> NDArray[np.float64]:
        """What every rank's device lacks at least, without its receive buffers; below zero where there is room.

        Args:
            sizes: layers of every stage.
            ranks: pipeline rank of every stage.
            held: units of every stage that are held at once.
        """
        sums, (_, holds) = self.stages_of(sizes), holders(ranks)
        largest = (sums.temporary_bytes[:, None] * holds).max(axis=0)
        lacking: NDArray[np.float64] = (
            sums.ogp_bytes @ holds + largest - self.room_bytes
        )
        return lacking + self.held_bytes(sizes, ranks, held)

    def held_bytes(
        self, sizes: tuple[int, ...], ranks: tuple[int, ...], held: _Sizes
    ) -> NDArray[np.float64]:
        """Of that, what the units in flight take."""
        taken: NDArray[np.float64] = (
            held * self.stages_of(sizes).unit_bytes
        ) @ holders(ranks)[1]
        return taken

    @cached_property
    def _down(self) -> _Sizes:
        """Of the first forward, by the layers before."""
        return np.concatenate([[0], np.cumsum(self.first_forward)])

    @cached_property
    def _known_stages(self) -> dict[tuple[int, ...], Stages]:
        """By sizes: many orders have the same."""
        return {}

    def stages_of(self, sizes: tuple[int, ...]) -> Stages:
        """Sums over the layers of every stage."""
        if sizes not in self._known_stages:
            self._known_stages[sizes] = Stages.of(self, sizes)
        return self._known_stages[sizes]


@dataclass(frozen=True, slots=True)
class Stages:
    """What layers of stages of some sizes add up to, by stage."""

    starts: NDArray[np.intp]
    work: _Sizes
    """Of one micro-batch."""
    tail: _Sizes
    ogp_bytes: _Sizes
    unit_bytes: _Sizes
    """Of a micro-batch in flight, or its chunk."""
    temporary_bytes: _Sizes
    """The largest."""
    host_bytes: tuple[_Sizes, ...]
    """States, and activations of a micro-batch; nothing where nothing is kept there."""

    @classmethod
    def of(cls, layers: Uniform, sizes: tuple[int, ...]) -> Self:
        """Stages of so many layers."""
        counts = np.array(sizes)
        stops = counts.cumsum()
        starts, put_out = stops - counts, layers.boundary_bytes[stops - 1]
        held = np.add.reduceat(layers.activation_bytes, starts)
        if layers.keeps_outputs:
            held = held + put_out
        if layers.keeps_inputs:
            held = held + np.concatenate([[0], put_out[:-1]])
        in_host = layers.host_bytes if layers.host_room_bytes is not None else ()
        work = np.add.reduceat(layers.forward, starts)
        work = work + np.add.reduceat(layers.backward, starts)
        return cls(
            starts=starts,
            work=work + 2 * layers.waiting_ticks,
            tail=np.add.reduceat(layers.tail, starts),
            ogp_bytes=np.add.reduceat(layers.ogp_bytes, starts),
            unit_bytes=held // layers.chunks,
            temporary_bytes=np.maximum.reduceat(layers.temporary_bytes, starts),
            host_bytes=tuple(np.add.reduceat(each, starts) for each in in_host),
        )


def ranks_of(costs: LayoutCosts) -> tuple[int, ...]:
    """Pipeline rank of every stage."""
    return stage_ranks(*_numbers(costs))


@lru_cache(maxsize=4096)
def stage_ranks(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, chunks: int = 1
) -> tuple[int, ...]:
    """Pipeline rank of every stage of a schedule of these numbers."""
    return find(name).stage_ranks(Shape(ranks, micro_batches, virtual_stages, chunks))
