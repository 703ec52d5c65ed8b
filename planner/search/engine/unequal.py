"""Prices of ranks that differ: those of equal ranks, each with its own speed and memory.

The bounds of this package are about pipeline ranks of equal speed. Ranks on several
node groups are looked at as such ranks: with a speed s of every rank and the least of
s times its prices over all ranks, a rank takes at least 1 / s times as long as an equal
rank. Any speeds are valid; those in proportion to the time of the whole model are best,
since layers then have almost equal prices on all ranks.

Sizes in bytes are the least over ranks. What hides a reduction is the most over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.cost import LayerCost, LayoutCosts, SharedCost, reserved_bytes
from planner.search.engine.sums import Floats
from planner.spec.profile import RecomputeMode

_TIMES = ("forward_ticks", "backward_ticks", "optimizer_ticks")
_SIZES = (
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "gathered_bytes",
    "activation_bytes",
    "temporary_bytes",
)


@dataclass(frozen=True, eq=False)
class Ranks:
    """The pipeline ranks of identical replicas."""

    micro_batches: int
    """Of every replica."""
    speeds: Floats
    """Per rank, of the fastest rank of all replicas."""
    free_bytes: Floats
    """Per rank: bytes for states, activations and temporaries of layers."""
    forward: Floats
    """Per kind: the most nanoseconds times speed on any rank, of the longest mode."""
    backward: Floats


def free_bytes(costs: LayoutCosts) -> float:
    """Return bytes of a device for states, activations and temporaries of layers."""
    work = costs.work
    taken = reserved_bytes(work) + costs.gathered_bytes
    taken += int(work.constants.workspace_bytes) + work.framework.workspace_bytes
    spared = sum((len(one.layers) - 1) * one.ogp_bytes for one in costs.shared)
    return float(work.capacity_bytes - taken + spared)


class EqualRanks:
    """Equal ranks that are at least as fast as those of one layout or several."""

    def __init__(self, layouts: Sequence[LayoutCosts]) -> None:
        """Choose the speeds of all ranks.

        Args:
            layouts: costs on ranks that differ, of layouts that differ in options only.
        """
        self.layouts = layouts
        self.kinds = [first for first, _ in layouts[0].kinds]
        self._counts = [count for _, count in layouts[0].kinds]
        self._times: dict[int, float] = {}
        columns = zip(*(each.columns for each in layouts), strict=True)
        self._ranks = [self._of_column(column) for column in columns]
        least = min(self._time(rank) for ranks in self._ranks for rank in ranks)
        self.speeds = [
            np.array([least / self._time(rank) for rank in ranks])
            for ranks in self._ranks
        ]

    @staticmethod
    def _of_column(column: Sequence[LayoutCosts]) -> list[tuple[LayoutCosts, ...]]:
        """Return for every pipeline rank its costs in all layouts."""
        return list(zip(*(each.ranks for each in column), strict=True))

    def _time(self, rank: tuple[LayoutCosts, ...]) -> float:
        """Return the least nanoseconds of all layers on a rank."""
        return min(map(self._time_under, rank))

    def _time_under(self, costs: LayoutCosts) -> float:
        if id(costs) not in self._times:
            total = 0.0
            for first, count in zip(self.kinds, self._counts, strict=True):
                modes = costs.layers[first].values()
                total += count * min(
                    each.forward_ticks + each.backward_ticks for each in modes
                )
            self._times[id(costs)] = max(1.0, total)
        return self._times[id(costs)]

    def ranks(self) -> tuple[Ranks, ...]:
        """Return the ranks of every class of identical replicas."""
        found = []
        forward, backward = self._longest()
        for place, ranks in enumerate(self._ranks):
            free = [max(map(free_bytes, rank)) for rank in ranks]
            found.append(
                Ranks(
                    micro_batches=self.layouts[0].columns[place].micro_batches,
                    speeds=self.speeds[place],
                    free_bytes=np.array(free),
                    forward=forward,
                    backward=backward,
                )
            )
        return tuple(found)

    def costs(self) -> LayoutCosts:
        """Return the costs of an equal rank of speed 1."""
        first = min(self.layouts, key=lambda each: each.layout.zero_stage)
        distinct = list(self._distinct())
        kinds = {kind: self._least(distinct, kind) for kind in self.kinds}
        every = [costs for _, costs in distinct]
        shared = zip(*(each.shared for each in every), strict=True)
        latency = 0
        if len(self.layouts) == 1:
            latency = min(each.reduction_latency_ticks for each in every)
        return replace(
            first,
            layers=tuple(kinds[layer] for layer in first.alike),
            shared=tuple(map(most_shared, shared)),
            reduction_latency_ticks=latency,
            columns=(),
            ranks=(),
        )

    def _distinct(self) -> Iterator[tuple[float, LayoutCosts]]:
        """Yield the distinct costs of all ranks and layouts, with the rank's speed."""
        seen: set[tuple[float, int]] = set()
        for ranks, speeds in zip(self._ranks, self.speeds, strict=True):
            for rank, speed in zip(ranks, speeds.tolist(), strict=True):
                for costs in rank:
                    if (speed, id(costs.layers)) not in seen:
                        seen.add((speed, id(costs.layers)))
                        yield speed, costs

    def _longest(self) -> tuple[Floats, Floats]:
        """Return the most scaled nanoseconds of forward and backward, per kind."""
        forward = np.zeros(len(self.kinds))
        backward = np.zeros(len(self.kinds))
        for speed, costs in self._distinct():
            for place, kind in enumerate(self.kinds):
                modes = costs.layers[kind].values()
                longest = max(each.forward_ticks for each in modes)
                forward[place] = max(forward[place], speed * longest)
                longest = max(each.backward_ticks for each in modes)
                backward[place] = max(backward[place], speed * longest)
        return forward, backward

    def _least(
        self, distinct: Sequence[tuple[float, LayoutCosts]], kind: int
    ) -> dict[RecomputeMode, LayerCost]:
        """Return the least costs of a layer on any rank, by mode."""
        found: dict[RecomputeMode, LayerCost] = {}
        for mode in distinct[0][1].layers[kind]:
            scaled = [
                (speed, costs.layers[kind][mode])
                for speed, costs in distinct
                if mode in costs.layers[kind]
            ]
            found[mode] = self._least_cost(scaled)
        return found

    def _least_cost(self, scaled: Sequence[tuple[float, LayerCost]]) -> LayerCost:
        """Return the least of every cost; reductions have none of several layouts."""

        def least(name: str) -> int:
            return int(min(speed * getattr(one, name) for speed, one in scaled))

        values: dict[str, Any] = {name: least(name) for name in _TIMES}
        for name in _SIZES:
            values[name] = min(getattr(one, name) for _, one in scaled)
        inputs = min(
            speed * (one.backward_ticks - one.backward_weight_ticks)
            for speed, one in scaled
        )
        weight = values["backward_ticks"] - int(inputs)
        values["backward_weight_ticks"] = max(0, weight)
        update = rest = 0
        if len(self.layouts) == 1:
            update = least("update_ticks")
            rest = int(
                min(
                    speed * (one.reduction_ticks - one.update_ticks)
                    for speed, one in scaled
                )
            )
        values |= {"update_ticks": update, "reduction_ticks": update + rest}
        return scaled[0][1]._replace(**values)


def most_shared(copies: Sequence[SharedCost]) -> SharedCost:
    """Return a shared parameter that saves as much as the one that saves most."""
    names: dict[str, Any] = {
        name: max(getattr(one, name) for one in copies)
        for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes")
    }
    tail = max(one.tail_ticks for one in copies)
    return replace(copies[0], tail_ticks=tail, **names)
