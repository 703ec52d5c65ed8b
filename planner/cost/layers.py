"""Costs of all layers under one layout: what the step model adds up and the solver chooses.

Those of one layer are equations (T1) to (T4) and (T6) to (T8) of `planner.cost.pricing`, with what
`planner.cost.offload` adds to them; and for a stage s

    (T5)  c(s) = latency + bytes of every tensor that crosses the boundary / bandwidth    -> transfer_ticks()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from planner.cost.communication import (
    chain_seconds,
    collective_seconds,
    transfer_seconds,
)
from planner.cost.derived import DerivedRows
from planner.cost.groups import Groups
from planner.cost.offload import Offload, is_offloading
from planner.cost.placement import boundary_crosses_nodes
from planner.cost.pricing import LayerCost, LayerPricing, known_prices
from planner.cost.shared import SharedCost, SkipCost, shared_costs, skip_costs
from planner.cost.ticks import check_step, ticks
from planner.cost.workload import Workload, modes_of
from planner.errors import MismatchError, UnsupportedError
from planner.schedule import find
from planner.schedule.entry import Shape
from planner.spec.cluster import Link
from planner.spec.layout import Layout
from planner.spec.profile import Measurement, RecomputeMode

Rows = tuple[dict[RecomputeMode, Measurement], ...]
"""Of the profile, by layer and recompute mode."""
Layers = tuple[dict[RecomputeMode, LayerCost], ...]
"""By layer and recompute mode; identical layers share one dict."""


ACCUMULATED_BYTES = 4
"""Per element, of gradients that the micro-batches add up before they are scattered: fp32."""


@dataclass(frozen=True)
class LayoutCosts:
    """Everything about a layout that does not depend on the stage map."""

    work: Workload
    layout: Layout
    micro_batches: int
    layers: tuple[dict[RecomputeMode, LayerCost], ...]
    """Identical layers share one dict."""
    alike: tuple[int, ...]
    """By layer: the first one that costs the same."""
    shared: tuple[SharedCost, ...]
    skips: tuple[SkipCost, ...]
    reduction_latency_ticks: int
    ranks: tuple[LayoutCosts, ...] = ()
    """Of a column of `planner.cost.mixed`: the costs on every pipeline rank; its own are the least of these."""
    boundary_links: tuple[Link, ...] = ()
    """Of such a column: behind every pipeline rank but the last; where all replicas are alike, of more than two ranks
    also from the last one back to the first."""
    columns: tuple[LayoutCosts, ...] = ()
    """Where ranks differ: one for all data ranks that act alike; its own costs are the least of these."""

    def on_rank(self, pipeline: int) -> LayoutCosts:
        """The costs on one pipeline rank."""
        return self.ranks[pipeline] if self.ranks else self

    def on_stage(self, stage: int) -> LayoutCosts:
        """The costs on the pipeline rank of a stage."""
        return self.ranks[self.stage_ranks[stage]] if self.ranks else self

    @cached_property
    def waiting_ticks(self) -> int:
        """Return the ticks that an action waits for its neighbours: equation (S1)."""
        layout = self.layout
        if layout.pipeline_parallel_degree == 1:
            return 0
        is_interleaved = layout.virtual_stages_per_rank > 1
        if is_interleaved and self.work.framework.overlaps_transfers:
            return 0
        return ticks(self.work.constants.transfer_seconds / 2)

    @cached_property
    def fixed_tail_ticks(self) -> int:
        """Return what ends every rank's step at least, whatever layers it holds.

        That are the latency of the reduction and the fixed time of a step.
        """
        parts = self.columns or self.ranks
        if parts:
            return min(part.fixed_tail_ticks for part in parts)
        return self.reduction_latency_ticks + ticks(self.work.constants.step_seconds)

    def least_tail_ticks(self, cost: LayerCost) -> int:
        """Return the least ticks that a layer adds to the end of its rank's step.

        They are those of the optimizer and of the reductions that no compute can hide:
        equations (S3) and (S5). Without overlap they are all of both.
        """
        framework = self.work.framework
        exposed = cost.reduction_ticks
        if framework.overlaps_gathers:
            exposed -= cost.update_ticks
        if framework.overlaps_reduction:
            exposed -= cost.reduction_ticks - cost.update_ticks
        return exposed + cost.optimizer_ticks

    @property
    def of_replica(self) -> LayoutCosts:
        """Of any replica, where all are alike: on several node groups every pipeline rank has its own."""
        return self.columns[0] if self.columns else self

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of every stage, by the layout's schedule."""
        layout = self.layout
        stages = layout.virtual_stages_per_rank, layout.sequence_chunks
        return find(layout.schedule).stage_ranks(
            Shape(layout.pipeline_parallel_degree, self.micro_batches, *stages)
        )

    def under(self, layout: Layout) -> LayoutCosts:
        """The same under another order or recomputation, which change no layer's costs."""
        known = {
            id(one): one.under(layout)
            for one in {id(one): one for one in self.ranks}.values()
        }
        ranks = tuple(known[id(one)] for one in self.ranks)
        return replace(
            self,
            layout=layout,
            ranks=ranks,
            columns=tuple(one.under(layout) for one in self.columns),
        )

    @property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """Of the layers that cost the same the first, and how many they are."""
        return _counted(self.alike)

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Behind every pipeline rank but the last."""
        if self.boundary_links:
            return self.boundary_links[: self.layout.pipeline_parallel_degree - 1]
        work, boundaries = self.work, range(self.layout.pipeline_parallel_degree - 1)
        crossed = [
            boundary_crosses_nodes(self.layout, s, work.domain_devices)
            for s in boundaries
        ]
        return tuple(
            work.inter_node if crosses and work.inter_node else work.intra_node
            for crosses in crossed
        )

    @cached_property
    def gathered_bytes(self) -> int:
        """ZeRO 3: the largest layer's parameters, gathered, and those that are being gathered beside it (T6); ZeRO 2
        and 3: its gradients, and those that are being scattered beside it."""
        return _gathered_bytes(
            self.layout, [self.layers[first] for first, _ in self.kinds]
        )

    def boundary_bytes(self, last_layer: int) -> int:
        """Bytes that cross a stage boundary behind this layer, per micro-batch: its output and all skips over it."""
        output = next(iter(self.layers[last_layer].values())).output_bytes
        return output + sum(
            skip.bytes
            for skip in self.skips
            if skip.producer <= last_layer < skip.consumer
        )

    def all_boundary_bytes(self) -> tuple[int, ...]:
        """`boundary_bytes` of every layer."""
        outputs = {
            index: next(iter(self.layers[index].values())).output_bytes
            for index, _ in self.kinds
        }
        begun = [0] * (len(self.layers) + 1)
        for skip in self.skips:
            begun[skip.producer] += skip.bytes
            begun[skip.consumer] -= skip.bytes
        return tuple(
            outputs[kind] + over
            for kind, over in zip(self.alike, accumulate(begun), strict=False)
        )

    def transfer_ticks(self, boundary: int, last_layer: int) -> int:
        """Ticks from stage `boundary` to the next when its last layer is this one: equation (T5)."""
        return self.transfers_behind(boundary)[last_layer]

    def transfers_behind(self, boundary: int) -> tuple[int, ...]:
        """`transfer_ticks` of every layer that may be the stage's last."""
        if self.boundary_links:
            here, there = self.stage_ranks[boundary : boundary + 2]
            if here == there:
                return (0,) * len(self.layers)
            return self._transfers(
                self.boundary_links[min(here, there) if abs(there - here) == 1 else -1]
            )
        links, between = self.links, self.work.inter_node
        if self.layout.virtual_stages_per_rank == 1:
            return self._transfers(links[boundary])
        crosses = any(link is between for link in links)
        return self._transfers(between if between and crosses else self.work.intra_node)

    def _transfers(self, link: Link) -> tuple[int, ...]:
        known = self._known_transfers
        if id(link) not in known:
            chunks = self.layout.sequence_chunks
            sizes = [-(-whole // chunks) for whole in self.all_boundary_bytes()]
            priced_once = {
                size: ticks(transfer_seconds(size, link)) for size in set(sizes)
            }
            known[id(link)] = tuple(map(priced_once.__getitem__, sizes))
        return known[id(link)]

    @cached_property
    def _known_transfers(self) -> dict[int, tuple[int, ...]]:
        """By the identity of a link, which `work` keeps alive."""
        return {}


def priced(
    work: Workload, layout: Layout, groups: Groups, *, network: Link | None = None
) -> LayoutCosts:
    """Price every layer as if all ranks were alike.

    Args:
        work: its device and links are those of the ranks.
        layout: what is priced.
        groups: the communicators of these ranks.
        network: the link between stages that share parameters; None: as the devices of `work` lie.

    Raises:
        LayoutError: the global batch does not divide.
        MismatchError, UnsupportedError: the profile has no such rows, or the host is not known that the layout offloads
            to.
        SpecError: seconds that no step takes.
    """
    micro_batches = layout.micro_batches(work.job.global_batch_size)
    rows = rows_of(work, layout)
    alike, layers = work.alike(rows), _on_device(work, layout, groups, rows)
    gradient_bytes = None
    if accumulates_whole(work, layout, micro_batches):
        gradient_bytes = ACCUMULATED_BYTES
        layers = _with_whole_gradients(layers, alike)
    if is_offloading(layout):
        offload = Offload.of(
            work,
            layout,
            _gathered_bytes(layout, [layers[first] for first, _ in _counted(alike)]),
        )
        offloaded = {
            first: offload.costs(layers[first]) for first, _ in _counted(alike)
        }
        layers = tuple(map(offloaded.__getitem__, alike))
    check_step(
        micro_batches,
        sum(count * _longest(layers[first]) for first, count in _counted(alike)),
    )
    return LayoutCosts(
        work=work,
        layout=layout,
        micro_batches=micro_batches,
        layers=layers,
        alike=alike,
        shared=shared_costs(work, layout, layers, network, gradient_bytes),
        skips=skip_costs(work, layout),
        reduction_latency_ticks=_reduction_latency_ticks(work, layout, groups),
    )


def accumulates_whole(work: Workload, layout: Layout, micro_batches: int) -> bool:
    """Return whether every rank adds up the whole gradients of several micro-batches."""
    is_sharded = layout.zero_stage == 3
    return work.framework.accumulates_whole and is_sharded and micro_batches > 1


def _with_whole_gradients(layers: Layers, alike: Sequence[int]) -> Layers:
    """Return every layer's costs with the gradients of all its trained parameters."""
    whole = {
        first: {
            mode: cost._replace(gradients_bytes=ACCUMULATED_BYTES * cost.trained)
            for mode, cost in layers[first].items()
        }
        for first in set(alike)
    }
    return tuple(map(whole.__getitem__, alike))


def _on_device(work: Workload, layout: Layout, groups: Groups, rows: Rows) -> Layers:
    """Every layer's costs where nothing is offloaded. They are priced once for all layouts with the same communicators,
    ZeRO stage and sequence chunks: those with other pipeline degrees, and on other parts of a cluster."""
    key = ("layers", id(rows), groups, layout.zero_stage, layout.sequence_chunks)
    if key not in work.spent:
        alike, known = (
            work.alike(rows),
            known_prices(work, groups, layout.sequence_chunks),
        )
        distinct: dict[int, dict[RecomputeMode, LayerCost]] = {}
        for first, _ in _counted(alike):
            plain = rows[first][modes_of(rows[first])[0]]
            pricing = LayerPricing(
                work, layout, groups, work.profile.layers[first], plain, known
            )
            distinct[first] = pricing.costs(rows[first])
        work.spent[key] = tuple(map(distinct.__getitem__, alike))
    found: Layers = work.spent[key]
    return found


def _longest(options: Mapping[RecomputeMode, LayerCost]) -> int:
    return max(one.forward_ticks + one.backward_ticks for one in options.values())


def _gathered_bytes(
    layout: Layout, layers: Iterable[Mapping[RecomputeMode, LayerCost]]
) -> int:
    """Of two layers that ZeRO 2 scatters or ZeRO 3 gathers, the largest."""
    if layout.zero_stage < 2:
        return 0
    return 2 * max(next(iter(options.values())).gathered_bytes for options in layers)


@lru_cache(maxsize=256)
def _counted(alike: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(Counter(alike).items())


def rows_of(work: Workload, layout: Layout) -> Rows:
    """Return the rows of every layer under a layout, by recompute mode.

    Raises:
        MismatchError: the profile lacks this micro-batch size or tensor-parallel degree.
        UnsupportedError: the layout uses a dimension that is not priced.
    """
    degrees = (
        layout.tensor_parallel_degree,
        layout.context_parallel_degree,
        layout.expert_parallel_degree,
    )
    size = (layout.micro_batch_size, *degrees, layout.sequence_parallel)
    expert_tensor = layout.expert_tensor_parallel_degree
    has_own_degree = expert_tensor not in (None, layout.tensor_parallel_degree)
    derived = work.sizes if isinstance(work.sizes, DerivedRows) else None
    if has_own_degree and derived and derived.divides(size, expert_tensor):
        return derived.at(size, expert_tensor)
    found = None if has_own_degree else work.sizes.get(size)
    if found is None:
        _refuse_unknown_splits(work, layout)
        known = ", ".join(f"({size}, {degree})" for size, degree in work.rows)
        raise MismatchError(
            f"the profile of {work.profile.model!r} has no measurements for micro_batch_size({layout.micro_batch_size})"
            f" with tensor_parallel_degree({layout.tensor_parallel_degree}).",
            field="layout",
            hint=f"profile them, or choose one of the pairs that the profile has: {known}.",
        )
    return found


def _refuse_unknown_splits(work: Workload, layout: Layout) -> None:
    """Refuse context, expert and sequence parallelism by name where no profile was split so."""
    for field, plain in (
        ("context_parallel_degree", 1),
        ("expert_parallel_degree", 1),
        ("sequence_parallel", False),
    ):
        value = getattr(layout, field)
        if value != plain:
            raise UnsupportedError(
                f"the profile of {work.profile.model!r} has no measurements with {field}({value}).",
                field=f"layout.{field}",
                hint=f"use {plain}, or a counted profile with such rows: planner profile --device analytic:ID.",
            )


def _reduction_latency_ticks(work: Workload, layout: Layout, groups: Groups) -> int:
    """Of an all-reduce among the ranks that sum gradients: under ZeRO among those of a group, then over the copies;
    where owners of whole parameters send them, one after the other, of these broadcasts too (L6)."""
    several = (groups.shard, groups.copies) if layout.zero_stage else (groups.data,)
    links, fitted = (work.intra_node, work.inter_node), work.constants
    seconds = sum(
        collective_seconds(
            "all_reduce",
            1,
            one,
            *links,
            copies=fitted.ring_copies,
            rails=fitted.rail_fraction,
        )
        for one in several
    )
    if work.framework.whole_tensors and layout.zero_stage in (1, 2):
        tensors = work.framework.whole_tensors * -(
            -len(work.profile.layers) // layout.pipeline_parallel_degree
        )
        seconds += min(groups.shard.ranks, tensors) * chain_seconds(
            groups.shard, *links
        )
    return ticks(seconds)
