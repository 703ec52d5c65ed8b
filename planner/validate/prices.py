"""Nanoseconds and bytes of one layer on one rank, from its measurement: equations (T1) to (T4) and (M1).

Durations are whole nanoseconds, rounded once per layer and part, because the plan's are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import get_args

from planner.spec.profile import LayerProfile, Measurement, RecomputeMode, SharedParameters, SkipEdge
from planner.spec.recipes import OgpRecipe, ParameterCount, recipe
from planner.validate.facts import Facts
from planner.validate.formulas import Machine, collective_seconds, layer_seconds, send_seconds

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
    """The optimizer, once per step."""
    gathered_forward: int
    """ZeRO 3: the parameters, for every micro-batch."""
    gathered_backward: int
    """ZeRO 3: the parameters again, and the gradients scattered."""
    gathered_bytes: int
    """ZeRO 3: the parameters, whole."""
    state: StateBytes

    @property
    def whole_forward(self) -> int:
        """Equation (T1)."""
        return self.forward + self.exchanged_forward + self.gathered_forward

    @property
    def whole_backward_input(self) -> int:
        """Equation (T2) without the weight gradient."""
        computed = self.backward_input + self.recompute
        return computed + self.exchanged_backward + self.exchanged_again + self.gathered_backward

    @property
    def exchanged(self) -> int:
        """All tensor-parallel collectives."""
        return self.exchanged_forward + self.exchanged_backward + self.exchanged_again


@dataclass(frozen=True, slots=True)
class SharedPrice:
    """One copy of parameters that several layers use."""

    users: tuple[int, ...]
    reduction_and_update: int
    exchange: int
    """All-reduce of its gradients over two stages."""
    state: StateBytes


@dataclass(frozen=True)
class Prices:
    """Prices of every layer of a model under one layout."""

    facts: Facts

    @cached_property
    def layers(self) -> tuple[dict[RecomputeMode, LayerPrice], ...]:
        """By layer, in the model's order, and recompute mode; identical layers share one dict."""
        known: dict[tuple[int, int], dict[RecomputeMode, LayerPrice]] = {}
        prices = []
        for layer in self.facts.profile.layers:
            key = (id(layer.measurements), layer.parameters)
            if key not in known:
                rows = self.facts.rows(layer)
                known[key] = {mode: self._price(layer, row, plain_row(rows)) for mode, row in rows.items()}
            prices.append(known[key])
        return tuple(prices)

    @cached_property
    def shared(self) -> tuple[SharedPrice, ...]:
        """Shared parameters of the model."""
        return tuple(map(self._shared, self.facts.profile.shared_parameters))

    @cached_property
    def reduction_latency(self) -> int:
        """Fixed cost of a stage's gradient all-reduce."""
        facts = self.facts
        return nanoseconds(collective_seconds("all_reduce", 1, facts.data_spread, facts.intra_node, facts.inter_node))

    @cached_property
    def boundary_bytes(self) -> tuple[int, ...]:
        """By layer: what crosses a stage boundary behind it, per micro-batch; its output and all skips over it."""
        facts = self.facts
        order = {layer.name: index for index, layer in enumerate(facts.profile.layers)}
        sizes = []
        for index, layer in enumerate(facts.profile.layers):
            over = [edge for edge in facts.profile.edges if order[edge.from_] <= index < order[edge.to]]
            samples = facts.layout.micro_batch_size
            output = plain_row(facts.rows(layer)).output_bytes
            skipping = sum(_at_length(edge, facts.job.sequence_length) for edge in over)
            sizes.append(output + samples * skipping)
        return tuple(sizes)

    @cached_property
    def _ogp(self) -> OgpRecipe:
        return recipe(self.facts.job.precision, self.facts.job.optimizer)

    def transfer(self, boundary: int, last_layer: int) -> int:
        """Nanoseconds from stage `boundary` to the next when this layer is its last: equation (T5)."""
        return nanoseconds(send_seconds(self.boundary_bytes[last_layer], self.facts.boundary_links[boundary]))

    def _price(self, layer: LayerProfile, row: Measurement, plain: Measurement) -> LayerPrice:
        """Backward, recomputation, activations and temporaries are the mode's; all else is the plain row's."""
        machine = Machine(self.facts.device, self.facts.profile.dtype, self.facts.constants)
        seconds = layer_seconds(row, machine)
        exchanged_forward = self._exchange(plain, "forward")
        held = held_parameters(layer, plain)
        gather, scatter = self._gathers(held.elements)
        return LayerPrice(
            row=row,
            plain=plain,
            forward=nanoseconds(layer_seconds(plain, machine).forward),
            backward_input=nanoseconds(seconds.backward_input),
            backward_weight=nanoseconds(seconds.backward_weight),
            recompute=nanoseconds(seconds.recompute),
            exchanged_forward=exchanged_forward,
            exchanged_backward=self._exchange(row, "backward"),
            exchanged_again=exchanged_forward if row.recompute == "full" else 0,
            reduction=self._reduction(held.elements),
            update=self._update(plain, held),
            gathered_forward=gather,
            gathered_backward=gather + scatter,
            gathered_bytes=held.elements * self._ogp.parameter_bytes if self.facts.layout.zero_stage == 3 else 0,
            state=self._state(held),
        )

    def _exchange(self, row: Measurement, phase: str) -> int:
        facts = self.facts
        ends = (facts.tensor_spread, facts.intra_node, facts.inter_node)
        mine = [one for one in row.collectives if one.phase == phase]
        fixed = facts.constants.collective_seconds if facts.tensor_spread.ranks > 1 else 0.0
        return nanoseconds(
            sum(one.count * (collective_seconds(one.operation, one.bytes, *ends) + fixed) for one in mine)
        )

    def _reduction(self, elements: int) -> int:
        """Equation (T4): all-reduce, or with ZeRO 1 and 2 reduce-scatter and all-gather."""
        facts, zero = self.facts, self.facts.layout.zero_stage
        ends = (facts.data_spread, facts.intra_node, facts.inter_node)
        gradients, parameters = elements * self._ogp.gradient_bytes, elements * self._ogp.parameter_bytes
        if zero == 3:
            return 0
        if zero == 0:
            return nanoseconds(collective_seconds("all_reduce", gradients, *ends, latency=False))
        scatter = collective_seconds("reduce_scatter", gradients, *ends, latency=False)
        gather = collective_seconds("all_gather", parameters, *ends, latency=False)
        return nanoseconds(scatter + gather)

    def _gathers(self, elements: int) -> tuple[int, int]:
        """Equation (T6): all-gather of the parameters, reduce-scatter of the gradients, both of every micro-batch."""
        facts = self.facts
        if facts.layout.zero_stage < 3:
            return 0, 0
        ends = (facts.data_spread, facts.intra_node, facts.inter_node)
        gather = collective_seconds("all_gather", elements * self._ogp.parameter_bytes, *ends)
        scatter = collective_seconds("reduce_scatter", elements * self._ogp.gradient_bytes, *ends)
        fixed = facts.constants.collective_seconds if facts.data_spread.ranks > 1 else 0.0
        return nanoseconds(gather + fixed), nanoseconds(scatter + fixed)

    def _update(self, row: Measurement, held: ParameterCount) -> int:
        """Equation (T3): states and parameters read and written, gradients read; measured for AdamW; Muon's FLOPs."""
        shards = self.facts.layout.data_parallel_degree if self.facts.layout.zero_stage else 1
        adamw = recipe(self.facts.job.precision, "adamw")
        traffic, of_adamw = (
            2 * ogp.optimizer_bytes(held) + held.elements * (ogp.gradient_bytes + 2 * ogp.parameter_bytes)
            for ogp in (self._ogp, adamw)
        )
        bandwidth = self.facts.device.memory_bandwidth_bytes_per_second
        seconds = 0.0
        if row.optimizer_seconds is not None:
            seconds = row.optimizer_seconds * (traffic / of_adamw if of_adamw else 1.0)
        elif bandwidth is not None:
            constants = self.facts.constants
            seconds = traffic * constants.optimizer_passes / (bandwidth * constants.memory_fraction)
        return nanoseconds((seconds + self._orthogonalising(row)) / shards)

    def _orthogonalising(self, row: Measurement) -> float:
        """Seconds of Muon's products, at the device's bf16 rate; without a known peak at the measured forward's."""
        if self.facts.job.optimizer != "muon" or not row.local_muon_flops:
            return 0.0
        peaks, dtype = self.facts.device.peak_flops_per_second, self.facts.profile.dtype
        if "bf16" in peaks or dtype in peaks:
            rate = peaks["bf16" if "bf16" in peaks else dtype]
            return row.local_muon_flops / (rate * self.facts.device.achievable_fraction)
        return row.local_muon_flops * (row.forward_seconds or 0.0) / max(1, row.forward_flops)

    def _shards(self) -> tuple[int, int, int]:
        """What ZeRO divides parameters, gradients and optimizer states by (Rajbhandari et al. 2020)."""
        degree, zero = self.facts.layout.data_parallel_degree, self.facts.layout.zero_stage
        return degree if zero >= 3 else 1, degree if zero >= 2 else 1, degree if zero >= 1 else 1

    def _state(self, held: ParameterCount) -> StateBytes:
        ogp, (parameters, gradients, optimizer) = self._ogp, self._shards()
        return StateBytes(
            parameters=_share(held.elements * ogp.parameter_bytes, parameters),
            gradients=_share(held.elements * ogp.gradient_bytes, gradients),
            optimizer=_share(ogp.optimizer_bytes(held), optimizer),
        )

    def _shared(self, shared: SharedParameters) -> SharedPrice:
        facts, ogp, (by_parameters, by_gradients, by_optimizer) = self.facts, self._ogp, self._shards()
        names = [layer.name for layer in facts.profile.layers]
        users = tuple(sorted({names.index(name) for name in shared.layers}))
        last, price = facts.profile.layers[users[-1]], next(iter(self.layers[users[-1]].values()))
        of_layer = held_parameters(last, price.plain).elements
        elements = min(_share(shared.parameters, facts.layout.tensor_parallel_degree), of_layer)
        link = facts.intra_node if facts.is_one_node else facts.inter_node
        half = elements * ogp.gradient_bytes / 2
        return SharedPrice(
            users=users,
            reduction_and_update=(price.reduction + price.update) * elements // max(1, of_layer),
            exchange=nanoseconds(2 * send_seconds(half, link)) if facts.layout.pipeline_parallel_degree > 1 else 0,
            state=StateBytes(
                parameters=elements * ogp.parameter_bytes // by_parameters,
                gradients=elements * ogp.gradient_bytes // by_gradients,
                optimizer=ogp.optimizer_bytes(ParameterCount(elements, 0, shared.factored_elements)) // by_optimizer,
            ),
        )


def _at_length(edge: SkipEdge, tokens: int) -> int:
    """Bytes of one sample of so many tokens, rounded up to whole ones."""
    told = edge.sequence_length
    return edge.bytes if not told else math.ceil(Fraction(edge.bytes * tokens, told))


def plain_row(rows: Mapping[RecomputeMode, Measurement]) -> Measurement:
    """The row that recomputes least."""
    return next(rows[mode] for mode in get_args(RecomputeMode) if mode in rows)


def held_parameters(layer: LayerProfile, plain: Measurement) -> ParameterCount:
    """Parameters of a layer on the fullest rank of its tensor-parallel group."""
    elements = plain.local_parameters
    if elements is None:
        elements = _share(layer.parameters, plain.tensor_parallel_degree)
    return ParameterCount(elements, plain.local_matrix_elements, plain.local_factored_elements)


def _share(whole: int, parts: int) -> int:
    """Rounded up: the fullest rank's."""
    return (whole + parts - 1) // parts
