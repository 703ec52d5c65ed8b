"""Costs of every layer under one layout, in whole ticks and bytes: what the step model adds up and the solver chooses.

Durations are whole nanoseconds (ticks), rounded once per layer, so that simulation, solver and validator agree to the
last digit. Per layer l, recompute mode r, micro-batch:

    (T1)  f(l)   = forward + sum of its forward collectives over the tensor-parallel group, the same for every r
                                                                                            -> LayerCost.forward_ticks
    (T2)  b(l,r) = input gradient + weight gradient + its backward collectives
                   + recomputation (with the forward collectives again)                     -> LayerCost.backward_ticks
    (T3)  u(l)   = optimizer step over the layer's parameters: measured for AdamW, times the bytes that the job's
                   optimizer moves / those that AdamW moves; else the bytes that it reads and writes over the memory
                   bandwidth; for Muon also the FLOPs of its matrix products                -> optimizer_ticks
    (T4)  g(l)   = all-reduce of the layer's gradients over the data- and context-parallel ranks (ZeRO 1:
                   reduce-scatter and all-gather; ZeRO 2: all-gather; experts: over those that hold the same experts),
                   its latency apart (`reduction_latency_ticks`, once per stage); what backward hides of it is the
                   step's business                                                          -> reduction_ticks
    (T6)  ZeRO 2: every micro-batch scatters the layer's gradients, since no rank keeps them whole; ZeRO 3: it also
                  gathers the layer's parameters for its forward and again for its backward; beside compute when the
                  framework overlaps it, of which `overlap_fraction` can hide it; what is left adds to f and b
                  (Rajbhandari et al. 2020; Zhao et al. 2023, PyTorch FSDP)                   -> gather_ticks
    (T7)  hybrid sharding: ZeRO's collectives, those of (T4) and of (T6), go among the neighbours that share out the
          states; the sum of a micro-batch's gradients stays among them, and once per step every rank adds its shard,
          1/k of the layer for groups of k, to those of the other groups (an all-reduce), which is part of g(l)
          (Zhang et al. 2022, "MiCS", sections 3.2 and 3.4; Zhao et al. 2023)                 -> reduction_ticks
    (T5)  c(s)   = latency + bytes of every tensor that crosses the boundary / bandwidth    -> transfer_ticks()
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from planner.cost.chunks import NO_ATTENTION, AttentionPart, attention_part
from planner.cost.communication import Group, collective_seconds, transfer_seconds
from planner.cost.compute import Computation, computation
from planner.cost.placement import (
    boundary_crosses_nodes,
    widest_context_group,
    widest_copies_group,
    widest_data_group,
    widest_expert_data_group,
    widest_expert_group,
    widest_expert_shard_group,
    widest_shard_group,
    widest_tensor_group,
)
from planner.cost.shared import SharedCost, SkipCost, shared_costs, skip_costs
from planner.cost.ticks import ticks
from planner.cost.workload import Workload, modes_of
from planner.errors import MismatchError, UnsupportedError
from planner.spec.cluster import Link
from planner.spec.layout import Layout
from planner.spec.profile import BYTES_PER_ELEMENT, CollectiveName, Measurement, RecomputeMode
from planner.spec.recipes import OgpRecipe, ParameterCount, recipe


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer in one recompute mode: ticks and bytes of one micro-batch on one rank."""

    mode: RecomputeMode
    forward_compute_ticks: int
    backward_compute_ticks: int
    backward_weight_ticks: int
    """The part of the backward that nobody waits for."""
    recompute_ticks: int
    communication_ticks: int
    """Tensor-, context- and expert-parallel collectives of forward, backward and recomputation."""
    gather_ticks: int
    """Equation (T6), forward and backward: what compute does not hide."""
    forward_ticks: int
    """Equation (T1)."""
    backward_ticks: int
    """Equation (T2)."""
    optimizer_ticks: int
    """Equation (T3), once per step."""
    reduction_ticks: int
    """Equation (T4), once per step."""
    parameters: int
    """Elements on one rank."""
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    """Whole parameters, while the layer runs under ZeRO 3."""
    activation_bytes: int
    output_bytes: int
    temporary_bytes: int
    model_flops: int
    """Forward and backward without recomputation, on one rank."""
    attention: AttentionPart = NO_ATTENTION
    """Where sequences are cut into chunks."""

    @property
    def ogp_bytes(self) -> int:
        """Optimizer states, gradients and parameters."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class LayoutCosts:
    """Everything about a layout that does not depend on the stage map."""

    work: Workload
    layout: Layout
    micro_batches: int
    layers: tuple[dict[RecomputeMode, LayerCost], ...]
    """Identical layers share one dict."""
    shared: tuple[SharedCost, ...]
    skips: tuple[SkipCost, ...]
    reduction_latency_ticks: int
    ranks: tuple[LayoutCosts, ...] = ()
    """Of a column of `planner.cost.mixed`: the costs on every pipeline rank; its own are the least of these."""
    boundary_links: tuple[Link, ...] = ()
    """Of such a column: behind every pipeline rank but the last."""
    columns: tuple[LayoutCosts, ...] = ()
    """Where ranks differ: one for all data ranks that act alike; its own costs are the least of these."""

    def on_rank(self, pipeline: int) -> LayoutCosts:
        """The costs on one pipeline rank."""
        return self.ranks[pipeline] if self.ranks else self

    def under(self, layout: Layout) -> LayoutCosts:
        """The same under another order or recomputation, which change no layer's costs."""
        ranks = tuple(one.under(layout) for one in self.ranks)
        return replace(self, layout=layout, ranks=ranks, columns=tuple(one.under(layout) for one in self.columns))

    @cached_property
    def _links(self) -> tuple[Link, ...]:
        """Behind every pipeline rank but the last."""
        work, boundaries = self.work, range(self.layout.pipeline_parallel_degree - 1)
        crossed = [boundary_crosses_nodes(self.layout, s, work.domain_devices) for s in boundaries]
        return tuple(work.inter_node if crosses and work.inter_node else work.intra_node for crosses in crossed)

    @cached_property
    def gathered_bytes(self) -> int:
        """ZeRO 3: the largest layer's parameters, gathered, and those that are being gathered beside it (T6)."""
        if self.layout.zero_stage < 3:
            return 0
        return 2 * max(next(iter(options.values())).gathered_bytes for options in self.layers)

    def boundary_bytes(self, last_layer: int) -> int:
        """Bytes that cross a stage boundary behind this layer, per micro-batch: its output and all skips over it."""
        output = next(iter(self.layers[last_layer].values())).output_bytes
        return output + sum(skip.bytes for skip in self.skips if skip.producer <= last_layer < skip.consumer)

    def transfer_ticks(self, boundary: int, last_layer: int) -> int:
        """Ticks from stage `boundary` to the next when its last layer is this one: equation (T5)."""
        return self.transfers_behind(boundary)[last_layer]

    def transfers_behind(self, boundary: int) -> tuple[int, ...]:
        """`transfer_ticks` of every layer that may be the stage's last."""
        links, between = self.boundary_links or self._links, self.work.inter_node
        if self.layout.virtual_stages_per_rank == 1:
            return self._transfers(links[boundary])
        crosses = any(link is between for link in links)
        return self._transfers(between if between and crosses else self.work.intra_node)

    def _transfers(self, link: Link) -> tuple[int, ...]:
        known = self._known_transfers
        if id(link) not in known:
            chunks = self.layout.sequence_chunks
            sizes = [-(-self.boundary_bytes(layer) // chunks) for layer in range(len(self.layers))]
            known[id(link)] = tuple(ticks(transfer_seconds(size, link)) for size in sizes)
        return known[id(link)]

    @cached_property
    def _known_transfers(self) -> dict[int, tuple[int, ...]]:
        """By the identity of a link, which `work` keeps alive."""
        return {}


def priced(work: Workload, layout: Layout, groups: Groups, *, network: Link | None = None) -> LayoutCosts:
    """Price every layer as if all ranks were alike.

    Args:
        work: its device and links are those of the ranks.
        layout: what is priced.
        groups: the communicators of these ranks.
        network: the link between stages that share parameters; None: as the devices of `work` lie.

    Raises:
        LayoutError: the global batch does not divide.
        MismatchError, UnsupportedError: the profile has no such rows.
    """
    micro_batches = layout.micro_batches(work.job.global_batch_size)
    rows = _rows(work, layout)
    alike = work.alike(rows)
    spent = work.spent.setdefault((groups.tensor, groups.context, groups.expert), {})
    distinct: dict[int, dict[RecomputeMode, LayerCost]] = {}
    for index in set(alike):
        plain = rows[index][modes_of(rows[index])[0]]
        pricing = _LayerPricing(work, layout, groups, work.profile.layers[index].parameters, plain, spent)
        distinct[index] = pricing.costs(rows[index])
    layers = tuple(map(distinct.__getitem__, alike))
    return LayoutCosts(
        work=work,
        layout=layout,
        micro_batches=micro_batches,
        layers=layers,
        shared=shared_costs(work, layout, layers, network),
        skips=skip_costs(work, layout),
        reduction_latency_ticks=_reduction_latency_ticks(work, layout, groups),
    )


@dataclass(frozen=True, slots=True)
class Groups:
    """The communicators of a layout, each the one that crosses most nodes."""

    tensor: Group
    context: Group
    expert: Group
    data: Group
    """Whose ranks sum gradients: data- and context-parallel ones."""
    expert_data: Group
    """Those of them that hold the same experts."""
    shard: Group
    """Those of `data` that share out ZeRO's states: all of them, or neighbours."""
    expert_shard: Group
    """Those of them that hold the same experts."""
    copies: Group
    """Ranks that hold the same shard, of experts too."""


def groups_of(layout: Layout, domain_devices: int) -> Groups:
    """The communicators of a layout."""
    return Groups(
        tensor=widest_tensor_group(layout, domain_devices),
        context=widest_context_group(layout, domain_devices),
        expert=widest_expert_group(layout, domain_devices),
        data=widest_data_group(layout, domain_devices),
        expert_data=widest_expert_data_group(layout, domain_devices),
        shard=widest_shard_group(layout, domain_devices),
        expert_shard=widest_expert_shard_group(layout, domain_devices),
        copies=widest_copies_group(layout, domain_devices),
    )


def _rows(work: Workload, layout: Layout) -> tuple[dict[RecomputeMode, Measurement], ...]:
    degrees = (layout.tensor_parallel_degree, layout.context_parallel_degree, layout.expert_parallel_degree)
    found = work.sizes.get((layout.micro_batch_size, *degrees, layout.sequence_parallel))
    if found is None:
        _refuse_unknown_splits(work, layout)
        known = ", ".join(f"({size}, {degree})" for size, degree in work.rows)
        raise MismatchError(
            f"the profile of {work.profile.model!r} has no measurements for micro_batch_size({layout.micro_batch_size})"
            f" with tensor_parallel_degree({layout.tensor_parallel_degree}).",
            field="layout",
            mend=f"profile them, or choose one of the pairs that the profile has: {known}.",
        )
    return found


def _refuse_unknown_splits(work: Workload, layout: Layout) -> None:
    """Refuse context, expert and sequence parallelism by name where no profile was split so."""
    for field, plain in (("context_parallel_degree", 1), ("expert_parallel_degree", 1), ("sequence_parallel", False)):
        value = getattr(layout, field)
        if value != plain:
            raise UnsupportedError(
                f"the profile of {work.profile.model!r} has no measurements with {field}({value}).",
                field=f"layout.{field}",
                mend=f"use {plain}, or a counted profile with such rows: planner profile --device analytic:ID.",
            )


def moved_bytes(ogp: OgpRecipe, count: ParameterCount) -> int:
    """Bytes that a step reads and writes: states and parameters both ways, gradients once."""
    return 2 * ogp.optimizer_bytes(count) + count.elements * (ogp.gradient_bytes + 2 * ogp.parameter_bytes)


@dataclass(frozen=True, slots=True)
class _Spent:
    """Ticks and bytes of one layer and micro-batch that no data-parallel degree and no ZeRO stage changes."""

    forward: int
    backward: int
    backward_weight: int
    recompute: int
    forward_exchange: int
    backward_exchange: int
    replayed_exchange: int
    activation_bytes: int
    temporary_bytes: int


@dataclass(frozen=True, slots=True)
class _LayerPricing:
    """Prices the measurement rows of one layer."""

    work: Workload
    layout: Layout
    groups: Groups
    layer_parameters: int
    plain: Measurement
    """The row that recomputes least. What no recompute mode changes (forward, parameters, optimizer, output) is read
    here for all modes: measured noise between the rows must not make one mode's forward faster than another's."""
    known: dict[int, _Spent]
    """What has been priced already with the same tensor-, context- and expert-parallel groups, by the identity of a
    row: rows know their micro-batch size and what splits the layer, nothing else matters to it."""

    def costs(self, rows: dict[RecomputeMode, Measurement]) -> dict[RecomputeMode, LayerCost]:
        """In every mode, from least to most recomputation."""
        held, gathers = self._held(), self._gathers()
        return {mode: self._cost(rows[mode], held, gathers) for mode in modes_of(rows)}

    def _cost(self, row: Measurement, held: Mapping[str, int], gathers: tuple[int, int]) -> LayerCost:
        spent, hides = self._spent(row), self._hides
        backward_exchange = spent.backward_exchange + spent.replayed_exchange
        in_forward = max(0, gathers[0] - int(hides * spent.forward)) if gathers[0] else 0
        in_backward = max(0, gathers[1] - int(hides * (spent.backward + spent.recompute))) if gathers[1] else 0
        return LayerCost(
            mode=row.recompute,
            forward_compute_ticks=spent.forward,
            backward_compute_ticks=spent.backward,
            backward_weight_ticks=spent.backward_weight,
            recompute_ticks=spent.recompute,
            communication_ticks=spent.forward_exchange + backward_exchange,
            gather_ticks=in_forward + in_backward,
            forward_ticks=spent.forward + spent.forward_exchange + in_forward,
            backward_ticks=spent.backward + spent.recompute + backward_exchange + in_backward,
            activation_bytes=spent.activation_bytes,
            temporary_bytes=spent.temporary_bytes,
            attention=self._attention(row, spent) if self.layout.sequence_chunks > 1 else NO_ATTENTION,
            **held,
        )

    def _held(self) -> dict[str, int]:
        """What no recompute mode changes."""
        work, zero, plain = self.work, self.layout.zero_stage, self.plain
        count = self.local_parameters()
        parameters = count.elements
        return {
            "optimizer_ticks": self._optimizer_ticks(count),
            "reduction_ticks": self._reduction_ticks(parameters),
            "parameters": parameters,
            "parameters_bytes": self._sharded(parameters * work.recipe.parameter_bytes, zero >= 3),
            "gradients_bytes": self._sharded(parameters * work.recipe.gradient_bytes, zero >= 2),
            "optimizer_bytes": self._sharded(work.recipe.optimizer_bytes(count), zero >= 1),
            "gathered_bytes": parameters * self._computed_bytes if zero >= 3 else 0,
            "output_bytes": plain.output_bytes,
            "model_flops": plain.forward_flops + plain.backward_input_flops + plain.backward_weight_flops,
        }

    def _attention(self, row: Measurement, spent: _Spent) -> AttentionPart:
        of_input = spent.backward - spent.backward_weight
        return attention_part(row, self.plain, spent.forward, of_input, spent.recompute)

    def _spent(self, row: Measurement) -> _Spent:
        found = self.known.get(id(row))
        if found is None:
            found = self.known[id(row)] = self._measured(row)
        return found

    def _measured(self, row: Measurement) -> _Spent:
        seconds = self._computation(row)
        forward_exchange = self._exchange_ticks(self.plain, "forward")
        plain = seconds if row is self.plain else self._computation(self.plain)
        weight = ticks(seconds.backward_weight_seconds)
        return _Spent(
            forward=ticks(plain.forward_seconds),
            backward=ticks(seconds.backward_input_seconds) + weight,
            backward_weight=weight,
            recompute=ticks(seconds.recompute_seconds),
            forward_exchange=forward_exchange,
            backward_exchange=self._exchange_ticks(row, "backward"),
            replayed_exchange=forward_exchange if row.recompute == "full" else 0,
            activation_bytes=self._allocated(row.activation_bytes),
            temporary_bytes=self._allocated(row.temporary_bytes),
        )

    def _computation(self, row: Measurement) -> Computation:
        return computation(row, self.work.device, self.work.profile.dtype, self.work.constants)

    def local_parameters(self) -> ParameterCount:
        """On one rank of the tensor-parallel group."""
        row = self.plain
        elements = row.local_parameters
        if elements is None:
            elements = -(-self.layer_parameters // row.tensor_parallel_degree)
        return ParameterCount(elements, row.local_matrix_elements, row.local_factored_elements)

    def _allocated(self, size_bytes: int) -> int:
        """Bytes with what the allocator loses to rounding and fragmentation, rounded up."""
        overhead = 1 + self.work.device.allocation_overhead
        return math.ceil(size_bytes * overhead * self.work.constants.allocated_factor)

    def _collective_seconds(self, operation: CollectiveName, size_bytes: int, group: Group) -> float:
        work = self.work
        if group.ranks == 1:
            return 0.0
        between = collective_seconds(operation, size_bytes, group, work.intra_node, work.inter_node)
        return between + work.constants.collective_seconds

    def _sharded(self, size_bytes: int, is_sharded: bool) -> int:
        """Bytes on one rank; experts are sharded over those ranks only that hold the same ones."""
        if not is_sharded:
            return size_bytes
        experts = size_bytes * self.plain.local_expert_parameters // max(1, self.local_parameters().elements)
        return -(-(size_bytes - experts) // self.groups.shard.ranks) - (-experts // self.groups.expert_shard.ranks)

    def _exchange_ticks(self, row: Measurement, phase: str) -> int:
        return ticks(
            sum(
                one.count * self._collective_seconds(one.operation, one.bytes, getattr(self.groups, one.group))
                for one in row.collectives
                if one.phase == phase
            )
        )

    def _parts(self, parameters: int) -> tuple[tuple[int, Group], ...]:
        """Elements by the ranks that share them out, or sum their gradients: experts, and all others."""
        experts, groups = self.plain.local_expert_parameters, self.groups
        sharing = (groups.shard, groups.expert_shard) if self.layout.zero_stage else (groups.data, groups.expert_data)
        both = zip((parameters - experts, experts), sharing, strict=True)
        return tuple(part for part in both if part[0])

    def _optimizer_ticks(self, count: ParameterCount) -> int:
        seconds = self._moving_seconds(count) + self._muon_seconds()
        if not (self.layout.zero_stage and self.plain.local_expert_parameters):
            return ticks(seconds / (self.groups.shard.ranks if self.layout.zero_stage else 1))
        return ticks(
            sum(seconds * elements / count.elements / group.ranks for elements, group in self._parts(count.elements))
        )

    def _moving_seconds(self, count: ParameterCount) -> float:
        """Of the optimizer's states, gradients and parameters."""
        moved = moved_bytes(self.work.recipe, count)
        if self.plain.optimizer_seconds is not None:
            adamw = moved_bytes(recipe(self.work.job.precision, "adamw"), count)
            return self.plain.optimizer_seconds * (moved / adamw if adamw else 1.0)
        bandwidth = self.work.device.memory_bandwidth_bytes_per_second
        constants = self.work.constants
        reached = (bandwidth or float("inf")) * constants.memory_fraction
        return moved * constants.optimizer_passes / reached

    def _muon_seconds(self) -> float:
        """Of the Newton-Schulz iteration's matrix products, in bf16 where the device has it, or as fast as the layer's
        forward was measured.
        """
        flops = self.plain.local_muon_flops
        if self.work.job.optimizer != "muon" or not flops:
            return 0.0
        device, row = self.work.device, self.plain
        peak = device.peak_flops_per_second.get("bf16", device.peak_flops_per_second.get(self.work.profile.dtype))
        if peak is not None:
            return flops / (peak * device.achievable_fraction)
        return flops * (row.forward_seconds or 0.0) / max(1, row.forward_flops)

    def _reduction_ticks(self, parameters: int) -> int:
        return ticks(sum(self._reduction_seconds(elements, group) for elements, group in self._parts(parameters)))

    def _reduction_seconds(self, parameters: int, group: Group) -> float:
        """Equations (T4) and (T7); under ZeRO 3 every micro-batch gathers and scatters, under ZeRO 2 it scatters."""
        work, ogp, zero = self.work, self.work.recipe, self.layout.zero_stage
        if zero == 0:
            return _bandwidth_seconds(work, "all_reduce", parameters * ogp.gradient_bytes, group)
        seconds = 0.0
        if zero < 3:
            seconds += _bandwidth_seconds(work, "all_gather", parameters * self._computed_bytes, group)
        if zero < 2:
            seconds += _bandwidth_seconds(work, "reduce_scatter", parameters * ogp.gradient_bytes, group)
        shard_bytes = -(-parameters // group.ranks) * ogp.gradient_bytes
        return seconds + _bandwidth_seconds(work, "all_reduce", shard_bytes, self.groups.copies)

    @property
    def _computed_bytes(self) -> int:
        """Bytes of a parameter as forward and backward take it."""
        return min(self.work.recipe.parameter_bytes, BYTES_PER_ELEMENT[self.work.profile.dtype])

    @property
    def _hides(self) -> float:
        """What part of compute can hide an exchange of ZeRO: equation (T6)."""
        return self.work.constants.overlap_fraction if self.work.framework.overlaps_gathers else 0.0

    def _gathers(self) -> tuple[int, int]:
        """Ticks of ZeRO's exchanges in forward and backward, hidden or not: equation (T6)."""
        zero, ogp = self.layout.zero_stage, self.work.recipe
        if zero < 2:
            return 0, 0
        gather = scatter = 0.0
        for elements, group in self._parts(self.local_parameters().elements):
            scatter += self._collective_seconds("reduce_scatter", elements * ogp.gradient_bytes, group)
            if zero == 3:
                gather += self._collective_seconds("all_gather", elements * self._computed_bytes, group)
        again = 0.0 if self.work.framework.keeps_gathered else gather
        return ticks(gather), ticks(again) + ticks(scatter)


def _bandwidth_seconds(work: Workload, operation: CollectiveName, size_bytes: int, group: Group) -> float:
    """A collective without its latency, which a stage pays once and not once per layer."""
    return collective_seconds(operation, size_bytes, group, work.intra_node, work.inter_node, latency=False)


def _reduction_latency_ticks(work: Workload, layout: Layout, groups: Groups) -> int:
    """Of an all-reduce among the ranks that sum gradients: under ZeRO among those of a group, then over the copies."""
    several = (groups.shard, groups.copies) if layout.zero_stage else (groups.data,)
    return ticks(sum(collective_seconds("all_reduce", 1, one, work.intra_node, work.inter_node) for one in several))
