"""Dealt stage maps on several node groups, where all replicas are alike: `stage_maps.dealt`, with every pipeline
rank's own device.

    (E13) the layers are dealt by (E1) and (E2), each as long as it takes on the stage's device
    (E14) (E3) to (E5) hold with the ticks, bytes and room of every stage's own rank               -> RankUniform
    (E15) whatever the order, rank p takes M w + tail of its layers; with weights q(p) of sum 1, the inverse of what all
          layers would take there, T >= sum over l of the least q(p) (M w(l, p) + tail(l, p)) over p, as (D11)
          has it before anything is priced                                                      -> least_on_ranks()

All layers recompute alike: which of them fit recomputed on one device, and cost least, need not be so on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayoutCosts, StageMap
from planner.search.bounds.whole_layers import Repeated
from planner.search.engine.dealing import Numbers, deal_among, holders
from planner.search.engine.division import given_sizes
from planner.search.stage_maps.dealt import Traits, Uniform
from planner.search.stage_maps.lanes import modes_on
from planner.search.stage_maps.segments import LayerModes

_LESS = 1 - 1e-9
"""For rounding of floating-point sums."""


@dataclass(frozen=True, eq=False)
class RankUniform:
    """The layers of a layout whose replicas are alike, all recomputed alike, on every pipeline rank."""

    costs: LayoutCosts
    modes: tuple[LayerModes, ...]
    """One for every layer."""

    @cached_property
    def repeated(self) -> Repeated:
        """Those that are alike."""
        return Repeated.of(self.costs, self.modes)

    @cached_property
    def kinds(self) -> tuple[Uniform, ...]:
        """On every kind of rank that the pipeline has."""
        return tuple(
            Uniform.of(rank, modes_on(rank, self.modes))
            for rank in self._known.values()
        )

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Kind of every pipeline rank."""
        numbers = {key: number for number, key in enumerate(self._known)}
        return tuple(numbers[id(rank.layers)] for rank in self.costs.of_replica.ranks)

    @cached_property
    def _known(self) -> dict[int, LayoutCosts]:
        return {id(rank.layers): rank for rank in self.costs.of_replica.ranks}

    def dealt(self, stage_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Layers of every stage: equation (E13)."""
        given = given_sizes(self.costs.work, len(stage_ranks))
        return given or deal_among(
            tuple(kind.work for kind in self.kinds), self.devices, stage_ranks
        )

    def stage_map(self, sizes: Sequence[int]) -> StageMap:
        """Stages of so many layers."""
        return self.kinds[0].stage_map(sizes)

    def may_hold(self, sizes: tuple[int, ...], traits: Traits) -> bool:
        """False only if the first or the last rank overflows: `Uniform.may_hold`."""
        ends = (self.kinds[self.devices[rank]] for rank in (0, -1))
        return all(
            kind.may_hold_on(sizes, *held)
            for kind, held in zip(ends, traits.columns, strict=True)
        )

    def bound(
        self, sizes: tuple[int, ...], ranks: tuple[int, ...], *, ends_low: bool
    ) -> int:
        """Ticks that these stages take at least, transfers for nothing: (E14), for the arguments of `Uniform.bound`."""
        lowest, holds = holders(ranks)
        devices, starts = (
            np.array(self.devices)[list(ranks)],
            self.kinds[0].stages_of(sizes).starts,
        )

        def on_ranks(each: Sequence[Numbers]) -> Numbers:
            """Of every stage, what its own kind of rank tells."""
            return np.choose(devices, each)

        sums = [kind.stages_of(sizes) for kind in self.kinds]
        work, tail = (
            on_ranks([each.work for each in sums]),
            on_ranks([each.tail for each in sums]),
        )
        forward = on_ranks(
            [np.add.reduceat(kind.forward, starts) for kind in self.kinds]
        )
        backward = on_ranks(
            [np.add.reduceat(kind.backward, starts) for kind in self.kinds]
        )
        done = (forward.cumsum() - forward)[lowest] + self.kinds[0].micro_batches * (
            work @ holds
        )
        tails = tail @ holds + self._latencies
        bound = int((done + tails).max())
        if ends_low:
            bound = max(bound, int(done[-1] + backward[: lowest[-1]].sum() + tails[0]))
        return bound

    @cached_property
    def _latencies(self) -> NDArray[np.int64]:
        """Of every rank's reduction."""
        return np.array(
            [self.kinds[device].latency_ticks for device in self.devices],
            dtype=np.int64,
        )


def uniform(costs: LayoutCosts, modes: tuple[LayerModes, ...]) -> Uniform | RankUniform:
    """The layers of a layout that all recompute alike, whose replicas are alike."""
    return RankUniform(costs, modes) if costs.columns else Uniform.of(costs, modes)


def least_on_ranks(costs: LayoutCosts, modes: Sequence[LayerModes]) -> int:
    """Ticks that no stage map beats under any order of the micro-batches, transfers for nothing: equation (E15).

    Args:
        costs: of a layout whose replicas are alike, on several node groups.
        modes: allowed recompute choices of every layer.
    """
    ranks = costs.of_replica.ranks
    known = {id(rank.layers): rank for rank in ranks}
    kinds, counts = (
        [(first, modes[first]) for first, _ in costs.kinds],
        [count for _, count in costs.kinds],
    )
    each = (
        np.array(
            [[_ticks(rank, *kind) for kind in kinds] for rank in known.values()],
            dtype=np.float64,
        )
        * counts
    )
    many = [sum(rank.layers is one.layers for one in ranks) for rank in known.values()]
    speeds = 1 / np.maximum(1.0, each.sum(axis=1))
    least = (speeds[:, None] * each).min(axis=0).sum() / (speeds @ many)
    return int(least * _LESS) + costs.fixed_tail_ticks


def _ticks(rank: LayoutCosts, layer: int, options: LayerModes) -> int:
    """Of a layer and step, at least; tails of parameters that several layers share may be spared."""
    here = [rank.layers[layer][cost.mode] for cost in options]
    work = rank.micro_batches * min(
        cost.forward_ticks + cost.backward_ticks for cost in here
    )
    return work if rank.shared else work + rank.least_tail_ticks(here[0])
