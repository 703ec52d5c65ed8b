"""Nanoseconds and bytes of every layer on one rank, from the rows of the profile.

Durations are rounded to whole nanoseconds once per layer and part, as in the plan.

    (T1)  forward = kernels + collectives (+ the copy of its activations)
    (T2)  backward = input gradient + weight gradient + collectives + recomputation, with
          the forward's collectives again if it is full (+ the copy back)
    (T3)  optimizer: states and parameters read and written, gradients read, over the
          memory bandwidth; or measured for AdamW, and scaled by the bytes moved; plus
          Muon's products; ZeRO divides it as it divides the states
    (T4)  reduction: all-reduce of gradients; ZeRO 1 scatters gradients and gathers
          parameters, ZeRO 2 gathers, ZeRO 3 does neither; latency once per stage
    (T5)  transfer to the next stage: output of the last layer, and all skips over it
    (T6)  per micro-batch ZeRO 2 and 3 scatter gradients, and ZeRO 3 gathers parameters
          for the forward, and again for the backward of layers that have one
    (T7)  hybrid sharding: a rank's shard of the sum goes over the copies of it
    (T8)  frozen parameters have no gradients, states, reduction or update
    (X1)  collectives that run beside compute cost what `overlap_fraction` of that
          compute does not hide
    (M1)  bytes of parameters, gradients and states, divided by ZeRO 3, 2 and 1
    (M5)  activations and temporaries grow by the allocator's overhead
    (Q1)  sequence chunks: attention's part of a duration is its part of the FLOPs, 2.5
          times as much in the backward
    (Q4)  collectives of a sequence in chunks run once per chunk
    (O1)  offloaded activations are copied once in the forward and once in the backward
    (O5)  offloaded states are copied to the device and back for the update
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import get_args

from planner.check.collectives import collective_seconds, message_seconds
from planner.check.context import Context
from planner.check.derived import with_seconds
from planner.check.fp8 import in_fp8
from planner.check.kernels import ATTENTION, LayerSeconds, Machine, chunked_seconds
from planner.check.sites import Column, Site, Sites
from planner.errors import UnsupportedError
from planner.spec.cluster import Link
from planner.spec.devices import HOST_ACHIEVABLE_FRACTION
from planner.spec.fp8 import DYNAMIC
from planner.spec.profile import (
    BYTES_PER_ELEMENT,
    LayerProfile,
    Measurement,
    ModelProfile,
    RecomputeMode,
    SharedParameters,
)
from planner.spec.recipes import OgpRecipe, ParameterCount, recipe

NANOSECOND = 1e-9
Rows = dict[RecomputeMode, Measurement]


def nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds, to nearest."""
    return round(seconds / NANOSECOND)


def share(whole: int, parts: int) -> int:
    """Return the part of the fullest rank: rounded up."""
    return -(-whole // parts)


def plain_row(rows: Mapping[RecomputeMode, Measurement]) -> Measurement:
    """Return the row that recomputes least."""
    return next(rows[mode] for mode in get_args(RecomputeMode) if mode in rows)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of parameters, gradients and optimizer states."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """One layer in one recompute mode, on one rank; nanoseconds and bytes."""

    plain: Measurement
    forward: int
    backward_input: int
    backward_weight: int
    recompute: int
    exchanged_forward: int
    exchanged_backward: int
    """Includes those of the recomputation."""
    gathered_forward: int
    gathered_backward: int
    copied: int
    """To the host, and again back."""
    reduction: int
    """Once per step, as the update."""
    update: int
    state: StateBytes
    whole_bytes: int
    """Parameters and gradients that ZeRO gathers or scatters, while the layer runs."""
    saved_bytes: int
    temporary_bytes: int
    attention_forward: int
    """Of the forward, and of input gradient and recomputation: equation (Q1)."""
    attention_backward: int
    attention_bytes: int

    @property
    def whole_forward(self) -> int:
        """Equation (T1)."""
        computed = self.forward + self.copied
        return computed + self.exchanged_forward + self.gathered_forward

    @property
    def whole_backward_input(self) -> int:
        """Equation (T2), without the weight gradient."""
        computed = self.backward_input + self.recompute + self.copied
        return computed + self.exchanged_backward + self.gathered_backward


@dataclass(frozen=True, slots=True)
class SharedPrice:
    """One copy of parameters that several layers use."""

    users: tuple[int, ...]
    reduction: int
    update: int
    exchange: int
    """All-reduce of its gradients over two stages."""
    state: StateBytes

    def copies(self, layers: list[int]) -> int:
        """Return how many of these layers use the parameters."""
        return sum(layer in self.users for layer in layers)


@dataclass(frozen=True, slots=True)
class Elements:
    """Parameters of a layer on one rank: equation (T8)."""

    count: ParameterCount
    """Of those that are trained."""
    frozen: int
    experts: int
    """Those that the expert-parallel group splits, trained or not."""
    trained_experts: int

    @classmethod
    def of(cls, layer: LayerProfile, row: Measurement) -> Elements:
        """Return the parameters of a layer, as its row counts them."""
        degree = row.tensor_parallel_degree
        elements, frozen = row.local_parameters, row.local_frozen_parameters
        if elements is None:
            elements = share(layer.parameters, degree)
        if frozen is None:
            frozen = share(layer.frozen_parameters, degree)
        experts = row.local_expert_parameters
        trained_experts = experts - row.local_frozen_expert_parameters
        trained = max(elements - frozen, trained_experts)
        count = ParameterCount(
            trained, row.local_matrix_elements, row.local_factored_elements
        )
        return cls(count, elements - trained, experts, trained_experts)

    @property
    def trained(self) -> int:
        """Those that have gradients."""
        return self.count.elements

    @property
    def all(self) -> int:
        """Trained and frozen."""
        return self.trained + self.frozen


@dataclass(frozen=True)
class Prices:
    """Prices of every layer of a model under one layout, at one site."""

    context: Context
    site: Site

    @cached_property
    def profile(self) -> ModelProfile:
        """The profile, with the seconds of the site's device."""
        return self.context.profile.on(self.site.group.device.id)

    @cached_property
    def layers(self) -> list[dict[RecomputeMode, LayerPrice]]:
        """By layer in the model's order, and recompute mode."""
        known: dict[object, dict[RecomputeMode, LayerPrice]] = {}
        profiled = self.profile.layers
        found = []
        for layer in profiled:
            rows = self._rows(layer, is_last=layer is profiled[-1])
            row = tuple(rows.values())
            key = (row, layer.parameters, layer.frozen_parameters)
            if key not in known:
                known[key] = {mode: self._price(layer, rows, mode) for mode in rows}
            found.append(known[key])
        return found

    @cached_property
    def shared(self) -> list[SharedPrice]:
        """Parameters that several layers use."""
        return [self._shared(one) for one in self.context.profile.shared_parameters]

    @cached_property
    def reduction_latency(self) -> int:
        """Fixed part of a stage's gradient reduction: inside, then over the copies."""
        groups = ("shard", "copies") if self._zero else ("data",)
        return nanoseconds(sum(self._seconds("all_reduce", 1, name) for name in groups))

    @cached_property
    def boundary_bytes(self) -> list[int]:
        """By layer: what crosses a stage boundary after it, per micro-batch: (T5)."""
        context = self.context
        names = [layer.name for layer in context.profile.layers]
        sizes = [
            plain_row(context.rows(one)).output_bytes for one in context.profile.layers
        ]
        for edge in context.profile.edges:
            per_sample = edge.bytes
            if edge.sequence_length:
                tokens = per_sample * context.job.sequence_length
                per_sample = share(tokens, edge.sequence_length)
            for layer in range(names.index(edge.from_), names.index(edge.to)):
                sizes[layer] += per_sample * context.layout.micro_batch_size
        return sizes

    def transfer(self, link: Link, last_layer: int) -> int:
        """Return the nanoseconds of a transfer after this layer: equation (T5)."""
        chunks = self.context.layout.sequence_chunks
        size_bytes = share(self.boundary_bytes[last_layer], chunks)
        return nanoseconds(message_seconds(size_bytes, link))

    @property
    def _zero(self) -> int:
        return self.context.layout.zero_stage

    @property
    def _recipe(self) -> OgpRecipe:
        return recipe(self.context.job.precision, self.context.job.optimizer)

    @property
    def _parameter_bytes(self) -> int:
        """Bytes of a parameter that is gathered: as the products take it."""
        dtype = self.context.profile.dtype
        return min(self._recipe.parameter_bytes, BYTES_PER_ELEMENT[dtype])

    @cached_property
    def _machine(self) -> Machine:
        group = self.site.group
        casts = DYNAMIC if self.context.job.precision == "fp8" else None
        dtype = self.context.profile.dtype
        return Machine(group.device, dtype, group.constants, casts)

    def _rows(self, layer: LayerProfile, *, is_last: bool) -> Rows:
        """Return a layer's rows, with what runs in fp8 and with derived seconds."""
        machine = self._machine

        def mark(row: Measurement) -> Measurement:
            if machine.casts is None:
                return row
            return in_fp8(row, machine.dtype, machine.casts, is_last=is_last)

        rows = {mode: mark(row) for mode, row in self.context.rows(layer).items()}
        polynomials = self.context.polynomials(layer)
        is_listed = any(
            row.split == self.context.split
            and row.micro_batch_size == self.context.layout.micro_batch_size
            and row.sequence_length == self.context.job.sequence_length
            for row in layer.measurements
        )
        if is_listed or polynomials is None:
            return rows
        return {
            mode: with_seconds(layer, polynomials, row, machine, mark)
            for mode, row in rows.items()
        }

    def _price(
        self, layer: LayerProfile, rows: Rows, mode: RecomputeMode
    ) -> LayerPrice:
        """Return a price: what recomputation does not change is the plain row's."""
        row, plain = rows[mode], plain_row(rows)
        layout = self.context.layout
        chunks = layout.sequence_chunks
        gradient_bytes = self._recipe.gradient_bytes
        seconds = chunked_seconds(row, self._machine, chunks, gradient_bytes)
        in_plain = chunked_seconds(plain, self._machine, chunks, gradient_bytes)
        forward = nanoseconds(in_plain.forward)
        of_input = nanoseconds(seconds.backward_input)
        again = nanoseconds(seconds.recompute)
        exchanged = self._exchange(plain, "forward", in_plain)
        exchanged_backward = self._exchange(row, "backward", seconds)
        if mode == "full":
            exchanged_backward += exchanged
        elements = Elements.of(layer, plain)
        gathered, scattered = self._gathers(elements)
        has_backward = {one.gradients for one in plain.operations} != {"none"}
        state = self._state(elements)
        saved = self._allocated(row.activation_bytes)
        update = self._update(plain, elements)
        if layout.optimizer_offload:
            update += self._copy(2 * state.optimizer)
        attention = [one for one in plain.operations if one.kind in ATTENTION]
        part = Fraction(
            sum(one.count * one.flops for one in attention), max(1, _flops(plain))
        )
        in_backward = math.floor(of_input * 5 * part / (2 * (1 - part) + 5 * part))
        if mode == "full":
            in_backward += math.floor(again * part)
        return LayerPrice(
            plain=plain,
            forward=forward,
            backward_input=of_input,
            backward_weight=nanoseconds(seconds.backward_weight),
            recompute=again,
            exchanged_forward=exchanged,
            exchanged_backward=exchanged_backward,
            gathered_forward=gathered,
            gathered_backward=scattered + (gathered if has_backward else 0),
            copied=self._copy(saved) if layout.activation_offload else 0,
            reduction=self._reduction(elements),
            update=update,
            state=state,
            whole_bytes=self._whole_bytes(elements),
            saved_bytes=saved,
            temporary_bytes=self._allocated(row.temporary_bytes),
            attention_forward=math.floor(forward * part),
            attention_backward=in_backward,
            attention_bytes=sum(one.count * one.bytes for one in attention),
        )

    def _allocated(self, size_bytes: int) -> int:
        """Return the bytes that the allocator takes: equation (M5)."""
        overhead = 1 + self.site.group.device.allocation_overhead
        factor = self.site.group.constants.allocated_factor
        return math.ceil(size_bytes * overhead * factor)

    def _copy(self, size_bytes: int) -> int:
        """Return the nanoseconds of a copy to the host: equations (O1) and (O5).

        Raises:
            UnsupportedError: the bandwidth is unknown.
        """
        device = self.site.group.device
        bandwidth = device.host_bandwidth_bytes_per_second
        if bandwidth is None:
            raise UnsupportedError(
                f"copies between {device.id} and its host cannot be timed.",
                field="device.host_bandwidth_bytes_per_second",
                hint="give it, or offload nothing.",
            )
        return nanoseconds(size_bytes / (bandwidth * HOST_ACHIEVABLE_FRACTION))

    def _ranks(self, group: str) -> int:
        return self.site.communicators[group].spread.ranks

    def _seconds(
        self, operation: str, size_bytes: float, group: str, *, latency: bool = True
    ) -> float:
        communicator = self.site.communicators[group]
        constants = self.site.group.constants
        return collective_seconds(
            operation, size_bytes, communicator, constants, latency=latency
        )

    def _fixed(self, operation: str, size_bytes: float, group: str) -> float:
        """Return the seconds of a collective with the runtime's time for each."""
        fixed = self.site.group.constants.collective_seconds
        seconds = self._seconds(operation, size_bytes, group)
        return seconds + fixed if self._ranks(group) > 1 else 0.0

    def _exchange(self, row: Measurement, phase: str, seconds: LayerSeconds) -> int:
        """Return the exposed collectives of a phase: equations (X1) and (Q4)."""
        chunks = self.context.layout.sequence_chunks
        beside: dict[str | None, float] = dict.fromkeys((None, "weight", "input"), 0.0)
        if phase == "forward":
            beside |= {"attention": seconds.attention, "compute": seconds.forward}
        else:
            of_input, of_weight = seconds.backward_input, seconds.backward_weight
            beside |= {"weight": of_weight, "input": of_input, "attention": of_input}
            beside["compute"] = of_input + of_weight
        fraction = self.site.group.constants.overlap_fraction
        exposed = 0.0
        for name, compute in beside.items():
            exchanged = 0.0
            for one in row.collectives:
                if one.phase == phase and one.beside == name:
                    part = self._fixed(one.operation, one.bytes / chunks, one.group)
                    exchanged += one.count * chunks * part
            exposed += max(0.0, exchanged - fraction * compute)
        return nanoseconds(exposed)

    def _parts(self, elements: int, experts: int) -> list[tuple[int, str]]:
        """Return elements by the group that shards them, or sums their gradients.

        Experts have a group of their own: the ranks that have the same ones.
        """
        names = ("shard", "expert_shard") if self._zero else ("data", "expert_data")
        both = zip((elements - experts, experts), names, strict=True)
        return [(count, group) for count, group in both if count]

    def _reduction(self, elements: Elements) -> int:
        """Return the gradient reduction of a step: equations (T4) and (T7)."""
        gradient_bytes = self._recipe.gradient_bytes
        seconds = 0.0
        for count, group in self._parts(elements.trained, elements.trained_experts):
            sizes = [("all_reduce", count * gradient_bytes, group)]
            if self._zero:
                mine = share(count, self._ranks(group)) * gradient_bytes
                sizes = [("all_reduce", mine, "copies")]
            if self._zero == 1:
                sizes.append(("reduce_scatter", count * gradient_bytes, group))
            if self._zero in (1, 2):
                sizes.append(("all_gather", count * self._parameter_bytes, group))
            for operation, size_bytes, members in sizes:
                seconds += self._seconds(operation, size_bytes, members, latency=False)
        return nanoseconds(seconds)

    def _gathers(self, elements: Elements) -> tuple[int, int]:
        """Return the gather of parameters and the scatter of gradients: (T6)."""
        gather = scatter = 0.0
        if self._zero == 3:
            for count, group in self._parts(elements.all, elements.experts):
                size = count * self._parameter_bytes
                gather += self._fixed("all_gather", size, group)
        if self._zero >= 2:
            for count, group in self._parts(elements.trained, elements.trained_experts):
                size = count * self._recipe.gradient_bytes
                scatter += self._fixed("reduce_scatter", size, group)
        return nanoseconds(gather), nanoseconds(scatter)

    def _update(self, row: Measurement, elements: Elements) -> int:
        """Return the optimizer step: equation (T3)."""
        job, count = self.context.job, elements.count
        moved = _moved_bytes(self._recipe, count)
        group = self.site.group
        if row.adam_8bit_seconds is not None and job.optimizer == "adam-8bit":
            seconds = row.adam_8bit_seconds
        elif row.optimizer_seconds is not None:
            of_adamw = _moved_bytes(recipe(job.precision, "adamw"), count)
            seconds = row.optimizer_seconds * (moved / of_adamw if of_adamw else 1.0)
        else:
            bandwidth = group.device.memory_bandwidth_bytes_per_second or math.inf
            bandwidth *= group.constants.memory_fraction
            seconds = moved * group.constants.optimizer_passes / bandwidth
        if job.optimizer == "muon":
            seconds += self._muon_seconds(row)
        if not self._zero:
            return nanoseconds(seconds)
        if not elements.trained_experts:
            return nanoseconds(seconds / self._ranks("shard"))
        parts = self._parts(elements.trained, elements.trained_experts)
        shards = [part / elements.trained / self._ranks(name) for part, name in parts]
        return nanoseconds(sum(seconds * one for one in shards))

    def _muon_seconds(self, row: Measurement) -> float:
        """Return the seconds of Muon's products, in bf16; without a peak as measured."""
        flops = row.local_muon_flops or 0
        device = self.site.group.device
        peaks = device.peak_flops_per_second
        peak = peaks.get("bf16", peaks.get(self.context.profile.dtype))
        if peak is not None:
            return flops / (peak * device.achievable_fraction)
        return flops * (row.forward_seconds or 0.0) / max(1, row.forward_flops)

    def _whole_bytes(self, elements: Elements) -> int:
        parameters = elements.all * self._parameter_bytes if self._zero == 3 else 0
        gradients = elements.trained * self._recipe.gradient_bytes
        return parameters + (gradients if self._zero >= 2 else 0)

    def _state(self, elements: Elements) -> StateBytes:
        """Return parameters, gradients and states: equations (M1) and (T8)."""
        ogp, count = self._recipe, elements.count
        every = (elements.all, elements.experts)
        trained = (elements.trained, elements.trained_experts)
        return StateBytes(
            self._sharded(3, every[0] * ogp.parameter_bytes, *every),
            self._sharded(2, trained[0] * ogp.gradient_bytes, *trained),
            self._sharded(1, ogp.optimizer_bytes(count), *trained),
        )

    def _sharded(self, stage: int, size_bytes: int, elements: int, experts: int) -> int:
        """Return the bytes of the fullest rank, sharded from a ZeRO stage on."""
        if self._zero < stage:
            return size_bytes
        of_experts = size_bytes * experts // max(1, elements)
        others = share(size_bytes - of_experts, self._ranks("shard"))
        return others + share(of_experts, self._ranks("expert_shard"))

    def _shared(self, shared: SharedParameters) -> SharedPrice:
        """Return the price of a copy: the last user's share of reduction and update.

        The copy is split over tensor-parallel ranks if that of any user is.
        """
        profiled, ogp = self.profile.layers, self._recipe
        names = [layer.name for layer in profiled]
        users = sorted({names.index(name) for name in shared.layers})
        prices = [next(iter(self.layers[user].values())) for user in users]
        held = [
            Elements.of(profiled[user], price.plain)
            for user, price in zip(users, prices, strict=True)
        ]
        last, elements = prices[-1], shared.parameters
        if min(one.all for one in held) < elements:
            elements = share(elements, self.context.layout.tensor_parallel_degree)
        elements = min(elements, held[-1].all)
        trained = 0 if shared.frozen else elements
        whole = max(1, held[-1].trained)
        reduction = last.reduction * trained // whole
        both = (last.reduction + last.update) * trained // whole
        half = trained * ogp.gradient_bytes / 2
        exchange = 2 * message_seconds(half, self.site.shared_link)
        count = ParameterCount(trained, 0, shared.factored_elements)
        shards = [
            self._ranks("shard") if self._zero >= stage else 1 for stage in (3, 2, 1)
        ]
        is_pipeline = self.context.layout.pipeline_parallel_degree > 1
        return SharedPrice(
            users=tuple(users),
            reduction=reduction,
            update=both - reduction,
            exchange=nanoseconds(exchange) if is_pipeline else 0,
            state=StateBytes(
                elements * ogp.parameter_bytes // shards[0],
                trained * ogp.gradient_bytes // shards[1],
                ogp.optimizer_bytes(count) // shards[2],
            ),
        )


def _moved_bytes(ogp: OgpRecipe, count: ParameterCount) -> int:
    """Return the bytes that an optimizer step reads and writes: equation (T3)."""
    per_element = ogp.gradient_bytes + 2 * ogp.parameter_bytes
    return 2 * ogp.optimizer_bytes(count) + count.elements * per_element


def _flops(row: Measurement) -> int:
    """Return the FLOPs of a forward: of its kernels, or as stated if that is more."""
    of_kernels = sum(one.count * one.flops for one in row.operations)
    return max(of_kernels, row.forward_flops)


@dataclass(frozen=True)
class Pricing:
    """Prices of all cells of a placement; cells at equal sites share them."""

    context: Context
    known: dict[object, Prices] = field(default_factory=dict)

    @cached_property
    def sites(self) -> Sites:
        """Where the cells are."""
        return Sites(self.context)

    def prices(self, column: Column, rank: int) -> Prices:
        """Return the prices of a column at a pipeline rank."""
        place = (0, 0) if self.sites.is_uniform else (column.data_ranks[0], rank)
        if place not in self.known:
            site = self.sites.site(column, rank)
            key = (site.group.first_node, site.shared_link, *site.communicators.items())
            equal = self.known.setdefault(key, Prices(self.context, site))
            self.known[place] = equal
        return self.known[place]
