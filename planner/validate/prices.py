"""Nanoseconds and bytes of one layer on one rank, from its measurement: equations (T1) to (T8), (M1) and (M5).

Durations are whole nanoseconds, rounded once per layer and part, because the plan's are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, get_args

from planner.spec.cluster import Link
from planner.spec.profile import (
    LayerProfile,
    Measurement,
    RecomputeMode,
    SharedParameters,
    SkipEdge,
)
from planner.spec.recipes import OgpRecipe, ParameterCount, recipe
from planner.validate.communicators import Site
from planner.validate.facts import Facts
from planner.validate.formulas import (
    FUSED_ATTENTION,
    Machine,
    chunked_seconds,
    collective_seconds,
    send_seconds,
)
from planner.validate.fp8 import low_precision_row
from planner.validate.offload import copied_seconds

NANOSECOND = 1e-9


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, to nearest."""
    return round(seconds / NANOSECOND)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Parameters, gradients and optimizer states."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """One layer, one micro-batch, one rank; times in nanoseconds."""

    row: Measurement
    plain: Measurement
    """The row of the same layer that recomputes least."""
    forward: int
    backward_input: int
    backward_weight: int
    recompute: int
    exchanged_forward: int
    exchanged_backward: int
    exchanged_again: int
    """The forward's collectives, when the recomputation runs them again."""
    reduction: int
    """Of the gradients over the data-parallel group, once per step, latency apart."""
    update: int
    """The optimizer, once per step, with the copies of its states."""
    gathered_forward: int
    """ZeRO 3: the parameters, for every micro-batch."""
    gathered_backward: int
    """ZeRO 3: the parameters again; ZeRO 2 and 3: the gradients scattered."""
    gathered_bytes: int
    """ZeRO 3: the parameters, whole; ZeRO 2 and 3: and the gradients."""
    state: StateBytes
    saved_bytes: int
    """Activations as they stand on the device."""
    copied: int
    """Of them, to the host or back, where they are offloaded: equation (O1)."""

    @property
    def whole_forward(self) -> int:
        """Equation (T1)."""
        return (
            self.forward + self.exchanged_forward + self.gathered_forward + self.copied
        )

    @property
    def whole_backward_input(self) -> int:
        """Equation (T2) without the weight gradient."""
        computed = self.backward_input + self.recompute + self.copied
        return (
            computed
            + self.exchanged_backward
            + self.exchanged_again
            + self.gathered_backward
        )

    @property
    def attention_flops(self) -> int:
        """Of the forward."""
        return sum(
            each.count * each.flops
            for each in self.plain.operations
            if each.kind in FUSED_ATTENTION
        )

    @property
    def kernel_flops(self) -> int:
        """Of the forward: the rank that works longest may do more than its share of the model's FLOPs."""
        every = sum(each.count * each.flops for each in self.plain.operations)
        return max(every, self.plain.forward_flops)

    @property
    def attention_bytes(self) -> int:
        """Read and written by the forward's attention."""
        return sum(
            each.count * each.bytes
            for each in self.plain.operations
            if each.kind in FUSED_ATTENTION
        )

    @property
    def attention_forward(self) -> int:
        """Of `forward`: equation (Q1)."""
        return self.forward * self.attention_flops // max(1, self.kernel_flops)

    @property
    def attention_backward(self) -> int:
        """Of `backward_input` and `recompute`: equation (Q1)."""
        attention, whole = self.attention_flops, max(1, self.kernel_flops)
        again = (
            self.recompute * attention // whole if self.row.recompute == "full" else 0
        )
        weighed = 2 * (whole - attention) + 5 * attention
        return again + self.backward_input * 5 * attention // weighed

    @property
    def gathered(self) -> int:
        """What ZeRO 2 and 3 exchange for a micro-batch."""
        return self.gathered_forward + self.gathered_backward

    @property
    def exchanged(self) -> int:
        """All tensor-, context- and expert-parallel collectives."""
        return self.exchanged_forward + self.exchanged_backward + self.exchanged_again


@dataclass(frozen=True, slots=True)
class SharedPrice:
    """One copy of parameters that several layers use."""

    users: tuple[int, ...]
    reduction: int
    reduction_and_update: int
    exchange: int
    """All-reduce of its gradients over two stages."""
    state: StateBytes


@dataclass(frozen=True)
class Prices:
    """Prices of every layer of a model under one layout, on the ranks of one cell."""

    facts: Facts
    site: Site

    @cached_property
    def layers(self) -> tuple[dict[RecomputeMode, LayerPrice], ...]:
        """By layer, in the model's order, and recompute mode; identical layers share one dict."""
        known: dict[tuple[int, int, int, bool], dict[RecomputeMode, LayerPrice]] = {}
        prices = []
        profile = self.facts.profile.on(self.site.group.device.id)
        for place, layer in enumerate(profile.layers, 1):
            is_output = place == len(profile.layers)
            key = (
                id(layer.measurements),
                layer.parameters,
                layer.frozen_parameters,
                is_output,
            )
            if key not in known:
                rows = self._rows(layer, is_output=is_output)
                known[key] = {
                    mode: self._price(layer, row, plain_row(rows))
                    for mode, row in rows.items()
                }
            prices.append(known[key])
        return tuple(prices)

    def _rows(
        self, layer: LayerProfile, *, is_output: bool
    ) -> dict[RecomputeMode, Measurement]:
        """Of the layer under this layout, told what runs in fp8."""
        rows, casts = self.facts.rows(layer), self.facts.casts
        if casts is None:
            return rows
        dtype = self.facts.profile.dtype
        return {
            mode: low_precision_row(row, dtype, casts, is_output=is_output)
            for mode, row in rows.items()
        }

    @cached_property
    def shared(self) -> tuple[SharedPrice, ...]:
        """Shared parameters of the model."""
        return tuple(map(self._shared, self.facts.profile.shared_parameters))

    @cached_property
    def reduction_latency(self) -> int:
        """Fixed cost of a stage's gradient all-reduce; with ZeRO inside the groups, then over their copies."""
        groups = ("shard", "copies") if self.facts.layout.zero_stage else ("data",)
        return nanoseconds(
            sum(self._collective("all_reduce", 1, group) for group in groups)
        )

    @cached_property
    def boundary_bytes(self) -> tuple[int, ...]:
        """By layer: what crosses a stage boundary behind it, per micro-batch; its output and all skips over it."""
        facts = self.facts
        order = {layer.name: index for index, layer in enumerate(facts.profile.layers)}
        sizes = []
        for index, layer in enumerate(facts.profile.layers):
            over = [
                edge
                for edge in facts.profile.edges
                if order[edge.from_] <= index < order[edge.to]
            ]
            samples = facts.layout.micro_batch_size
            output = plain_row(facts.rows(layer)).output_bytes
            skipping = sum(_at_length(edge, facts.job.sequence_length) for edge in over)
            sizes.append(output + samples * skipping)
        return tuple(sizes)

    @cached_property
    def _ogp(self) -> OgpRecipe:
        return recipe(self.facts.job.precision, self.facts.job.optimizer)

    def transfer(self, link: Link, last_layer: int) -> int:
        """Nanoseconds to the next stage, over this link, when this layer is the last: equation (T5)."""
        size_bytes = _share(
            self.boundary_bytes[last_layer], self.facts.layout.sequence_chunks
        )
        return nanoseconds(send_seconds(size_bytes, link))

    def _price(
        self, layer: LayerProfile, row: Measurement, plain: Measurement
    ) -> LayerPrice:
        """Backward, recomputation, activations and temporaries are the mode's; all else is the plain row's."""
        group, facts = self.site.group, self.facts
        machine = Machine(
            group.device, facts.profile.dtype, group.constants, facts.casts
        )
        chunks = self.facts.layout.sequence_chunks
        seconds = chunked_seconds(row, machine, chunks)
        exchanged_forward = self._exchange(plain, "forward")
        held = held_parameters(layer, plain)
        gather, scatter = self._gathers(held)
        state, saved_bytes = self._state(held), self.allocated(row.activation_bytes)
        return LayerPrice(
            row=row,
            plain=plain,
            forward=nanoseconds(chunked_seconds(plain, machine, chunks).forward),
            backward_input=nanoseconds(seconds.backward_input),
            backward_weight=nanoseconds(seconds.backward_weight),
            recompute=nanoseconds(seconds.recompute),
            exchanged_forward=exchanged_forward,
            exchanged_backward=self._exchange(row, "backward"),
            exchanged_again=exchanged_forward if row.recompute == "full" else 0,
            reduction=self._reduction(held),
            update=self._update(plain, held)
            + self._copied(2 * state.optimizer, "optimizer_offload"),
            gathered_forward=gather,
            gathered_backward=scatter + (gather if _goes_back(plain) else 0),
            gathered_bytes=self._whole_bytes(held),
            state=state,
            saved_bytes=saved_bytes,
            copied=self._copied(saved_bytes, "activation_offload"),
        )

    def allocated(self, size_bytes: int) -> int:
        """What the device's allocator makes of a layer's activations or temporaries: equation (M5)."""
        group = self.site.group
        return math.ceil(
            size_bytes
            * (1 + group.device.allocation_overhead)
            * group.constants.allocated_factor
        )

    def _copied(
        self, size_bytes: int, wish: Literal["activation_offload", "optimizer_offload"]
    ) -> int:
        """Nanoseconds of copying, where the layout wishes it: equations (O1) and (O5)."""
        return (
            nanoseconds(copied_seconds(size_bytes, self.site.group))
            if getattr(self.facts.layout, wish)
            else 0
        )

    def _collective(
        self, operation: str, size_bytes: float, group: str, *, latency: bool = True
    ) -> float:
        """Seconds of a collective in one of the layout's groups."""
        spread, links = self.site.communicators[group]
        fitted = self.site.group.constants
        return collective_seconds(
            operation,
            size_bytes,
            spread,
            *links,
            latency=latency,
            copies=fitted.ring_copies,
            rails=fitted.rail_fraction,
        )

    def _ranks(self, group: str) -> int:
        """Members of one of the layout's groups."""
        return self.site.communicators[group].spread.ranks

    def _fixed(self, group: str) -> float:
        """Seconds of any collective of a group besides its links' latency."""
        return (
            self.site.group.constants.collective_seconds
            if self._ranks(group) > 1
            else 0.0
        )

    def _exchange(self, row: Measurement, phase: str) -> int:
        """All chunks of a sequence, one after the other: equation (Q4)."""
        mine, chunks = (
            [one for one in row.collectives if one.phase == phase],
            self.facts.layout.sequence_chunks,
        )
        return nanoseconds(
            sum(
                one.count
                * chunks
                * (
                    self._collective(one.operation, one.bytes / chunks, one.group)
                    + self._fixed(one.group)
                )
                for one in mine
            )
        )

    def _reduction(self, held: HeldParameters) -> int:
        """Equation (T4): all-reduce; ZeRO 1 scatters and gathers, ZeRO 2 gathers; experts among their own. Equation
        (T7): a rank's part of the sum, rounded up, goes over the copies of it."""
        ogp = self._ogp
        scatter, gather = (
            {"reduce_scatter": ogp.gradient_bytes},
            {"all_gather": ogp.parameter_bytes},
        )
        operations = ({"all_reduce": ogp.gradient_bytes}, scatter | gather, gather, {})[
            self.facts.layout.zero_stage
        ]
        seconds = []
        for elements, group in self._parts(held):
            sizes = [
                (operation, elements * each, group)
                for operation, each in operations.items()
            ]
            if self.facts.layout.zero_stage:
                mine = _share(elements, self._ranks(group))
                sizes.append(("all_reduce", mine * ogp.gradient_bytes, "copies"))
            seconds.append(sum(self._collective(*one, latency=False) for one in sizes))
        return nanoseconds(sum(seconds))

    def _gathers(self, held: HeldParameters) -> tuple[int, int]:
        """(all-gather of the parameters, reduce-scatter of the gradients) of every micro-batch: equation (T6). ZeRO 2
        keeps no gradient whole, ZeRO 3 no parameter; experts go among the ranks over which (M1) shards them."""
        zero, ogp = self.facts.layout.zero_stage, self._ogp
        gather = scatter = 0.0
        for elements, group in self._parts(held, held.frozen, held.frozen_experts):
            gather += self._collective(
                "all_gather", elements * ogp.parameter_bytes, group
            ) + self._fixed(group)
        for elements, group in self._parts(held):
            scatter += self._collective(
                "reduce_scatter", elements * ogp.gradient_bytes, group
            ) + self._fixed(group)
        return nanoseconds(gather) if zero == 3 else 0, nanoseconds(
            scatter
        ) if zero >= 2 else 0

    def _update(self, row: Measurement, held: HeldParameters) -> int:
        """Equation (T3): states and parameters read and written, gradients read; measured for AdamW, and for 8-bit Adam
        on CPUs; Muon's FLOPs.

        ZeRO shares it out like the optimizer states, experts among the ranks that hold the same ones.
        """
        count = held.count
        adamw = recipe(self.facts.job.precision, "adamw")
        traffic, of_adamw = (
            2 * ogp.optimizer_bytes(count)
            + count.elements * (ogp.gradient_bytes + 2 * ogp.parameter_bytes)
            for ogp in (self._ogp, adamw)
        )
        bandwidth = self.site.group.device.memory_bandwidth_bytes_per_second
        seconds = 0.0
        if (
            row.adam_8bit_seconds is not None
            and self.facts.job.optimizer == "adam-8bit"
        ):
            seconds = row.adam_8bit_seconds
        elif row.optimizer_seconds is not None:
            seconds = row.optimizer_seconds * (traffic / of_adamw if of_adamw else 1.0)
        elif bandwidth is not None:
            constants = self.site.group.constants
            seconds = (
                traffic
                * constants.optimizer_passes
                / (bandwidth * constants.memory_fraction)
            )
        seconds += self._orthogonalising(row)
        if not self.facts.layout.zero_stage:
            return nanoseconds(seconds)
        if not held.experts - held.frozen_experts:
            return nanoseconds(seconds / self._ranks("shard"))
        return nanoseconds(
            sum(
                seconds * elements / count.elements / self._ranks(group)
                for elements, group in self._parts(held)
            )
        )

    def _orthogonalising(self, row: Measurement) -> float:
        """Seconds of Muon's products, at the device's bf16 rate; without a known peak at the measured forward's."""
        if self.facts.job.optimizer != "muon" or not row.local_muon_flops:
            return 0.0
        device, dtype = self.site.group.device, self.facts.profile.dtype
        peaks = device.peak_flops_per_second
        if "bf16" in peaks or dtype in peaks:
            rate = peaks["bf16" if "bf16" in peaks else dtype]
            return row.local_muon_flops / (rate * device.achievable_fraction)
        return (
            row.local_muon_flops
            * (row.forward_seconds or 0.0)
            / max(1, row.forward_flops)
        )

    def _is_sharded(self) -> tuple[bool, bool, bool]:
        """Does ZeRO divide parameters, gradients and optimizer states (Rajbhandari et al. 2020)?"""
        zero = self.facts.layout.zero_stage
        return zero >= 3, zero >= 2, zero >= 1

    def _whole_bytes(self, held: HeldParameters) -> int:
        """What is otherwise shared out, and stands whole while the layer runs: equation (M3)."""
        parameters, gradients, _ = self._is_sharded()
        whole = held.elements * self._ogp.parameter_bytes * parameters
        return whole + held.count.elements * self._ogp.gradient_bytes * gradients

    def _state(self, held: HeldParameters) -> StateBytes:
        """Equations (M1) and (T8): parameters of all, gradients and states of what is trained."""
        ogp, trained = self._ogp, held.count.elements
        every, of_trained = (
            (held.elements, held.experts),
            (trained, held.experts - held.frozen_experts),
        )
        parameters, gradients, optimizer = self._is_sharded()
        return StateBytes(
            parameters=self._shard(
                held.elements * ogp.parameter_bytes, *every, is_sharded=parameters
            ),
            gradients=self._shard(
                trained * ogp.gradient_bytes, *of_trained, is_sharded=gradients
            ),
            optimizer=self._shard(
                ogp.optimizer_bytes(held.count), *of_trained, is_sharded=optimizer
            ),
        )

    def _shard(
        self, size_bytes: int, elements: int, of_experts: int, *, is_sharded: bool
    ) -> int:
        """Of the fullest rank; experts by their share of so many elements, rounded down."""
        if not is_sharded:
            return size_bytes
        experts = size_bytes * of_experts // max(1, elements)
        return _share(size_bytes - experts, self._ranks("shard")) + _share(
            experts, self._ranks("expert_shard")
        )

    def _parts(
        self, held: HeldParameters, frozen: int = 0, frozen_experts: int = 0
    ) -> tuple[tuple[int, str], ...]:
        """(elements, group whose ranks share them out, or without ZeRO sum their gradients) of what is trained, and of
        so many that are frozen."""
        experts, elements = (
            held.experts - held.frozen_experts + frozen_experts,
            held.count.elements + frozen,
        )
        whole, of_experts = (
            ("shard", "expert_shard")
            if self.facts.layout.zero_stage
            else ("data", "expert_data")
        )
        both = ((elements - experts, whole), (experts, of_experts))
        return tuple(part for part in both if part[0])

    def _shared(self, shared: SharedParameters) -> SharedPrice:
        facts, ogp = self.facts, self._ogp
        by_parameters, by_gradients, by_optimizer = (
            self._ranks("shard") if is_sharded else 1
            for is_sharded in self._is_sharded()
        )
        names = [layer.name for layer in facts.profile.layers]
        users = tuple(sorted({names.index(name) for name in shared.layers}))
        last, price = (
            facts.profile.layers[users[-1]],
            next(iter(self.layers[users[-1]].values())),
        )
        layer = held_parameters(last, price.plain)
        held = [
            held_parameters(
                facts.profile.layers[at], next(iter(self.layers[at].values())).plain
            )
            for at in users
        ]
        is_split = any(one.elements < shared.parameters for one in held)
        elements = min(
            _share(
                shared.parameters,
                facts.layout.tensor_parallel_degree if is_split else 1,
            ),
            layer.elements,
        )
        trained, of_layer = 0 if shared.frozen else elements, layer.count.elements
        exchange = 2 * send_seconds(trained * ogp.gradient_bytes / 2, self.site.tied)
        return SharedPrice(
            users=users,
            reduction=price.reduction * trained // max(1, of_layer),
            reduction_and_update=(price.reduction + price.update)
            * trained
            // max(1, of_layer),
            exchange=nanoseconds(exchange)
            if facts.layout.pipeline_parallel_degree > 1
            else 0,
            state=StateBytes(
                parameters=elements * ogp.parameter_bytes // by_parameters,
                gradients=trained * ogp.gradient_bytes // by_gradients,
                optimizer=ogp.optimizer_bytes(
                    ParameterCount(trained, 0, shared.factored_elements)
                )
                // by_optimizer,
            ),
        )


def _at_length(edge: SkipEdge, tokens: int) -> int:
    """Bytes of one sample of so many tokens, rounded up to whole ones."""
    told = edge.sequence_length
    return edge.bytes if not told else math.ceil(Fraction(edge.bytes * tokens, told))


def plain_row(rows: Mapping[RecomputeMode, Measurement]) -> Measurement:
    """The row that recomputes least."""
    return next(rows[mode] for mode in get_args(RecomputeMode) if mode in rows)


@dataclass(frozen=True, slots=True)
class HeldParameters:
    """Parameters of a layer on the fullest rank of its tensor-parallel group."""

    count: ParameterCount
    """Of those that are trained."""
    experts: int
    """Elements that the expert-parallel group splits, trained or not."""
    frozen: int
    """Elements that are not trained: no gradients, nothing to reduce, scatter or update."""
    frozen_experts: int
    """Those of the experts' elements that are not."""

    @property
    def elements(self) -> int:
        """All of them."""
        return self.count.elements + self.frozen


def held_parameters(layer: LayerProfile, plain: Measurement) -> HeldParameters:
    """What a rank holds of a layer: equation (T8)."""
    elements, frozen = plain.local_parameters, plain.local_frozen_parameters
    if elements is None:
        elements = _share(layer.parameters, plain.tensor_parallel_degree)
    if frozen is None:
        frozen = _share(layer.frozen_parameters, plain.tensor_parallel_degree)
    experts, frozen_experts = (
        plain.local_expert_parameters,
        plain.local_frozen_expert_parameters,
    )
    frozen = min(frozen, elements - (experts - frozen_experts))
    count = ParameterCount(
        elements - frozen, plain.local_matrix_elements, plain.local_factored_elements
    )
    return HeldParameters(count, experts, frozen, frozen_experts)


def _goes_back(plain: Measurement) -> bool:
    """Does any kernel of the layer have a backward, as far as is told?"""
    return {one.gradients for one in plain.operations} != {"none"}


def _share(whole: int, parts: int) -> int:
    """Rounded up: the fullest rank's."""
    return (whole + parts - 1) // parts
