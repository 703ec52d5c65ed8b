"""What the layers of a layout take of every pipeline rank, for the linear bound of `bounds.spread`: before
anything but the layers themselves is priced, and after.

    (U4)  a rank does no less than its layers cost with the nearest tensor-parallel ranks and nobody else to exchange
          with; and where k ranks at most share out states under ZeRO z it holds 1 / k of those that z names, at least;
          layers that share parameters may lie on one rank, so theirs count nothing            -> _Bounding.least()
    (U7)  reductions, and what ZeRO 2 and 3 exchange in every micro-batch, take a latency and a time per element: of
          the largest layer's, a smaller layer takes at least its part by elements; what a framework overlaps
          may be hidden and counts nothing                                                     -> _exchanges()
    (U5)  with prices, what several users of a shared parameter spare is room for others          -> priced_bound()
    (U6)  all micro-batches of all layers l take w(l, g) on cells of node group g, of which there are c(g); with W(g)
          the sum of w over all layers, and weights 1 / W(g) as in (D11),
          T >= micro-batches x sum over l of the least w(l, g) / W(g) over g, by sum of c(g) / W(g)    -> part_ticks()
    (U8)  layers are whole and lie in order (`bounds.filling`): what leaves no windows does not beat the limit;
          the rest is bounded by that, under whichever schedule takes less; asked where most layers differ from all
          others, in place of the linear bound, which hardly ever tells more there   -> _Bounding._open(), .of_part()
    (U9)  where ZeRO 0 leaves no windows for the bytes that it holds, but ZeRO 1 does, it is a part of its own, so that
          it is priced only where that matters                                                -> _Bounding.of_ways()

Columns are bounded one by one: a step ends with the slowest, whatever the others' stage maps would be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import attrgetter

import numpy as np

from planner.cost import LayoutCosts, Workload, reserved_bytes
from planner.cost.mixed import columns_of, mixed_costs, standings
from planner.cost.nearest import nearest_costs
from planner.cost.shared import skip_costs
from planner.search.bounds.filling import Filling
from planner.search.bounds.layout import room_bytes, warm_ups
from planner.search.bounds.spread import ROUNDING, Floats, RankLoad, Spread
from planner.search.layouts.space import Family, Zero
from planner.search.layouts.standing import Speeds
from planner.search.stage_maps.inside import NO_LIMIT
from planner.search.stage_maps.lanes import modes_on
from planner.search.stage_maps.segments import LayerModes
from planner.search.stage_maps.windows import Windows
from planner.spec.profile import ModelProfile

_LESS = 1 - 1e-6
"""For what rounding to ticks and whole shards may spare a small layer."""


def part_ticks(work: Workload, groups: Sequence[int]) -> int:
    """Ticks that no plan beats that uses these node groups of a heterogeneous cluster alone: equation (U6)."""
    devices = np.array(
        [work.groups[place].devices for place in groups], dtype=np.float64
    )
    found = []
    for split in work.sizes:
        size, tensor, context, _, _ = split
        speeds = Speeds.of(work, split)
        ticks = (speeds.forward + speeds.backward)[list(groups)]
        weights = 1 / np.maximum(1.0, ticks.sum(axis=1))
        each = (weights[:, None] * ticks).min(axis=0).sum() / (
            weights @ devices / (tensor * context)
        )
        found.append(work.job.global_batch_size / size * each)
    return int(min(found, default=0.0) * (1 - ROUNDING))


def portions(
    work: Workload, family: Family, limit_ticks: int
) -> Iterator[tuple[int, Family]]:
    """Parts of a family on several node groups by how they share out states, each with a bound by (U4) and (U7); the
    family as a whole, where even what needs least memory, without any exchange, is no better than the limit."""
    bounding = _Bounding(work, family, limit_ticks)
    least = bounding.least(family)
    if least >= limit_ticks:
        yield least, family
        return
    before = 0
    for _, together in groupby(
        family.zeros, key=lambda zero: (max(1, zero.stage), zero.shards is None)
    ):
        part = replace(family, zeros=tuple(together), ways_before=before)
        yield from bounding.of_ways(part)
        before += len(part.ways)


def bound_of(work: Workload, part: Family, limit_ticks: int) -> int:
    """Ticks that no layout of a part of a family beats, told again up to a higher limit than when it was made."""
    bounding = _Bounding(work, part, limit_ticks)
    least = bounding.least(part)
    return least if least >= limit_ticks else max(least, bounding.of_part(part))


class _Bounding:
    """Bounds of a family's parts: the weights and prices, or the windows, of the whole family tell most of them."""

    def __init__(self, work: Workload, family: Family, limit_ticks: int) -> None:
        self.work, self.limit = work, limit_ticks
        layout = family.layout(Zero(0), family.orders[0])
        rows, shares = (
            standings(work, layout),
            layout.shares(work.job.global_batch_size),
        )
        assert rows is not None, "cells of a family stand in one node group each"
        self.columns = dict.fromkeys(zip(rows, shares, strict=True))
        self.known: dict[_Column, Floats] = {}
        self.told = _rows_told(work)
        self.within: dict[bool, list[Windows | None]] = {}
        """By schedule, is it gpipe, where the ranks of every column can start in any part."""

    def least(self, family: Family) -> int:
        """Ticks that no layout beats under gpipe and 1f1b, with exchanges for nothing: equation (U4); where most layers
        differ, whether any may beat the limit is all that is told."""
        loads = self._loads(family, {})
        if not _differ(loads):
            return self._spread_out(loads)
        if self.limit >= NO_LIMIT:
            return family.standing.least_ticks
        fillings = self._open(family, loads)
        self.within = {
            is_gpipe: [each.within for each in columns]
            for is_gpipe, columns in fillings.items()
        }
        return family.standing.least_ticks if fillings else self.limit

    def of_ways(self, part: Family) -> Iterator[tuple[int, Family]]:
        """A part with its bound; where states must be shared out to beat the limit, the way that does not is apart."""
        bound, plain = self.of_part(part), replace(part, zeros=part.zeros[:1])
        if (
            bound < self.limit
            and len(part.zeros) > 1
            and plain.zeros[0].stage == 0
            and self._overflows(plain)
        ):
            yield self.limit, plain
            part = replace(
                part,
                zeros=part.zeros[1:],
                ways_before=(part.ways_before or 0) + len(plain.ways),
            )
        yield bound, part

    def _overflows(self, part: Family) -> bool:
        """Is it plain by whole layers that the part does not beat the limit?"""
        loads = self._loads(part, {})
        return _differ(loads) and not self._open(part, loads)

    def of_part(self, part: Family) -> int:
        """The same with what the part exchanges, and with whole layers in order: equations (U7) and (U8)."""
        if _differ(self._loads(part, {})):
            fillings = self._open(
                part, self._loads(part, _exchanges(self.work, part))
            ).values()
            least = min(part.standing.least_ticks, self.limit)
            every = (
                max(each.bound(least, self.limit) for each in columns)
                for columns in fillings
            )
            return min(every, default=self.limit)
        told = self._told(self._loads(part, {}))
        return (
            told
            if told >= self.limit
            else self._told(self._loads(part, _exchanges(self.work, part)))
        )

    def _told(self, loads: Mapping[_Column, Sequence[RankLoad]]) -> int:
        """By the weights and prices that tell most of the whole family, (U2): nearly what the part's own would."""
        bound = 0.0
        for column, ranks in loads.items():
            rows, spread = (
                self.known[column],
                Spread.of(ranks, column[1], _least_in_flight(column)),
            )
            bound = max(
                bound,
                spread.dual(rows[: len(ranks)], rows[len(ranks) :]) * spread.ticks,
            )
        return min(self.limit, int(bound * (1 - ROUNDING)))

    def _spread_out(self, loads: Mapping[_Column, Sequence[RankLoad]]) -> int:
        """The linear bound: equation (U3)."""
        bound = 0
        for column, ranks in loads.items():
            spread = Spread.of(ranks, column[1], _least_in_flight(column))
            stands = tuple(id(self.work.groups[place]) for place in column[0])
            ticks, rows = spread.bound_and_rows(self.limit, self.told.get(stands))
            self.known[column] = self.told[stands] = rows
            bound = max(bound, ticks)
        return bound

    def _open(
        self, family: Family, loads: Mapping[_Column, Sequence[RankLoad]]
    ) -> dict[bool, list[Filling]]:
        """The columns under every schedule, is it gpipe, that may beat the limit: equation (U8)."""
        asked = sorted({order.schedule == "gpipe" for order in family.orders})
        plain = {
            column: Filling.of(ranks, column[1], _least_in_flight(column))
            for column, ranks in loads.items()
        }
        within = self.within or dict.fromkeys(asked[:1], [None] * len(plain))
        found = {}
        for is_gpipe in (each for each in asked if each in within):
            columns: list[Filling] = []
            for (column, filling), known in zip(
                plain.items(), within[is_gpipe], strict=True
            ):
                units = [column[1]] * len(column[0]) if is_gpipe else filling.in_flight
                narrowed = filling.under(units, is_gpipe=is_gpipe, within=known).below(
                    self.limit
                )
                if narrowed is None:
                    break
                columns.append(narrowed)
            else:
                found[is_gpipe] = columns
                if not self.within:
                    within[True] = [each.within for each in columns]  # equation (N7)
        return found

    def _loads(
        self, family: Family, rates: Mapping[_Column, list[tuple[float, float]]]
    ) -> dict[_Column, list[RankLoad]]:
        """Of every pipeline rank of the columns; those alike are one."""
        places = {place for row, _ in self.columns for place in row}
        nearest = {
            place: _nearest_load(self.work.groups[place], family) for place in places
        }
        if not rates:
            return {
                column: [nearest[place] for place in column[0]]
                for column in self.columns
            }
        keys = {
            column: [*zip(column[0], map(tuple, rates[column]), strict=True)]
            for column in self.columns
        }
        distinct = {key for several in keys.values() for key in several}
        known = {key: nearest[key[0]].with_exchanges(*key[1]) for key in distinct}
        return {
            column: [known[key] for key in several] for column, several in keys.items()
        }


_latest: list[tuple[object, dict[tuple[int, ...], Floats]]] = []


def _rows_told(work: Workload) -> dict[tuple[int, ...], Floats]:
    """Weights and prices, (U2), by where the pipeline ranks of a column stand: those of the latest family often exclude
    the next one. Kept for one request, whose arrangements of node groups share their rows."""
    if not _latest or _latest[0][0] is not work.sizes:
        _latest[:] = [(work.sizes, {})]
    return _latest[0][1]


_Column = tuple[tuple[int, ...], int]
"""Node groups of its pipeline ranks, and its share."""


def _differ(loads: Mapping[_Column, Sequence[RankLoad]]) -> bool:
    """Is (U8) worth its time?"""
    return next(iter(loads.values()))[0].in_order


def _least_in_flight(column: _Column) -> list[int]:
    """Micro-batches that every rank of a column holds at once under either schedule, at least."""
    row, share = column
    return [min(share, len(row) - rank) for rank in range(len(row))]


def _exchanges(
    work: Workload, family: Family
) -> dict[_Column, list[tuple[float, float]]]:
    """Ticks per element on every pipeline rank, of a micro-batch and of a step, under the way to share out states that
    takes least: equation (U7)."""
    layer = _largest_layer(work)
    if layer is None:
        return {}
    alone = replace(
        work,
        profile=layer,
        groups=tuple(_with_profile(group, layer) for group in work.groups),
    )
    layouts = [family.layout(zero, family.orders[0]) for zero in family.zeros]
    every = [
        [_rates(column) for column in mixed_costs(alone, layout).columns]
        for layout in layouts
    ]
    least = [np.minimum.reduce(same).tolist() for same in zip(*every, strict=True)]
    columns = columns_of(alone, layouts[0])
    return {
        (column.groups, column.micro_batches): rates
        for column, rates in zip(columns, least, strict=True)
    }


def _rates(column: LayoutCosts) -> Floats:
    """Ticks per element of its only layer, [rank, (of a micro-batch, of a step)]."""
    framework = column.work.framework
    rates = []
    for rank in column.ranks:
        cost = next(iter(rank.layers[0].values()))
        gathered, reduced = cost.gather_ticks, cost.reduction_ticks
        if framework.overlaps_gathers:
            gathered = 0
        if framework.overlaps_gathers or framework.overlaps_reduction:
            reduced = 0
        rates.append((gathered / cost.parameters, reduced / cost.parameters))
    return np.array(rates) * _LESS


def _largest_layer(work: Workload) -> ModelProfile | None:
    """A profile of the layer with most parameters of its own; None: the others' exchanges do not follow from its."""
    if "largest" not in work.groups[0].spent:
        work.groups[0].spent["largest"] = _find_largest(work)
    found: ModelProfile | None = work.groups[0].spent["largest"]
    return found


def _find_largest(work: Workload) -> ModelProfile | None:
    links = [
        link
        for group in work.groups
        for link in (group.intra_node, group.inter_node)
        if link
    ]
    has_experts = any(
        row.local_expert_parameters
        for layer in work.profile.layers
        for row in layer.measurements
    )
    sharing = {
        name for shared in work.profile.shared_parameters for name in shared.layers
    }
    own = [layer for layer in work.profile.layers if layer.name not in sharing]
    has_frozen = any(layer.frozen_parameters for layer in work.profile.layers)
    if has_experts or has_frozen or not own or any(link.fits for link in links):
        return None
    largest = max(own, key=lambda layer: layer.parameters)
    alone: dict[str, object] = {"layers": (largest,), "edges": ()}
    alone["shared_parameters"] = ()
    alone["transformer"] = None  # its rows are those of the profile, not of all layers
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
    replicas, stage = (
        family.data * family.context,
        max(zero.stage for zero in family.zeros),
    )
    shards = max(zero.shards or replicas for zero in family.zeros)
    parts = [shards if stage >= level else 1 for level in (3, 2, 1)]
    held = sum(each / ranks for each, ranks in zip(states, parts, strict=True))
    return replace(load, ogp_bytes=held)


def _whole_load(work: Workload, family: Family) -> tuple[RankLoad, list[Floats]]:
    """Without states, and bytes of parameters, gradients and optimizer states apart, before they are shared out."""
    layers = nearest_costs(work, family.split)
    sharing = {
        work.order[name]
        for shared in work.profile.shared_parameters
        for name in shared.layers
    }
    kinds = _kinds(
        [(id(options), place in sharing) for place, options in enumerate(layers)]
    )
    modes = [tuple(layers[place].values()) for place, _ in kinds]
    first = [
        None if place in sharing else options[0]
        for (place, _), options in zip(kinds, modes, strict=True)
    ]
    counts = np.array([count for _, count in kinds], dtype=np.float64)[:, None]
    elements = counts * np.array(
        [[cost.parameters if cost else 0.0] for cost in first], dtype=np.float64
    )
    states = [
        counts
        * np.array(
            [[getattr(cost, name) if cost else 0.0] for cost in first], dtype=np.float64
        )
        for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes")
    ]
    room = (
        work.capacity_bytes - reserved_bytes(work) - int(work.constants.workspace_bytes)
    )
    over = _skipping_bytes(work, family)
    outputs = [
        next(iter(options.values())).output_bytes + more
        for options, more in zip(layers, over, strict=True)
    ]
    kept = _kept_boundaries(work, outputs)
    load = _load(modes, kinds, [0.0] * len(kinds), room, kept)
    return replace(load, elements=elements), states


def _kept_boundaries(work: Workload, boundary_bytes: Sequence[int]) -> Sequence[int]:
    """Bytes behind every layer that a rank keeps; none are counted where outputs are freed."""
    return [0] * len(boundary_bytes) if work.framework.frees_outputs else boundary_bytes


def _skipping_bytes(work: Workload, family: Family) -> list[int]:
    """What goes over the boundary behind every layer besides its output, of a micro-batch."""
    begun = [0] * len(work.profile.layers)
    for skip in skip_costs(work, family.layout(Zero(0), family.orders[0])):
        begun[skip.producer] += skip.bytes
        begun[skip.consumer] -= skip.bytes
    return list(accumulate(begun))


def priced_bound(
    costs: LayoutCosts, modes: Sequence[LayerModes], limit_ticks: int
) -> int:
    """Ticks that no stage map of a layout of gpipe or 1f1b beats whose ranks differ: equations (U5) and (U8).

    Args:
        costs: of the layout.
        modes: allowed recompute choices of every layer.
        limit_ticks: what is no better is not told more exactly.
    """
    bound, boundaries = 0, _kept_boundaries(costs.work, costs.all_boundary_bytes())
    own = {id(rank.layers): rank for column in costs.columns for rank in column.ranks}
    loads = {key: _priced_load(rank, modes, boundaries) for key, rank in own.items()}
    for column in costs.columns:
        ranks, count, units = (
            [loads[id(rank.layers)] for rank in column.ranks],
            column.micro_batches,
            warm_ups(column),
        )
        moved = [column.transfers_behind(rank) for rank in range(len(ranks) - 1)]
        is_gpipe = costs.layout.schedule == "gpipe"
        filling = (
            Filling.of(ranks, count, units, is_gpipe=is_gpipe, transfers=moved)
            if ranks[0].in_order
            else None
        )
        if filling and not filling.leaves(limit_ticks):
            return limit_ticks
        if filling:
            bound = filling.bound(bound, limit_ticks)
        else:
            bound = max(bound, Spread.of(ranks, count, units).bound(limit_ticks))
    return bound


def _priced_load(
    own: LayoutCosts, modes: Sequence[LayerModes], boundary_bytes: Sequence[int]
) -> RankLoad:
    """Of a rank's device."""
    choices = modes_on(own, modes)
    kinds = _kinds(own.alike)
    options = [choices[first] for first, _ in kinds]
    spared = sum((len(shared.layers) - 1) * shared.ogp_bytes for shared in own.shared)
    ogp = [modes[0].ogp_bytes for modes in options]
    return _load(
        options,
        kinds,
        ogp,
        room_bytes(own) + spared,
        boundary_bytes,
        tails=None
        if own.shared
        else [own.least_tail_ticks(each[0]) for each in options],
    )


def _kinds(alike: Sequence[Hashable]) -> list[tuple[int, int]]:
    """First layers of those that are alike, and how many of each. Where most layers differ from all others, each is a
    kind of its own: those that are alike can be spread nearly evenly, so that whole ones in order tell little more."""
    counts = Counter(alike)
    if len(alike) < 2 * len(counts):
        return [(place, 1) for place in range(len(alike))]
    return [(alike.index(key), count) for key, count in counts.items()]


def _load(
    kinds: Sequence[LayerModes],
    counted: Sequence[tuple[int, int]],
    ogp: Sequence[float],
    room: int,
    boundary_bytes: Sequence[int],
    *,
    tails: Sequence[int] | None = None,
) -> RankLoad:
    """Of kinds of layers, so many of each, and what goes on behind every layer of the model."""
    most = max(map(len, kinds))
    padded = [(*options, *(options[-1:] * (most - len(options)))) for options in kinds]
    each = np.array([count for _, count in counted], dtype=np.float64)[:, None]
    told = np.array(
        [[*map(_TOLD, options)] for options in padded], dtype=np.float64
    ).transpose(2, 0, 1)
    forward, backward, activations = each * told
    tail: Floats | float = 0.0
    if tails is not None:
        tail = np.broadcast_to(each * np.array(tails)[:, None], forward.shape)
    return RankLoad(
        tail=tail,
        forward=forward,
        backward=backward,
        ogp_bytes=each * np.array(ogp, dtype=np.float64)[:, None],
        activation_bytes=activations,
        room_bytes=room,
        in_order=len(kinds) == len(boundary_bytes),
        boundary_bytes=np.array(boundary_bytes, dtype=np.float64),
    )


_TOLD = attrgetter(
    "forward_ticks",
    "backward_ticks",
    "activation_bytes",
)
