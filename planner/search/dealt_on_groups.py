"""Dealt stage maps on several node groups, where all replicas are alike: `planner.search.dealt`, with every pipeline
rank's own device.

    (E13) the layers are dealt by (E1) and (E2), each as long as it takes on the stage's device
    (E14) (E3) to (E5) hold with the ticks, bytes and room of every stage's own rank               -> RankUniform

All layers recompute alike: which of them fit recomputed on one device, and cost least, need not be so on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayoutCosts, StageMap
from planner.search.dealing import Numbers, deal_among, holders
from planner.search.dealt import Traits, Uniform
from planner.search.lanes import modes_on
from planner.search.segments import LayerModes


@dataclass(frozen=True)
class RankUniform:
    """The layers of a layout that all recompute alike, on every kind of rank that a pipeline has."""

    kinds: tuple[Uniform, ...]
    devices: tuple[int, ...]
    """Kind of every pipeline rank."""

    @classmethod
    def of(cls, costs: LayoutCosts, modes: tuple[LayerModes, ...]) -> Self:
        """Layers of the pipeline of a layout whose replicas are alike, each in the first of its modes."""
        ranks = costs.of_replica.ranks
        kinds = {id(rank.layers): rank for rank in ranks}
        numbers = {key: number for number, key in enumerate(kinds)}
        return cls(
            tuple(Uniform.of(rank, modes_on(rank, modes)) for rank in kinds.values()),
            tuple(numbers[id(rank.layers)] for rank in ranks),
        )

    def dealt(self, stage_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Layers of every stage: equation (E13)."""
        return deal_among(tuple(kind.work for kind in self.kinds), self.devices, stage_ranks)

    def stage_map(self, sizes: Sequence[int]) -> StageMap:
        """Stages of so many layers."""
        return self.kinds[0].stage_map(sizes)

    def may_hold(self, sizes: tuple[int, ...], traits: Traits) -> bool:
        """False only if the first or the last rank overflows: `Uniform.may_hold`."""
        ends = (self.kinds[self.devices[rank]] for rank in (0, -1))
        return all(kind.may_hold_on(sizes, *held) for kind, held in zip(ends, traits.columns, strict=True))

    def bound(self, sizes: tuple[int, ...], ranks: tuple[int, ...], *, ends_low: bool) -> int:
        """Ticks that these stages take at least, transfers for nothing: (E14), for the arguments of `Uniform.bound`."""
        lowest, holds = holders(ranks)
        devices, starts = np.array(self.devices)[list(ranks)], self.kinds[0].stages_of(sizes).starts

        def on_ranks(each: Sequence[Numbers]) -> Numbers:
            """Of every stage, what its own kind of rank tells."""
            return np.choose(devices, each)

        sums = [kind.stages_of(sizes) for kind in self.kinds]
        work, tail = on_ranks([each.work for each in sums]), on_ranks([each.tail for each in sums])
        forward = on_ranks([np.add.reduceat(kind.forward, starts) for kind in self.kinds])
        backward = on_ranks([np.add.reduceat(kind.backward, starts) for kind in self.kinds])
        done = (forward.cumsum() - forward)[lowest] + self.kinds[0].micro_batches * (work @ holds)
        tails = tail @ holds + self._latencies
        bound = int((done + tails).max())
        if ends_low:
            bound = max(bound, int(done[-1] + backward[: lowest[-1]].sum() + tails[0]))
        return bound

    @cached_property
    def _latencies(self) -> NDArray[np.int64]:
        """Of every rank's reduction."""
        return np.array([self.kinds[device].latency_ticks for device in self.devices], dtype=np.int64)


def alike(costs: LayoutCosts, modes: tuple[LayerModes, ...]) -> Uniform | RankUniform:
    """The layers of a layout that all recompute alike, whose replicas are alike."""
    return RankUniform.of(costs, modes) if costs.columns else Uniform.of(costs, modes)
