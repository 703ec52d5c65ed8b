"""What the layers of a layout take of every pipeline rank, for the linear bound of `planner.search.spread`: before
anything but the layers themselves is priced, and after.

    (U4)  a rank does no less than its layers cost with the nearest tensor-parallel ranks and nobody else to exchange
          with; and where k ranks at most share out states under ZeRO z it holds 1 / k of those that z names, at least;
          layers that share parameters may lie on one rank, so theirs count nothing            -> _Bounding.least()
    (U7)  reductions, and what ZeRO 2 and 3 exchange in every micro-batch, take a latency and a time per element: of
          the largest layer's, a smaller layer takes at least its part by elements             -> _exchanges()
    (U5)  with prices, what several users of a shared parameter spare is room for others          -> priced_bound()
    (U6)  all micro-batches of all layers l take w(l, g) on cells of node group g, of which there are c(g); with W(g)
          the sum of w over all layers, and weights 1 / W(g) as in (D11),
          T >= micro-batches x sum over l of the least w(l, g) / W(g) over g, by sum of c(g) / W(g)    -> part_ticks()

Columns are bounded one by one: a step ends with the slowest, whatever the others' stage maps would be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from planner.cost import LayerCost, LayoutCosts, Workload, reserved_bytes
from planner.cost.mixed import columns_of, mixed_costs, standings
from planner.cost.nearest import nearest_costs
from planner.search.bounds import room_bytes, warm_ups
from planner.search.lanes import modes_on
from planner.search.segments import LayerModes
from planner.search.space import Family, Zero
from planner.search.spread import ROUNDING, Floats, RankLoad, Spread
from planner.search.standing import Speeds
from planner.spec.profile import ModelProfile

_LESS = 1 - 1e-6
"""For what rounding to ticks and whole shards may spare a small layer."""


def part_ticks(work: Workload, groups: Sequence[int]) -> int:
    """Ticks that no plan beats that uses these node groups of a heterogeneous cluster alone: equation (U6)."""
    devices = np.array([work.groups[place].devices for place in groups], dtype=np.float64)
    found = []
    for split in work.sizes:
        size, tensor, context, _, _ = split
        speeds = Speeds.of(work, split)
        ticks = (speeds.forward + speeds.backward)[list(groups)]
        weights = 1 / np.maximum(1.0, ticks.sum(axis=1))
        each = (weights[:, None] * ticks).min(axis=0).sum() / (weights @ devices / (tensor * context))
        found.append(work.job.global_batch_size / size * each)
    return int(min(found, default=0.0) * (1 - ROUNDING))


def portions(work: Workload, family: Family, limit_ticks: int) -> Iterator[tuple[int, Family]]:
    """Parts of a family on several node groups by how they share out states, each with a bound by (U4) and (U7); the
    family as a whole, where even what needs least memory, without any exchange, is no better than the limit."""
    bounding = _Bounding(work, family, limit_ticks)
    least = bounding.least(family)
    if least >= limit_ticks:
        yield least, family
        return
    before = 0
    for _, together in groupby(family.zeros, key=lambda zero: (max(1, zero.stage), zero.shards is None)):
        part = replace(family, zeros=tuple(together), ways_before=before)
        yield bounding.of_part(part), part
        before += len(part.ways)


class _Bounding:
    """Bounds of a family's parts, one after the other: the weights and prices of one mostly tell enough of the next."""

    def __init__(self, work: Workload, family: Family, limit_ticks: int) -> None:
        self.work, self.limit = work, limit_ticks
        layout = family.layout(Zero(0), family.orders[0])
        rows, shares = standings(work, layout), layout.shares(work.job.global_batch_size)
        assert rows is not None, "cells of a family stand in one node group each"
        self.columns = dict.fromkeys(zip(rows, shares, strict=True))
        self.known: dict[_Column, Floats] = {}

    def least(self, family: Family) -> int:
        """Ticks that no layout beats under gpipe and 1f1b, with exchanges for nothing: equation (U4)."""
        return self._bound(family, {})

    def of_part(self, part: Family) -> int:
        """The same with what the part exchanges: equation (U7)."""
        for column in self.columns:
            rows, spread = self.known[column], self._spread(part, column, None)
            told = spread.dual(rows[: len(column[0])], rows[len(column[0]) :]) * spread.ticks
            if told >= self.limit * (1 + ROUNDING):
                return self.limit
        return self._bound(part, _exchanges(self.work, part))

    def _bound(self, family: Family, rates: dict[_Column, list[tuple[float, float]]]) -> int:
        bound = 0
        for column in self.columns:
            spread = self._spread(family, column, rates.get(column))
            ticks, self.known[column] = spread.bound_and_rows(self.limit, self.known.get(column))
            bound = max(bound, ticks)
        return bound

    def _spread(self, family: Family, column: _Column, rates: list[tuple[float, float]] | None) -> Spread:
        row, share = column
        loads = {place: _nearest_load(self.work.groups[place], family) for place in set(row)}
        taken = rates or [(0.0, 0.0)] * len(row)
        ranks = [loads[place].with_exchanges(*each) for place, each in zip(row, taken, strict=True)]
        return Spread.of(ranks, share, [min(share, len(row) - rank) for rank in range(len(row))])


_Column = tuple[tuple[int, ...], int]
"""Node groups of its pipeline ranks, and its share."""


def _exchanges(work: Workload, family: Family) -> dict[_Column, list[tuple[float, float]]]:
    """Ticks per element on every pipeline rank, of a micro-batch and of a step, under the way to share out states that
    takes least: equation (U7)."""
    layer = _largest_layer(work)
    if layer is None:
        return {}
    alone = replace(work, profile=layer, groups=tuple(_with_profile(group, layer) for group in work.groups))
    layouts = [family.layout(zero, family.orders[0]) for zero in family.zeros]
    every = [[_rates(column) for column in mixed_costs(alone, layout).columns] for layout in layouts]
    least = [np.minimum.reduce(same).tolist() for same in zip(*every, strict=True)]
    columns = columns_of(alone, layouts[0])
    return {(column.groups, column.micro_batches): rates for column, rates in zip(columns, least, strict=True)}


def _rates(column: LayoutCosts) -> Floats:
    """Ticks per element of its only layer, [rank, (of a micro-batch, of a step)]."""
    costs = [next(iter(rank.layers[0].values())) for rank in column.ranks]
    rates = [(cost.gather_ticks / cost.parameters, cost.reduction_ticks / cost.parameters) for cost in costs]
    return np.array(rates) * _LESS


def _largest_layer(work: Workload) -> ModelProfile | None:
    """A profile of the layer with most parameters of its own; None: the others' exchanges do not follow from its."""
    if "largest" not in work.groups[0].spent:
        work.groups[0].spent["largest"] = _find_largest(work)
    found: ModelProfile | None = work.groups[0].spent["largest"]
    return found


def _find_largest(work: Workload) -> ModelProfile | None:
    links = [link for group in work.groups for link in (group.intra_node, group.inter_node) if link]
    has_experts = any(row.local_expert_parameters for layer in work.profile.layers for row in layer.measurements)
    sharing = {name for shared in work.profile.shared_parameters for name in shared.layers}
    own = [layer for layer in work.profile.layers if layer.name not in sharing]
    has_frozen = any(layer.frozen_parameters for layer in work.profile.layers)
    if has_experts or has_frozen or not own or any(link.fits for link in links):
        return None
    largest = max(own, key=lambda layer: layer.parameters)
    alone = {"layers": (largest,), "edges": (), "shared_parameters": ()}
    return work.profile.model_copy(update=alone) if largest.parameters else None


def _with_profile(work: Workload, profile: ModelProfile) -> Workload:
    key = ("alone", profile.layers[0].name)
    if key not in work.spent:
        work.spent[key] = replace(work, profile=profile)
    found: Workload = work.spent[key]
    return found


def _nearest_load(work: Workload, family: Family) -> RankLoad:
    """Of a device of a node group: equation (U4)."""
    key = ("loads", family.split)
    if key not in work.spent:
        work.spent[key] = _whole_load(work, family)
    load: RankLoad
    load, states = work.spent[key]
    replicas, stage = family.data * family.context, max(zero.stage for zero in family.zeros)
    shards = max(zero.shards or replicas for zero in family.zeros)
    parts = [shards if stage >= level else 1 for level in (3, 2, 1)]
    held = sum(each / ranks for each, ranks in zip(states, parts, strict=True))
    return replace(load, ogp_bytes=held)


def _whole_load(work: Workload, family: Family) -> tuple[RankLoad, list[Floats]]:
    """Without states, and bytes of parameters, gradients and optimizer states apart, before they are shared out."""
    layers = nearest_costs(work, family.split)
    sharing = {work.order[name] for shared in work.profile.shared_parameters for name in shared.layers}
    kinds = Counter((id(options), place in sharing) for place, options in enumerate(layers))
    known = {id(options): tuple(options.values()) for options in layers}
    first = [None if shares else known[key][0] for key, shares in kinds]
    counts = np.array(list(kinds.values()), dtype=np.float64)[:, None]
    elements = counts * np.array([[cost.parameters if cost else 0.0] for cost in first], dtype=np.float64)
    states = [
        counts * np.array([[getattr(cost, name) if cost else 0.0] for cost in first], dtype=np.float64)
        for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes")
    ]
    room = work.capacity_bytes - reserved_bytes(work)
    load = _load([known[key] for key, _ in kinds], list(kinds.values()), [0.0] * len(kinds), room)
    return replace(load, elements=elements), states


def priced_bound(costs: LayoutCosts, modes: Sequence[LayerModes], limit_ticks: int) -> int:
    """Ticks that no stage map of a layout of gpipe or 1f1b beats whose ranks differ: equation (U5).

    Args:
        costs: of the layout.
        modes: allowed recompute choices of every layer.
        limit_ticks: what is no better is not told more exactly.
    """
    bound = 0
    for column in costs.columns:
        loads = {id(own.layers): _priced_load(own, modes) for own in column.ranks}
        ranks = [loads[id(own.layers)] for own in column.ranks]
        bound = max(bound, Spread.of(ranks, column.micro_batches, warm_ups(column)).bound(limit_ticks))
    return bound


def _priced_load(own: LayoutCosts, modes: Sequence[LayerModes]) -> RankLoad:
    """Of a rank's device."""
    choices = modes_on(own, modes)
    kinds = [choices[first] for first, _ in own.kinds]
    spared = sum((len(shared.layers) - 1) * shared.ogp_bytes for shared in own.shared)
    ogp = [options[0].ogp_bytes for options in kinds]
    return _load(kinds, [count for _, count in own.kinds], ogp, room_bytes(own) + spared, has_tail=not own.shared)


def _load(
    kinds: Sequence[LayerModes], counts: Sequence[int], ogp: Sequence[float], room: int, *, has_tail: bool = False
) -> RankLoad:
    """Of kinds of layers, so many of each."""
    most = max(map(len, kinds))
    padded = [(*options, *(options[-1:] * (most - len(options)))) for options in kinds]
    each = np.array(counts, dtype=np.float64)[:, None]

    def table(value: Callable[[LayerCost], float]) -> Floats:
        return each * np.array([[value(cost) for cost in options] for options in padded], dtype=np.float64)

    return RankLoad(
        tail=table(lambda cost: cost.reduction_ticks + cost.optimizer_ticks) if has_tail else 0.0,
        forward=table(lambda cost: cost.forward_ticks),
        backward=table(lambda cost: cost.backward_ticks),
        ogp_bytes=each * np.array(ogp, dtype=np.float64)[:, None],
        activation_bytes=table(lambda cost: cost.activation_bytes),
        room_bytes=room,
    )
