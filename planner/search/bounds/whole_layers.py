"""What whole layers tell of ranks that differ: a bound on layouts whose stages are dealt on several node groups, before
they are priced, and after.

    (E16) n layers cost the same, all in one recompute mode: w(p) for a micro-batch and g(p) for a step on rank p, o
          bytes of OGP, a(p) of activations. However stages are cut, rank p, which holds u(p) micro-batches at least and
          has room for R(p) bytes, takes at most R(p) / (o + u(p) a(p)) of them, and within T no more than
          T / (M w(p) + g(p)), both rounded down; so T is no less than where these add up to n. What several layers
          share counts nothing                                                             -> Repeated.least_ticks()
          before anything is priced, with the nearest tensor-parallel ranks and nobody else to exchange with, as (U4)
          of `bounds.loads` has it                                                                 -> family_ticks()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayerCost, LayoutCosts, Workload, reserved_bytes
from planner.cost.mixed import columns_of
from planner.cost.nearest import nearest_costs
from planner.search.bounds.layout import room_bytes
from planner.search.layouts.orders import Order
from planner.search.layouts.space import Family, Zero
from planner.search.stage_maps.inside import NO_LIMIT
from planner.search.stage_maps.segments import LayerModes
from planner.spec.profile import RecomputeMode

_Floats = NDArray[np.float64]
Held = Callable[[tuple[Order, ...]], Sequence[float]]
"""Micro-batches that every rank holds at least, whichever of these orders is taken."""


@dataclass(frozen=True)
class Repeated:
    """Layers that cost the same, all in one recompute mode, on every pipeline rank."""

    count: int
    ticks: _Floats
    """Of one of them and a step, by rank."""
    ogp_bytes: _Floats
    activation_bytes: _Floats
    """Of a micro-batch."""
    room_bytes: _Floats

    @classmethod
    def of(cls, costs: LayoutCosts, modes: Sequence[LayerModes]) -> Self:
        """Of the layers that a layout has most of, whose replicas are alike, in the first of their modes."""
        first, count = max(costs.kinds, key=lambda kind: kind[1])
        ranks = costs.of_replica.ranks
        each = [rank.layers[first][modes[first][0].mode] for rank in ranks]
        is_shared = bool(costs.shared)
        tails = [0 if is_shared else costs.least_tail_ticks(cost) for cost in each]
        works = [
            rank.micro_batches * _work(cost)
            for rank, cost in zip(ranks, each, strict=True)
        ]
        return cls(
            count,
            np.array(works, dtype=np.float64) + tails,
            np.array(
                [0 if is_shared else cost.ogp_bytes for cost in each], dtype=np.float64
            ),
            np.array([cost.activation_bytes for cost in each], dtype=np.float64),
            np.array(list(map(room_bytes, ranks)), dtype=np.float64),
        )

    def least_ticks(self, in_flight: Sequence[float]) -> int:
        """Ticks by (E16); `NO_LIMIT` where no ranks have room for all of them.

        Args:
            in_flight: micro-batches that every rank holds at once, at least.
        """
        held = np.maximum(
            1.0, self.ogp_bytes + np.array(in_flight) * self.activation_bytes
        )
        most = np.minimum(self.count, np.floor(np.maximum(0.0, self.room_bytes) / held))
        if most.sum() < self.count:
            return NO_LIMIT
        ticks = np.maximum(1.0, self.ticks)
        low, high = 0, int((ticks * most).max())
        while low < high:
            middle = (low + high) // 2
            is_enough = np.minimum(most, middle // ticks).sum() >= self.count
            low, high = (low, middle) if is_enough else (middle + 1, high)
        return low


def _in_mode(options: dict[RecomputeMode, LayerCost], word: str) -> LayerCost:
    return next(
        (cost for mode, cost in options.items() if mode == word),
        next(iter(options.values())),
    )


def _work(cost: LayerCost) -> int:
    return cost.forward_ticks + cost.backward_ticks


def family_ticks(work: Workload, family: Family, held: Held) -> int:
    """Ticks that no layout of a family beats whose stages are dealt: equation (E16), before anything is priced.

    Args:
        work: on several node groups.
        family: whose replicas are alike.
        held: of some of its orders.
    """
    return min(_by_mode(work, family, held))


def _by_mode(work: Workload, family: Family, held: Held) -> Iterator[int]:
    (column,) = columns_of(work, family.layout(Zero(0), family.orders[0]))
    groups = {place: work.groups[place] for place in column.groups}
    layers = {
        place: nearest_costs(group, family.split) for place, group in groups.items()
    }
    kind, count = Counter(map(id, layers[column.groups[0]])).most_common(1)[0]
    first = next(
        place
        for place, options in enumerate(layers[column.groups[0]])
        if id(options) == kind
    )
    is_shared = bool(work.profile.shared_parameters)
    for word in dict.fromkeys(order.recompute for order in family.orders):
        here = {place: _in_mode(known[first], word) for place, known in layers.items()}
        rooms = {
            place: np.inf if is_shared else _room(group)
            for place, group in groups.items()
        }
        found = Repeated(
            count,
            np.array(
                [
                    family.micro_batches * float(_work(here[place]))
                    for place in column.groups
                ]
            ),
            np.array(
                [_least_held_bytes(family, here[place]) for place in column.groups]
            ),
            np.array([float(here[place].activation_bytes) for place in column.groups]),
            np.array([rooms[place] for place in column.groups], dtype=np.float64),
        )
        yield found.least_ticks(
            held(tuple(order for order in family.orders if order.recompute == word))
        )


def _room(group: Workload) -> float:
    return (
        group.capacity_bytes
        - reserved_bytes(group)
        - int(group.constants.workspace_bytes)
    )


def _least_held_bytes(family: Family, cost: LayerCost) -> float:
    """OGP of a layer under whichever way of the family's to share out states takes least: (U4)."""
    replicas, stage = (
        family.data * family.context,
        max(zero.stage for zero in family.zeros),
    )
    shards = max(zero.shards or replicas for zero in family.zeros)
    parts = [shards if stage >= level else 1 for level in (3, 2, 1)]
    states = cost.parameters_bytes, cost.gradients_bytes, cost.optimizer_bytes
    return sum(each / ranks for each, ranks in zip(states, parts, strict=True))
