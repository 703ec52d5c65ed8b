"""Prices of a layout's layers, as arrays by kind: the only place that asks for them.

Identical layers are one kind with a count. All times are whole nanoseconds and all
sizes whole bytes, exactly those of `planner.cost`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost import (
    LayerCost,
    LayoutCosts,
    Workload,
    layout_costs,
)
from planner.cost.groups import groups_of
from planner.cost.layers import priced
from planner.cost.memory import receive_buffers
from planner.cost.ticks import ticks
from planner.search.engine.constraints import recompute_modes
from planner.search.engine.options import (
    Option,
    Options,
    Row,
)
from planner.search.engine.split_backward import forbids_recompute
from planner.search.engine.sums import Stack
from planner.search.engine.unequal import EqualRanks, Ranks, free_bytes, most_shared
from planner.spec.cluster import Link
from planner.spec.layout import Layout, RankOrder
from planner.spec.profile import RecomputeMode

Floats = NDArray[np.float64]
Modes = tuple[LayerCost, ...]
"""Costs of one layer in every recompute mode that it may have."""


class Timing(NamedTuple):
    """Nanoseconds between stages."""

    waiting: float
    """Of every action, in addition to its layers."""
    transfer: float
    """Least between two neighbouring stages."""


KnownTimings = dict[tuple[RankOrder, bool], Timing]
"""By rank order, and whether ranks have several stages: sharding moves no rank."""


@dataclass(frozen=True)
class Prices:
    """Layers of one layout by kind; arrays have one value per kind.

    For several layouts at once, every price is the least of theirs.
    """

    costs: LayoutCosts
    modes: tuple[Modes, ...]
    """Per kind, from least to most recomputation."""
    kind_of: tuple[int, ...]
    """Per layer: its kind."""
    counts: Floats
    layouts: tuple[LayoutCosts, ...]
    """Costs of every layout that these prices are the least of."""
    ranks: tuple[Ranks, ...] = ()
    """Of every class of identical replicas, where ranks differ."""
    timings: KnownTimings = field(default_factory=dict, compare=False)
    """Those that are known."""

    @classmethod
    def of(
        cls,
        layouts: Sequence[LayoutCosts],
        wanted: Sequence[str],
        timings: KnownTimings | None = None,
    ) -> Prices:
        """Return the prices of a layout, or the least prices of several.

        Args:
            layouts: costs of every one; they differ in options alone.
            wanted: recompute modes; a layer that has none of them may have any.
            timings: those that are known of layouts with other options.
        """
        costs = layouts[0]
        ranks: tuple[Ranks, ...] = ()
        if costs.columns and costs.work.groups:
            equal = EqualRanks(layouts)
            costs, ranks = equal.costs(), equal.ranks()
        elif len(layouts) > 1 or costs.columns:
            costs = least_costs(layouts)
        firsts = [first for first, _ in costs.kinds]
        place = {first: kind for kind, first in enumerate(firsts)}
        return cls(
            costs=costs,
            modes=tuple(_modes(costs, first, wanted) for first in firsts),
            kind_of=tuple(place[first] for first in costs.alike),
            counts=np.array([count for _, count in costs.kinds], dtype=np.float64),
            layouts=tuple(layouts),
            ranks=ranks,
            timings={} if timings is None else timings,
        )

    @cached_property
    def replicas(self) -> tuple[Prices, ...]:
        """The prices of every class of identical replicas."""
        if not self.ranks:
            return (self,)
        return tuple(replace(self, ranks=(each,)) for each in self.ranks)

    @property
    def micro_batches(self) -> int | None:
        """Of the first class of replicas; None: as the row of the table has."""
        return self.ranks[0].micro_batches if self.ranks else None

    @property
    def speeds(self) -> Floats:
        """Speed of every pipeline rank of the first class of replicas, or of all."""
        return self.ranks[0].speeds if self.ranks else np.ones(1)

    @property
    def free_of_ranks(self) -> Floats:
        """`free_bytes` of every pipeline rank of the first class of replicas, or of all."""
        if not self.ranks:
            return np.array([self.free_bytes])
        return self.ranks[0].free_bytes

    def timing(self, virtual_stages: int) -> Timing:
        """Return the least nanoseconds between stages."""
        is_interleaved = virtual_stages > 1
        found = []
        for costs in self.layouts:
            key = (costs.layout.rank_order, is_interleaved)
            if key not in self.timings:
                self.timings[key] = timing_of(costs, virtual_stages)
            found.append(self.timings[key])
        if len(found) == 1:
            return found[0]
        return Timing(*(min(values) for values in zip(*found, strict=True)))

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """Sums over the first layers, for every class of replicas."""
        return tuple(Stack.of(each) for each in self.replicas)

    @cached_property
    def known_cuts(self) -> dict[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Cuts by the rule of schedules with these ranks of stages."""
        return {}

    def _by_kind(self, value: Callable[[Modes], float]) -> Floats:
        return np.array([value(modes) for modes in self.modes], dtype=np.float64)

    @cached_property
    def fastest(self) -> Modes:
        """Per kind: the mode whose backward is shortest, with the fewest bytes."""
        return tuple(
            min(modes, key=lambda one: (one.backward_ticks, one.activation_bytes))
            for modes in self.modes
        )

    @cached_property
    def work(self) -> Floats:
        """Nanoseconds of forward and backward of one micro-batch, fastest mode."""
        return np.array(
            [float(one.forward_ticks + one.backward_ticks) for one in self.fastest]
        )

    @cached_property
    def total_work(self) -> float:
        """Nanoseconds of all layers for one micro-batch, fastest modes."""
        return float(self.counts @ self.work)

    @cached_property
    def backward_share(self) -> float:
        """Smallest share of forward or backward, whichever is larger, of any kind."""
        shares = [
            one.backward_ticks / (one.forward_ticks + one.backward_ticks)
            for one in self.fastest
            if one.forward_ticks + one.backward_ticks
        ]
        return max(0.5, min(shares, default=0.5))

    @cached_property
    def tails(self) -> Floats:
        """Least nanoseconds that a layer adds to the end of its rank's step."""
        return self._by_kind(lambda modes: self.costs.least_tail_ticks(modes[0]))

    @cached_property
    def fixed_tail(self) -> float:
        """Least nanoseconds at the end of a rank's step, whatever its layers."""
        shared = self.costs.shared
        spared = sum((len(one.layers) - 1) * one.tail_ticks for one in shared)
        fixed = self.costs.fixed_tail_ticks
        if self.ranks:
            groups = self.costs.work.groups
            shortest = min(each.constants.step_seconds for each in groups)
            fixed = self.costs.reduction_latency_ticks + ticks(shortest)
        return float(fixed - spared)

    @cached_property
    def tail_rate(self) -> float:
        """Least tail of a layer / its work."""
        has_work = self.work > 0
        rates = np.maximum(0.0, self.tails[has_work]) / self.work[has_work]
        return float(rates.min(initial=np.inf)) if has_work.any() else 0.0

    @cached_property
    def states(self) -> Floats:
        """Bytes of parameters, gradients and states that a rank has of a layer."""
        traits = self.costs.work.framework

        def states(modes: Modes) -> float:
            cost = modes[0]
            gradients = 0 if traits.steps_in_backward else cost.gradients_bytes
            optimizer = 0 if traits.offloads_states else cost.optimizer_bytes
            return cost.parameters_bytes + gradients + optimizer

        return self._by_kind(states)

    @cached_property
    def least_activations(self) -> Floats:
        """Saved bytes of one micro-batch in the mode that saves least."""
        return self._by_kind(lambda modes: min(each.activation_bytes for each in modes))

    @cached_property
    def least_temporary(self) -> Floats:
        """Temporary bytes in the mode that needs least."""
        return self._by_kind(lambda modes: min(each.temporary_bytes for each in modes))

    @cached_property
    def exchanged(self) -> tuple[float, float, int]:
        """Least bytes between stages, those behind the last one, buffers per neighbour."""
        *inner, last = self.costs.all_boundary_bytes()
        least = min(inner, default=0)
        return float(least), float(last), receive_buffers(self.costs.work)

    @property
    def keeps_outputs(self) -> bool:
        """Whether a stage keeps what it sends until its backward."""
        return not self.costs.work.framework.frees_outputs

    @cached_property
    def first_forward(self) -> Floats:
        """Nanoseconds of the first chunk's forward through the first n layers."""
        chunks = self.costs.layout.sequence_chunks
        each = self._by_kind(lambda modes: _first_forward(modes[0], chunks))
        return self._cumulative(each)

    @cached_property
    def first_backward(self) -> Floats:
        """Nanoseconds of the first chunk's backward through the first n layers."""
        chunks = self.costs.layout.sequence_chunks
        each = self._by_kind(
            lambda modes: min(_first_backward(one, chunks) for one in modes)
        )
        return self._cumulative(each)

    def chain(self, *, is_split: bool) -> float:
        """Return nanoseconds of the first chunk through all layers and back.

        Args:
            is_split: nobody waits for the gradients of weights.
        """
        chunks = self.costs.layout.sequence_chunks
        forward = float(self.first_forward[-1])
        if not is_split:
            return forward + float(self.first_backward[-1])
        each = self._by_kind(
            lambda modes: min(_first_input(one, chunks) for one in modes)
        )
        return forward + float(self.counts @ each)

    def _cumulative(self, each: Floats) -> Floats:
        kinds = np.array(self.kind_of)
        return np.concatenate([[0.0], np.cumsum(each[kinds])])

    def first_share(self, *, with_backward: bool) -> float:
        """Return the smallest part of a layer's work that its first chunk is."""
        first = np.diff(self.first_forward)
        if with_backward:
            first = first + np.diff(self.first_backward)
        work = self.work[np.array(self.kind_of)]
        has_work = work > 0
        return float((first[has_work] / work[has_work]).min(initial=1.0))

    @cached_property
    def free_bytes(self) -> float:
        """Bytes of a device for states, activations and temporaries of layers.

        Where ranks differ, those of the device that has most.
        """
        if self.ranks:
            return max(float(each.free_bytes.max()) for each in self.ranks)
        return free_bytes(self.costs)


@dataclass
class Pricing:
    """Prices of rows and options, computed once each."""

    work: Workload
    options: Options

    def __post_init__(self) -> None:
        """Start without any known price."""
        self.priced = 0
        """Layouts that were priced."""
        self._known: dict[tuple[object, ...], LayoutCosts] = {}
        self._prices: dict[tuple[object, ...], Prices] = {}
        self._stacks: dict[tuple[object, ...], tuple[Stack, ...]] = {}
        self._timings: dict[tuple[object, bool], KnownTimings] = {}
        """By degrees, and whether they are those of equal ranks."""
        self._undominated: dict[tuple[object, ...], list[tuple[int, Option]]] = {}
        constraint = self.options.constraints.get("recompute")
        supported = self.work.framework.supports.allowed("recompute")
        self.wanted = recompute_modes(constraint, supported)

    def costs(self, row: Row, option: Option) -> LayoutCosts:
        """Return the costs of a row's layout."""
        layout = self.options.layout(row, option)
        return self._base(row, option, layout).under(layout)

    def prices(self, row: Row, option: Option) -> Prices:
        """Return the prices of a row, without those of its schedule and stages.

        No layer recomputes if the schedule forbids it.
        """
        return self._prices_of(row, option, forbids=self._forbids_recompute(row))

    def prices_with_recompute(self, row: Row, option: Option) -> Prices:
        """Return the prices of a row as if its schedule permitted recomputation."""
        return self._prices_of(row, option, forbids=False)

    def _prices_of(self, row: Row, option: Option, *, forbids: bool) -> Prices:
        key = (row.price_key, option, forbids)
        found = self._prices.get(key)
        if found is None:
            layout = self.options.layout(row, option)
            timings = self._timings.setdefault((row.price_key, False), {})
            layouts = [self._base(row, option, layout)]
            found = self._combined(layouts, timings, forbids=forbids)
            self._prices[key] = found
        return found

    def least(self, row: Row) -> Prices | None:
        """Return the least prices of all options of a row; None: it has no option."""
        options = self.options.extremes(row)
        return self.least_of(row, options) if options else None

    def least_of(self, row: Row, options: tuple[Option, ...]) -> Prices:
        """Return the least prices of some options, on ranks that are all the fastest."""
        forbids = self._forbids_recompute(row)
        key = (row.price_key, options, forbids)
        found = self._prices.get(key)
        if found is None:
            layouts = [self._of_equal_ranks(row, option) for option in options]
            timings = self._timings.setdefault((row.price_key, True), {})
            found = self._combined(layouts, timings, forbids=forbids)
            self._prices[key] = found
        return found

    def _forbids_recompute(self, row: Row) -> bool:
        return forbids_recompute(self.options.space.schedules[row.schedule])

    def _combined(
        self, layouts: Sequence[LayoutCosts], timings: KnownTimings, *, forbids: bool
    ) -> Prices:
        """Return the least prices of some layouts.

        Args:
            layouts: they differ in options alone.
            timings: those that are known of layouts with other options.
            forbids: no layer recomputes.
        """
        if forbids:
            return _without_recompute(Prices.of(layouts, ("none",), timings))
        return Prices.of(layouts, self.wanted, timings)

    def stacks(self, row: Row, options: Sequence[Option]) -> tuple[Stack, ...]:
        """Return the prices of several options of a row together.

        They have one stack for every class of replicas.
        """
        key = (row.price_key, tuple(options), self._forbids_recompute(row))
        if key not in self._stacks:
            each = [self.prices(row, option).stacks for option in options]
            self._stacks[key] = tuple(map(Stack.of_options, zip(*each, strict=True)))
        return self._stacks[key]

    def undominated(
        self, row: Row, options: Sequence[tuple[int, Option]] | None = None
    ) -> list[tuple[int, Option]]:
        """Return options of a row, with their places, that no other one dominates.

        Args:
            row: of the table.
            options: those that count, with their places; None: all of the row.
        """
        if options is not None:
            return self._kept(row, options)
        supports = self.work.framework.supports
        order = row if supports.limits_plans else None
        key = (row.price_key, order)
        if key not in self._undominated:
            every = list(enumerate(self.options.of(row)))
            self._undominated[key] = self._kept(row, every)
        return self._undominated[key]

    def _kept(
        self, row: Row, options: Sequence[tuple[int, Option]]
    ) -> list[tuple[int, Option]]:
        kept: list[tuple[int, Option, LayoutCosts]] = []
        for place, option in options:
            costs = self._base(row, option, self.options.layout(row, option))
            if not any(dominates(better, costs) for _, _, better in kept):
                kept = [
                    one for one in kept if not dominates(costs, one[2], strictly=True)
                ]
                kept.append((place, option, costs))
        return [(place, option) for place, option, _ in kept]

    def _of_equal_ranks(self, row: Row, option: Option) -> LayoutCosts:
        """Return costs of a row's layout, or lower ones that are cheaper to compute.

        Where replicas have unequal shares, all have the largest one and the fastest
        links between stages. Pieces of a replica that lie differently on the nodes are
        priced one by one.
        """
        layout = self.options.layout(row, option)
        domain = self.work.domain_devices
        piece = row.tensor * row.context
        is_aligned = domain % piece == 0 or piece % domain == 0
        is_uneven = row.larger_shares and row.arrangement is None
        if not is_uneven or not is_aligned:
            return self._base(row, option, layout)
        costs = least_costs([priced(self.work, layout, groups_of(layout, domain))])
        links = (_fastest_link(self.work),) * (row.pipeline - 1)
        return replace(costs, boundary_links=links)

    def _base(self, row: Row, option: Option, layout: Layout) -> LayoutCosts:
        key = (row.price_key, option)
        if key not in self._known:
            self._known[key] = layout_costs(self.work, layout)
            self.priced += 1
        return self._known[key]


def _fastest_link(work: Workload) -> Link:
    """Return a link that is as fast as every link of the cluster."""
    links = [work.intra_node, work.inter_node or work.intra_node]
    bandwidth = max(each.bandwidth_bytes_per_second for each in links)
    return Link(
        latency_seconds=min(each.latency_seconds for each in links),
        bandwidth_bytes_per_second=bandwidth,
    )


def timing_of(costs: LayoutCosts, virtual_stages: int) -> Timing:
    """Return the least nanoseconds between stages of a layout."""
    if costs.columns:
        found = [timing_of(each, virtual_stages) for each in costs.columns]
        return Timing(*(min(values) for values in zip(*found, strict=True)))
    layout = costs.layout
    boundaries = layout.pipeline_parallel_degree - 1
    if not boundaries:
        return Timing(0.0, 0.0)
    costs = costs.under(
        layout.model_copy(update={"virtual_stages_per_rank": virtual_stages})
    )
    if virtual_stages > 1:
        boundaries = 1
    behind = [costs.transfers_behind(stage) for stage in range(boundaries)]
    distinct = {id(each): each for each in behind}
    least = min(map(min, distinct.values()))
    waiting = min(each.waiting_ticks for each in (costs, *costs.ranks))
    return Timing(float(waiting), float(least))


def least_costs(layouts: Sequence[LayoutCosts]) -> LayoutCosts:
    """Return costs of which each is the least of several layouts'.

    The layouts have the same degrees and sizes. Reductions take no time, and a
    parameter that layers share saves as much as in the layout where it saves most.
    """
    first = min(layouts, key=lambda each: each.layout.zero_stage)
    kinds = {
        layer: _least_layer([each.layers[layer] for each in layouts])
        for layer, _ in first.kinds
    }
    shared = tuple(
        most_shared(copies)
        for copies in zip(*(each.shared for each in layouts), strict=True)
    )
    return replace(
        first,
        layers=tuple(kinds[layer] for layer in first.alike),
        shared=shared,
        reduction_latency_ticks=0,
        columns=(),
    )


def _least_layer(
    layers: Sequence[Mapping[RecomputeMode, LayerCost]],
) -> dict[RecomputeMode, LayerCost]:
    found = {}
    for mode in layers[0]:
        costs = [layer[mode] for layer in layers if mode in layer]
        each = zip(*map(_of_least, costs), strict=True)
        least = dict(zip(_LEAST, map(min, each), strict=True))
        weight = max(one.backward_weight_ticks for one in costs)
        least["backward_weight_ticks"] = min(weight, least["backward_ticks"])
        found[mode] = costs[0]._replace(reduction_ticks=0, update_ticks=0, **least)
    return found


_LEAST = (
    "optimizer_ticks",
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "gathered_bytes",
    "forward_ticks",
    "backward_ticks",
    "activation_bytes",
    "temporary_bytes",
)
_of_least = attrgetter(*_LEAST)


def dominates(
    better: LayoutCosts, worse: LayoutCosts, *, strictly: bool = False
) -> bool:
    """Return whether `better` needs no more time and memory under every cut and mode.

    Layers have equal forwards and backwards; states, reductions, updates and optimizer
    take no less. A shorter latency counts as no gain if every layer's update is longer
    by at least as much, since every rank has a layer.

    Args:
        better: costs of a layout.
        worse: of a layout that differs in its option alone.
        strictly: and the updates of some layers are shorter.
    """
    if better.shared or better.layout.rank_order != worse.layout.rank_order:
        return False
    if better.columns or worse.columns:
        return False
    if better.gathered_bytes > worse.gathered_bytes:
        return False
    saved = better.reduction_latency_ticks - worse.reduction_latency_ticks
    framework = better.work.framework
    hides = framework.overlaps_reduction or framework.overlaps_gathers
    is_shorter = False
    for first, _ in better.kinds:
        ones, others = better.layers[first], worse.layers[first]
        pairs = list(zip(ones.values(), others.values(), strict=True))
        if not all(_is_no_better(*pair, hides=hides) for pair in pairs):
            return False
        one, other = pairs[0]
        longer = worse.least_tail_ticks(other) - better.least_tail_ticks(one)
        if longer < saved:
            return False
        is_shorter |= longer > max(0, saved)
    return is_shorter or not strictly


def _is_no_better(one: LayerCost, other: LayerCost, *, hides: bool) -> bool:
    """Return whether the second cost of a layer is nowhere less than the first.

    Args:
        one: of a layer and mode.
        other: of the same.
        hides: compute hides some reductions or updates, so that each counts by itself.
    """
    is_equal = one.forward_ticks == other.forward_ticks
    is_equal &= one.backward_ticks == other.backward_ticks
    tail = other.reduction_ticks + other.optimizer_ticks
    is_longer = tail >= one.reduction_ticks + one.optimizer_ticks
    if hides:
        is_longer &= other.update_ticks >= one.update_ticks
        is_longer &= other.optimizer_ticks >= one.optimizer_ticks
        of_one = one.reduction_ticks - one.update_ticks
        is_longer &= other.reduction_ticks - other.update_ticks >= of_one
    is_larger = other.parameters_bytes >= one.parameters_bytes
    is_larger &= other.gradients_bytes >= one.gradients_bytes
    is_larger &= other.optimizer_bytes >= one.optimizer_bytes
    is_larger &= other.host_optimizer_bytes >= one.host_optimizer_bytes
    is_larger &= other.host_activation_bytes >= one.host_activation_bytes
    is_larger &= other.temporary_bytes >= one.temporary_bytes
    is_larger &= other.activation_bytes >= one.activation_bytes
    return is_equal and is_longer and is_larger


def _modes(costs: LayoutCosts, layer: int, wanted: Sequence[str]) -> Modes:
    options = costs.layers[layer]
    found = tuple(cost for mode, cost in options.items() if mode in wanted)
    return found or tuple(options.values())


def _without_recompute(prices: Prices) -> Prices:
    """Return the prices with only the mode that recomputes least."""
    modes = tuple(each[:1] for each in prices.modes)
    return replace(prices, modes=modes)


def _first_forward(cost: LayerCost, chunks: int) -> int:
    attention = cost.attention.forward_ticks if chunks > 1 else 0
    rest = cost.forward_ticks - attention
    return rest // chunks + attention // (chunks * chunks)


def _first_backward(cost: LayerCost, chunks: int) -> int:
    return _first_input(cost, chunks) + cost.backward_weight_ticks // chunks


def _first_input(cost: LayerCost, chunks: int) -> int:
    attention = cost.attention.backward_ticks if chunks > 1 else 0
    rest = cost.backward_ticks - cost.backward_weight_ticks - attention
    return rest // chunks + attention // (chunks * chunks)
