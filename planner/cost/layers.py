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
    (T4)  g(l)   = all-reduce of the layer's gradients over the data-parallel group (ZeRO 1 and 2: reduce-scatter and
                   all-gather; ZeRO 3: one all-gather more), its latency apart (`reduction_latency_ticks`, once per
                   stage); not hidden behind backward, so an upper bound
                                                                                            -> reduction_ticks
    (T5)  c(s)   = latency + bytes of every tensor that crosses the boundary / bandwidth    -> transfer_ticks()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.cost.calibration import DEFAULT
from planner.cost.communication import Group, collective_seconds, transfer_seconds
from planner.cost.compute import computation
from planner.cost.placement import boundary_crosses_nodes, widest_data_group, widest_tensor_group
from planner.cost.workload import Workload, modes_of
from planner.errors import MismatchError, UnsupportedError
from planner.spec.cluster import Link
from planner.spec.layout import Layout
from planner.spec.profile import CollectiveName, Measurement, RecomputeMode
from planner.spec.recipes import OgpRecipe, ParameterCount, recipe

TICK_SECONDS = 1e-9


def ticks(seconds: float) -> int:
    """Seconds in whole ticks, rounded to nearest."""
    return round(seconds / TICK_SECONDS)


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
    """Tensor-parallel collectives of forward, backward and recomputation."""
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
    activation_bytes: int
    output_bytes: int
    temporary_bytes: int
    model_flops: int
    """Forward and backward without recomputation, on one rank."""

    @property
    def ogp_bytes(self) -> int:
        """Optimizer states, gradients and parameters."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class SharedCost:
    """Parameters used by several layers: stored once per stage, their gradients summed over the stages."""

    layers: tuple[int, ...]
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    tail_ticks: int
    """Reduction and optimizer of one copy, saved when a stage holds several layers that use it."""
    exchange_ticks: int
    """All-reduce of the gradients over two stages, once per step and stage that holds a copy."""

    @property
    def ogp_bytes(self) -> int:
        """Of one copy."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class SkipCost:
    """A tensor that travels along every boundary between two layers."""

    producer: int
    consumer: int
    bytes: int
    """Per micro-batch."""


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

    @cached_property
    def _crossings(self) -> tuple[bool, ...]:
        boundaries = range(self.layout.pipeline_parallel_degree - 1)
        return tuple(boundary_crosses_nodes(self.layout, s, self.work.devices_per_node) for s in boundaries)

    def boundary_bytes(self, last_layer: int) -> int:
        """Bytes that cross a stage boundary behind this layer, per micro-batch: its output and all skips over it."""
        output = next(iter(self.layers[last_layer].values())).output_bytes
        return output + sum(skip.bytes for skip in self.skips if skip.producer <= last_layer < skip.consumer)

    def transfer_ticks(self, boundary: int, last_layer: int) -> int:
        """Ticks from stage `boundary` to the next when its last layer is this one: equation (T5)."""
        work = self.work
        link = work.inter_node if self._crossings[boundary] and work.inter_node else work.intra_node
        return ticks(transfer_seconds(self.boundary_bytes(last_layer), link))


def layout_costs(work: Workload, layout: Layout) -> LayoutCosts:
    """Price every layer under a layout.

    Raises:
        LayoutError: the degrees do not multiply to the devices, or the global batch does not divide.
        MismatchError: the profile lacks this micro-batch size or tensor-parallel degree.
        UnsupportedError: the layout uses a dimension that is not priced yet.
    """
    _check_supported(layout)
    layout.check_devices(work.devices)
    micro_batches = layout.micro_batches(work.job.global_batch_size)
    rows = _rows(work, layout)
    tensor_group = widest_tensor_group(layout, work.devices_per_node)
    data_group = widest_data_group(layout, work.devices_per_node)
    priced: dict[tuple[int, int], dict[RecomputeMode, LayerCost]] = {}
    layers = []
    for layer, options in zip(work.profile.layers, rows, strict=True):
        key = (id(options), layer.parameters)
        if key not in priced:
            modes = modes_of(options)
            pricing = _LayerPricing(work, layout, tensor_group, data_group, layer.parameters, options[modes[0]])
            priced[key] = {mode: pricing.cost(options[mode]) for mode in modes}
        layers.append(priced[key])
    return LayoutCosts(
        work=work,
        layout=layout,
        micro_batches=micro_batches,
        layers=tuple(layers),
        shared=_shared_costs(work, layout, layers),
        skips=_skip_costs(work, layout),
        reduction_latency_ticks=_reduction_latency_ticks(work, data_group),
    )


def _check_supported(layout: Layout) -> None:
    for field in ("context_parallel_degree", "expert_parallel_degree", "virtual_stages_per_rank"):
        if getattr(layout, field) != 1:
            raise UnsupportedError(
                f"{field}({getattr(layout, field)}) is not priced yet.", field=f"layout.{field}", mend="use 1."
            )
    if layout.sequence_parallel:
        raise UnsupportedError(
            "sequence parallelism is not priced yet.", field="layout.sequence_parallel", mend="use false."
        )


def _rows(work: Workload, layout: Layout) -> tuple[dict[RecomputeMode, Measurement], ...]:
    found = work.rows.get((layout.micro_batch_size, layout.tensor_parallel_degree))
    if found is None:
        known = ", ".join(f"({size}, {degree})" for size, degree in work.rows)
        raise MismatchError(
            f"the profile of {work.profile.model!r} has no measurements for micro_batch_size({layout.micro_batch_size})"
            f" with tensor_parallel_degree({layout.tensor_parallel_degree}).",
            field="layout",
            mend=f"profile them, or choose one of the pairs that the profile has: {known}.",
        )
    return found


def moved_bytes(ogp: OgpRecipe, count: ParameterCount) -> int:
    """Bytes that a step reads and writes: states and parameters both ways, gradients once."""
    return 2 * ogp.optimizer_bytes(count) + count.elements * (ogp.gradient_bytes + 2 * ogp.parameter_bytes)


@dataclass(frozen=True, slots=True)
class _LayerPricing:
    """Prices the measurement rows of one layer."""

    work: Workload
    layout: Layout
    tensor_group: Group
    data_group: Group
    layer_parameters: int
    plain: Measurement
    """The row that recomputes least. What no recompute mode changes (forward, parameters, optimizer, output) is read
    here for all modes: measured noise between the rows must not make one mode's forward faster than another's."""

    def cost(self, row: Measurement) -> LayerCost:
        work, zero = self.work, self.layout.zero_stage
        seconds = computation(row, work.device, work.profile.dtype)
        forward_exchange = self._exchange_ticks(self.plain, "forward")
        backward_exchange = self._exchange_ticks(row, "backward")
        forward = ticks(computation(self.plain, work.device, work.profile.dtype).forward_seconds)
        weight = ticks(seconds.backward_weight_seconds)
        backward = ticks(seconds.backward_input_seconds) + weight
        recompute = ticks(seconds.recompute_seconds)
        replayed_exchange = forward_exchange if row.recompute == "full" else 0
        count = self.local_parameters()
        parameters = count.elements
        return LayerCost(
            mode=row.recompute,
            forward_compute_ticks=forward,
            backward_compute_ticks=backward,
            backward_weight_ticks=weight,
            recompute_ticks=recompute,
            communication_ticks=forward_exchange + backward_exchange + replayed_exchange,
            forward_ticks=forward + forward_exchange,
            backward_ticks=backward + recompute + backward_exchange + replayed_exchange,
            optimizer_ticks=self._optimizer_ticks(count),
            reduction_ticks=self._reduction_ticks(parameters),
            parameters=parameters,
            parameters_bytes=self._sharded(parameters * work.recipe.parameter_bytes, zero >= 3),
            gradients_bytes=self._sharded(parameters * work.recipe.gradient_bytes, zero >= 2),
            optimizer_bytes=self._sharded(work.recipe.optimizer_bytes(count), zero >= 1),
            activation_bytes=self._allocated(row.activation_bytes),
            output_bytes=self.plain.output_bytes,
            temporary_bytes=self._allocated(row.temporary_bytes),
            model_flops=self.plain.forward_flops + self.plain.backward_input_flops + self.plain.backward_weight_flops,
        )

    def local_parameters(self) -> ParameterCount:
        """On one rank of the tensor-parallel group."""
        row = self.plain
        elements = row.local_parameters
        if elements is None:
            elements = -(-self.layer_parameters // row.tensor_parallel_degree)
        return ParameterCount(elements, row.local_matrix_elements, row.local_factored_elements)

    def _allocated(self, size_bytes: int) -> int:
        """Bytes with what the allocator loses to rounding and fragmentation, rounded up."""
        return math.ceil(size_bytes * (1 + self.work.device.allocation_overhead))

    def _sharded(self, size_bytes: int, is_sharded: bool) -> int:
        return -(-size_bytes // self.layout.data_parallel_degree) if is_sharded else size_bytes

    def _exchange_ticks(self, row: Measurement, phase: str) -> int:
        work = self.work
        return ticks(
            sum(
                one.count
                * collective_seconds(one.operation, one.bytes, self.tensor_group, work.intra_node, work.inter_node)
                for one in row.collectives
                if one.phase == phase
            )
        )

    def _optimizer_ticks(self, count: ParameterCount) -> int:
        shards = self.layout.data_parallel_degree if self.layout.zero_stage else 1
        return ticks((self._moving_seconds(count) + self._muon_seconds()) / shards)

    def _moving_seconds(self, count: ParameterCount) -> float:
        """Of the optimizer's states, gradients and parameters."""
        moved = moved_bytes(self.work.recipe, count)
        if self.plain.optimizer_seconds is not None:
            adamw = moved_bytes(recipe(self.work.job.precision, "adamw"), count)
            return self.plain.optimizer_seconds * (moved / adamw if adamw else 1.0)
        bandwidth = self.work.device.memory_bandwidth_bytes_per_second
        return 0.0 if bandwidth is None else moved / (bandwidth * DEFAULT.memory_fraction)

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
        work, ogp = self.work, self.work.recipe
        if self.layout.zero_stage == 0:
            return ticks(_bandwidth_seconds(work, "all_reduce", parameters * ogp.gradient_bytes, self.data_group))
        gathers = 2 if self.layout.zero_stage == 3 else 1
        scatter = _bandwidth_seconds(work, "reduce_scatter", parameters * ogp.gradient_bytes, self.data_group)
        gather = _bandwidth_seconds(work, "all_gather", parameters * ogp.parameter_bytes, self.data_group)
        return ticks(scatter + gathers * gather)


def _bandwidth_seconds(work: Workload, operation: CollectiveName, size_bytes: int, group: Group) -> float:
    """A collective without its latency, which a stage pays once and not once per layer."""
    intra, inter = (_without_latency(link) for link in (work.intra_node, work.inter_node or work.intra_node))
    return collective_seconds(operation, size_bytes, group, intra, inter)


def _without_latency(link: Link) -> Link:
    return link.model_copy(update={"latency_seconds": 0.0})


def _reduction_latency_ticks(work: Workload, group: Group) -> int:
    return ticks(collective_seconds("all_reduce", 1, group, work.intra_node, work.inter_node))


def _shared_costs(
    work: Workload, layout: Layout, layers: Sequence[dict[RecomputeMode, LayerCost]]
) -> tuple[SharedCost, ...]:
    order = {layer.name: index for index, layer in enumerate(work.profile.layers)}
    ogp, data = work.recipe, layout.data_parallel_degree
    between = work.inter_node if layout.devices > work.devices_per_node and work.inter_node else work.intra_node
    shards = [data if layout.zero_stage >= level else 1 for level in (3, 2, 1)]
    costs = []
    for one in work.profile.shared_parameters:
        users = tuple(sorted({order[name] for name in one.layers}))
        user = next(iter(layers[users[-1]].values()))
        local = min(-(-one.parameters // layout.tensor_parallel_degree), user.parameters)
        count = ParameterCount(local, 0, one.factored_elements)  # what layers share is no matrix of a hidden layer
        size_bytes = local * ogp.gradient_bytes
        exchange = 2 * transfer_seconds(size_bytes / 2, between) if layout.pipeline_parallel_degree > 1 else 0.0
        costs.append(
            SharedCost(
                layers=users,
                parameters_bytes=local * ogp.parameter_bytes // shards[0],
                gradients_bytes=local * ogp.gradient_bytes // shards[1],
                optimizer_bytes=ogp.optimizer_bytes(count) // shards[2],
                tail_ticks=(user.reduction_ticks + user.optimizer_ticks) * local // max(1, user.parameters),
                exchange_ticks=ticks(exchange),
            )
        )
    return tuple(costs)


def _skip_costs(work: Workload, layout: Layout) -> tuple[SkipCost, ...]:
    order = {layer.name: index for index, layer in enumerate(work.profile.layers)}
    return tuple(
        SkipCost(order[edge.from_], order[edge.to], edge.bytes * layout.micro_batch_size) for edge in work.profile.edges
    )
