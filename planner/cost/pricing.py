"""Costs of one layer under one layout, in whole ticks and bytes.

Durations are whole nanoseconds (ticks), rounded once per layer, so that simulation, solver and validator agree to the
last digit. Per layer l, recompute mode r, micro-batch:

    (T1)  f(l)   = forward + sum of its forward collectives over the tensor-parallel group, the same for every r
                                                                                            -> LayerCost.forward_ticks
    (T2)  b(l,r) = input gradient + weight gradient + its backward collectives
                   + recomputation (with the forward collectives again)                     -> LayerCost.backward_ticks
    (T3)  u(l)   = optimizer step over the layer's parameters: measured for AdamW, times the bytes that the job's
                   optimizer moves / those that AdamW moves (for 8-bit Adam on a CPU: measured itself); else the bytes
                   that it reads and writes over the memory bandwidth; for Muon also the FLOPs of its matrix products
                                                                                            -> optimizer_ticks
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
    (T8)  of n parameters on a rank z are frozen (``requires_grad=False``): u(l), g(l) and all that is summed or
                  scattered under (T6) and (T7) is of the n - z others, as are gradients and states of (M1); all n are
                  kept, and gathered under ZeRO 3; but not for the backward where no kernel of the layer has one, as
                  nothing is trained in it or before it (Hu et al. 2021, "LoRA", section 4.2)  -> planner.cost.held
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.cost.chunks import NO_ATTENTION, AttentionPart, attention_part, in_chunks
from planner.cost.communication import (
    Group,
    collective_seconds,
    copies_between_nodes,
)
from planner.cost.compute import Computation
from planner.cost.groups import Groups
from planner.cost.held import Held, has_backward
from planner.cost.overlap import ConcurrentCompute, Exchanges, exposed_seconds
from planner.cost.ticks import ticks
from planner.cost.workload import Workload, modes_of
from planner.spec.layout import Layout
from planner.spec.profile import (
    BYTES_PER_ELEMENT,
    Collective,
    CollectiveName,
    LayerProfile,
    Measurement,
    RecomputeMode,
)
from planner.spec.recipes import OgpRecipe, ParameterCount, recipe

HOST_ADAM_SECONDS_PER_ELEMENT = 2.5e-10
"""Of a step of Adam on a node's host, which the node's devices share: 2.57 s for 10 G
parameters (Ren et al. 2021, "ZeRO-Offload", table 4)."""


class LayerCost(NamedTuple):
    """One layer in one recompute mode: ticks and bytes of one micro-batch on one rank.

    A named tuple, because a search makes ten thousands of them, and it is made in a third of the time.
    """

    optimizer_ticks: int
    """Equation (T3), once per step."""
    reduction_ticks: int
    """Equation (T4), once per step."""
    update_ticks: int
    """Of `reduction_ticks`: gathering what ZeRO 1 or 2 has updated."""
    parameters: int
    """Elements on one rank."""
    trained: int
    """Those of them that are not frozen: equation (T8)."""
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    """Whole parameters, while the layer runs under ZeRO 3; under ZeRO 2 and 3 whole gradients, until they are
    scattered."""
    output_bytes: int
    model_flops: int
    """Forward and backward without recomputation, on one rank."""
    mode: RecomputeMode
    """What stands above is the same in every mode."""
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
    activation_bytes: int
    temporary_bytes: int
    attention: AttentionPart = NO_ATTENTION
    """Where sequences are cut into chunks."""
    offload_ticks: int = 0
    """Equation (O1), forward and backward."""
    host_activation_bytes: int = 0
    """Of one micro-batch, in the host's memory."""
    host_optimizer_bytes: int = 0
    """In the host's memory."""

    @property
    def ogp_bytes(self) -> int:
        """Optimizer states, gradients and parameters."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def moved_bytes(ogp: OgpRecipe, count: ParameterCount) -> int:
    """Bytes that a step reads and writes: states and parameters both ways, gradients once."""
    return 2 * ogp.optimizer_bytes(count) + count.elements * (
        ogp.gradient_bytes + 2 * ogp.parameter_bytes
    )


@dataclass(frozen=True, slots=True)
class _Spent:
    """Ticks and bytes of one layer and micro-batch that no data-parallel degree and no ZeRO stage changes."""

    forward: int
    backward: int
    backward_weight: int
    recompute: int
    with_exchange: tuple[int, int]
    """All of forward, and of backward and recomputation."""
    computed: tuple[RecomputeMode, int, int, int, int, int]
    """The fields of `LayerCost` from `mode` to `communication_ticks`."""
    kept: tuple[object, ...]
    """Those behind `backward_ticks`, where sequences are whole."""


@dataclass(frozen=True, slots=True)
class _Whole:
    """What one layer holds on a rank before anything is shared out over data-parallel ranks."""

    held: Held
    count: ParameterCount
    """Of what is trained."""
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    update_seconds: float
    """Equation (T3)."""


_NO_GATHERS = (0, 0)
_DEFAULTS = tuple(LayerCost._field_defaults.values())
"""Of the last fields."""
_Parts = tuple[tuple[int, Group], ...]
"""Elements of a layer by the ranks that share them out, or sum their gradients."""


class _Exchanged(NamedTuple):
    """Ticks of what data-parallel ranks exchange of one layer."""

    reduction_ticks: int
    update_ticks: int
    gathers: tuple[int, int]
    """In forward and backward, hidden or not: equation (T6)."""


class _Held(NamedTuple):
    """The fields of `LayerCost` that no recompute mode changes, in their order."""

    optimizer_ticks: int
    reduction_ticks: int
    update_ticks: int
    parameters: int
    trained: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    output_bytes: int
    model_flops: int


@dataclass(frozen=True, slots=True)
class Known:
    """What has been priced already with the same tensor-, context- and expert-parallel groups and sequence chunks, by
    the identity of a measurement row: rows know their micro-batch size and what splits the layer, nothing else
    matters to it."""

    computed: dict[int, Computation]
    """Whatever the groups."""
    spent: dict[int, _Spent] = field(default_factory=dict)
    whole: dict[tuple[int, int, int], _Whole] = field(default_factory=dict)
    """By the layer's parameters, and those that are frozen, too."""
    exchanged: dict[tuple[int, int, Held, bool], _Exchanged] = field(
        default_factory=dict
    )
    """By the number of the communicators, the ZeRO stage, the elements on a rank, and whether the layer has a
    backward."""
    numbers: dict[Groups, int] = field(default_factory=dict)
    """Of communicators."""
    by_identity: dict[int, tuple[int, Groups]] = field(default_factory=dict)
    """The same, told without looking at them; they are kept, because their identity tells them from others."""

    def number(self, groups: Groups) -> int:
        """Of communicators: the same for those that are alike."""
        found = self.by_identity.get(id(groups))
        if found is None:
            number = self.numbers.setdefault(groups, len(self.numbers))
            found = self.by_identity[id(groups)] = number, groups
        return found[0]


def known_prices(work: Workload, groups: Groups, chunks: int) -> Known:
    """What has been priced already of a workload with these communicators and sequence chunks; kept as long as the
    workload."""
    key = (groups.tensor, groups.context, groups.expert, chunks)
    if key not in work.spent:
        computed = work.spent.setdefault(("computation", chunks), {})
        work.spent[key] = Known(computed)
    found: Known = work.spent[key]
    return found


@dataclass(frozen=True, slots=True)
class LayerPricing:
    """Prices the measurement rows of one layer: equations (T1) to (T4), (T6) and (T7)."""

    work: Workload
    layout: Layout
    groups: Groups
    layer: LayerProfile
    plain: Measurement
    """The row that recomputes least. What no recompute mode changes (forward, parameters, optimizer, output) is read
    here for all modes: measured noise between the rows must not make one mode's forward faster than another's."""
    known: Known

    def costs(
        self, rows: dict[RecomputeMode, Measurement]
    ) -> dict[RecomputeMode, LayerCost]:
        """In every mode, from least to most recomputation."""
        self._compute(rows.values())
        whole = self._whole()
        exchanged = self._exchanged(whole.held)
        held = self._held(whole, exchanged)
        return {
            mode: self._cost(rows[mode], held, exchanged.gathers)
            for mode in modes_of(rows)
        }

    def _cost(
        self, row: Measurement, held: _Held, gathers: tuple[int, int]
    ) -> LayerCost:
        spent = self._spent(row)
        in_forward = in_backward = 0
        if gathers != _NO_GATHERS:
            in_forward = self._exposed(gathers[0], spent.forward)
            in_backward = self._exposed(gathers[1], spent.backward + spent.recompute)
        ticks_ = (
            in_forward + in_backward,
            spent.with_exchange[0] + in_forward,
            spent.with_exchange[1] + in_backward,
        )
        cost = LayerCost._make((*held, *spent.computed, *ticks_, *spent.kept))
        return (
            cost
            if self.layout.sequence_chunks == 1
            else cost._replace(attention=self._attention(row, spent))
        )

    def _exchanged(self, held: Held) -> _Exchanged:
        zero = self.layout.zero_stage
        key = self.known.number(self.groups), zero, held, has_backward(self.plain)
        found = self.known.exchanged.get(key)
        if found is None:
            parts = self._parts(held.trained, held.trained_experts)
            found = self.known.exchanged[key] = _Exchanged(
                reduction_ticks=ticks(
                    sum([self._reduction_seconds(*part) for part in parts])
                ),
                update_ticks=ticks(sum([self._update_seconds(*part) for part in parts]))
                if zero in (1, 2) or self._gathers_once
                else 0,
                gathers=self._gathers(held, parts),
            )
        return found

    def _held(self, whole: _Whole, exchanged: _Exchanged) -> _Held:
        zero, plain, held = self.layout.zero_stage, self.plain, whole.held
        trained = held.trained, held.trained_experts
        parameters_bytes = self._sharded(
            whole.parameters_bytes, held.elements, held.experts, zero >= 3
        )
        if self._gathers_once:
            parameters_bytes += held.elements * self._computed_bytes
        return _Held(
            optimizer_ticks=self._optimizer_ticks(whole),
            reduction_ticks=exchanged.reduction_ticks,
            update_ticks=exchanged.update_ticks,
            parameters=held.elements,
            trained=held.trained,
            parameters_bytes=parameters_bytes,
            gradients_bytes=self._sharded(whole.gradients_bytes, *trained, zero >= 2),
            optimizer_bytes=self._sharded(whole.optimizer_bytes, *trained, zero >= 1),
            gathered_bytes=self._gathered_bytes(held),
            output_bytes=plain.output_bytes,
            model_flops=plain.forward_flops
            + plain.backward_input_flops
            + plain.backward_weight_flops,
        )

    def _gathered_bytes(self, held: Held) -> int:
        """Of the layer, while it runs: equation (M3)."""
        zero = self.layout.zero_stage
        is_gathered = zero >= 3 and not self._gathers_once
        parameters = held.elements * self._computed_bytes if is_gathered else 0
        is_scattered = zero >= 2 and self.work.framework.scatters_layers
        return parameters + (
            held.trained * self.work.recipe.gradient_bytes if is_scattered else 0
        )

    def _whole(self) -> _Whole:
        key = (id(self.plain), self.layer.parameters, self.layer.frozen_parameters)
        found = self.known.whole.get(key)
        if found is None:
            held, row, ogp = (
                Held.of(self.layer, self.plain),
                self.plain,
                self.work.recipe,
            )
            count = ParameterCount(
                held.trained, row.local_matrix_elements, row.local_factored_elements
            )
            found = self.known.whole[key] = _Whole(
                held=held,
                count=count,
                parameters_bytes=held.elements * ogp.parameter_bytes,
                gradients_bytes=count.elements * ogp.gradient_bytes,
                optimizer_bytes=ogp.optimizer_bytes(count),
                update_seconds=self._moving_seconds(count) + self._muon_seconds(),
            )
        return found

    def _attention(self, row: Measurement, spent: _Spent) -> AttentionPart:
        of_input = spent.backward - spent.backward_weight
        return attention_part(row, self.plain, spent.forward, of_input, spent.recompute)

    def _spent(self, row: Measurement) -> _Spent:
        found = self.known.spent.get(id(row))
        if found is None:
            found = self.known.spent[id(row)] = self._measured(row)
        return found

    def _measured(self, row: Measurement) -> _Spent:
        seconds = self._computation(row)
        if row is self.plain:
            forward = ticks(seconds.forward_seconds)
            forward_exchange = self._exchange_ticks(row, "forward", seconds)
        else:
            plain = self._spent(self.plain)
            forward, forward_exchange = (
                plain.forward,
                plain.with_exchange[0] - plain.forward,
            )
        weight = ticks(seconds.backward_weight_seconds)
        backward, recompute = (
            ticks(seconds.backward_input_seconds) + weight,
            ticks(seconds.recompute_seconds),
        )
        replayed = forward_exchange if row.recompute == "full" else 0
        backward_exchange = self._exchange_ticks(row, "backward", seconds) + replayed
        return _Spent(
            forward=forward,
            backward=backward,
            backward_weight=weight,
            recompute=recompute,
            with_exchange=(
                forward + forward_exchange,
                backward + recompute + backward_exchange,
            ),
            computed=(
                row.recompute,
                forward,
                backward,
                weight,
                recompute,
                forward_exchange + backward_exchange,
            ),
            kept=(
                self._allocated(row.activation_bytes),
                self._allocated(row.temporary_bytes),
                *_DEFAULTS,
            ),
        )

    def _compute(self, rows: Iterable[Measurement]) -> None:
        """Price rows together, which is faster than one by one."""
        work, known = self.work, self.known.computed
        left = [row for row in rows if id(row) not in known]
        if not left:
            return
        seconds = in_chunks(
            left,
            work.device,
            work.profile.dtype,
            work.constants,
            self.layout.sequence_chunks,
            work.casts,
            gradient_bytes=work.recipe.gradient_bytes,
            graphs=work.framework.cuda_graphs,
            blocking=work.framework.launch_blocking,
        )
        known.update(zip(map(id, left), seconds, strict=True))

    def _computation(self, row: Measurement) -> Computation:
        self._compute([row])
        return self.known.computed[id(row)]

    def _allocated(self, size_bytes: int) -> int:
        """Bytes with what the allocator loses to rounding and fragmentation, rounded up."""
        overhead = 1 + self.work.device.allocation_overhead
        return math.ceil(size_bytes * overhead * self.work.constants.allocated_factor)

    def _collective_seconds(
        self,
        operation: CollectiveName,
        size_bytes: float,
        group: Group,
        *,
        one_rail: bool = False,
    ) -> float:
        work = self.work
        if group.ranks == 1:
            return 0.0
        links, fitted = (work.intra_node, work.inter_node), work.constants
        moving = collective_seconds(
            operation,
            size_bytes,
            group,
            *links,
            copies=fitted.ring_copies,
            rails=0.0 if one_rail else fitted.rail_fraction,
            copies_between=self._copies_between(group),
        )
        return moving + work.constants.collective_seconds

    def _copies_between(self, group: Group) -> float:
        """Copies of a token between nodes / its experts: c of equation (L5)."""
        transformer = self.work.profile.transformer
        is_joint = self.work.framework.dispatcher in ("deepep", "hybridep")
        if not is_joint or transformer is None or transformer.experts is None:
            return 1.0
        return copies_between_nodes(transformer.experts.experts_per_token, group.nodes)

    def _sharded(
        self, size_bytes: int, elements: int, experts: int, is_sharded: bool
    ) -> int:
        """Bytes on one rank of so many elements; experts are sharded over those ranks only that hold the same ones."""
        if not is_sharded:
            return size_bytes
        of_experts = size_bytes * experts // max(1, elements)
        of_others = size_bytes - of_experts
        return -(-of_others // self.groups.shard.ranks) - (
            -of_experts // self.groups.expert_shard.ranks
        )

    def _exchange_ticks(
        self, row: Measurement, phase: str, seconds: Computation
    ) -> int:
        """Exposed ticks of a phase's collectives: equations (X1) and (Q4)."""
        mine = [one for one in row.collectives if one.phase == phase]
        if not mine:
            return 0
        by_class = Exchanges()
        for one in mine:
            by_class.add(one.group, one.beside, self._seconds_of(one))
        compute = ConcurrentCompute.of(seconds, phase)
        framework = self.work.framework
        exposed = exposed_seconds(
            by_class,
            compute,
            self.work.constants.overlap_fraction,
            overlaps_tensor=framework.overlaps_tensor_parallel,
        )
        return ticks(float(exposed))

    def _seconds_of(self, one: Collective) -> float:
        """Seconds of a layer's collectives for a whole micro-batch, nothing hidden."""
        chunks = self.layout.sequence_chunks
        group = getattr(self.groups, one.group)
        seconds = self._collective_seconds(one.operation, one.bytes / chunks, group)
        return one.count * chunks * seconds

    def _parts(self, parameters: int, experts: int) -> _Parts:
        """Elements by the ranks that share them out, or sum their gradients: experts, and all others."""
        groups = self.groups
        sharing = (
            (groups.shard, groups.expert_shard)
            if self.layout.zero_stage
            else (groups.data, groups.expert_data)
        )
        if not experts:
            return ((parameters, sharing[0]),) if parameters else ()
        both = zip((parameters - experts, experts), sharing, strict=True)
        return tuple(part for part in both if part[0])

    def _optimizer_ticks(self, whole: _Whole) -> int:
        seconds, elements, experts = (
            whole.update_seconds,
            whole.held.trained,
            whole.held.trained_experts,
        )
        if not (self.layout.zero_stage and experts):
            return ticks(
                seconds / (self.groups.shard.ranks if self.layout.zero_stage else 1)
            )
        return ticks(
            sum(
                seconds * part / elements / group.ranks
                for part, group in self._parts(elements, experts)
            )
        )

    def _moving_seconds(self, count: ParameterCount) -> float:
        """Of the optimizer's states, gradients and parameters."""
        moved = moved_bytes(self.work.recipe, count)
        if (
            self.work.job.optimizer == "adam-8bit"
            and self.plain.adam_8bit_seconds is not None
        ):
            return self.plain.adam_8bit_seconds
        if self.plain.optimizer_seconds is not None:
            adamw = moved_bytes(recipe(self.work.job.precision, "adamw"), count)
            return self.plain.optimizer_seconds * (moved / adamw if adamw else 1.0)
        if self.work.framework.offloads_states:
            sharing = self.work.devices_per_node
            return count.elements * HOST_ADAM_SECONDS_PER_ELEMENT * sharing
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
        peak = device.peak_flops_per_second.get(
            "bf16", device.peak_flops_per_second.get(self.work.profile.dtype)
        )
        if peak is not None:
            return flops / (peak * device.achievable_fraction)
        return flops * (row.forward_seconds or 0.0) / max(1, row.forward_flops)

    @property
    def _gathers_once(self) -> bool:
        """Whether ZeRO 3 gathers and reduces once per step, not per micro-batch."""
        framework, layout = self.work.framework, self.layout
        retains = framework.retains_gathered(layout.pipeline_parallel_degree)
        return retains and layout.zero_stage == 3

    def _reduction_seconds(self, parameters: int, group: Group) -> float:
        """Return equations (T4) and (T7).

        Under ZeRO 3 every micro-batch gathers and scatters, under ZeRO 2 it scatters;
        where gathered parameters are retained, both happen once per step.
        """
        work, ogp, zero = self.work, self.work.recipe, self.layout.zero_stage
        if self._gathers_once:
            zero = 1
        if zero == 0:
            return _bandwidth_seconds(
                work, "all_reduce", parameters * ogp.gradient_bytes, group
            )
        seconds = 0.0
        if zero < 3:
            seconds += self._update_seconds(parameters, group)
        if zero < 2:
            seconds += _bandwidth_seconds(
                work, "reduce_scatter", parameters * ogp.gradient_bytes, group
            )
        shard_bytes = -(-parameters // group.ranks) * ogp.gradient_bytes
        return seconds + _bandwidth_seconds(
            work, "all_reduce", shard_bytes, self.groups.copies
        )

    def _update_seconds(self, parameters: int, group: Group) -> float:
        """Gathering updated parameters."""
        return _bandwidth_seconds(
            self.work, "all_gather", parameters * self._computed_bytes, group
        )

    @property
    def _computed_bytes(self) -> int:
        """Bytes of a parameter as forward and backward take it."""
        return min(
            self.work.recipe.parameter_bytes, BYTES_PER_ELEMENT[self.work.profile.dtype]
        )

    def _exposed(self, exchange: int, compute: int) -> int:
        """Ticks of an exchange of ZeRO that so many ticks of compute do not hide: equation (T6)."""
        if not (exchange and self.work.framework.overlaps_gathers):
            return exchange
        return max(0, exchange - int(self.work.constants.overlap_fraction * compute))

    def _gathers(self, held: Held, trained: _Parts) -> tuple[int, int]:
        """Ticks of ZeRO's exchanges in forward and backward, hidden or not: equations (T6) and (T8)."""
        zero, ogp = self.layout.zero_stage, self.work.recipe
        if zero < 2 or self._gathers_once:
            return _NO_GATHERS
        one_rail = self.work.framework.gathers_on_one_rail
        gather = scatter = 0.0
        for elements, group in trained:
            scatter += self._collective_seconds(
                "reduce_scatter",
                elements * ogp.gradient_bytes,
                group,
                one_rail=one_rail,
            )
        for elements, group in (
            self._parts(held.elements, held.experts) if zero == 3 else ()
        ):
            gather += self._collective_seconds(
                "all_gather",
                elements * self._computed_bytes,
                group,
                one_rail=one_rail,
            )
        is_again = has_backward(self.plain) and not self.work.framework.keeps_gathered
        again = gather if is_again else 0.0
        return ticks(gather), ticks(again) + ticks(scatter)


def _bandwidth_seconds(
    work: Workload, operation: CollectiveName, size_bytes: int, group: Group
) -> float:
    """A collective without its latency, which a stage pays once and not once per layer."""
    links, fitted = (work.intra_node, work.inter_node), work.constants
    return collective_seconds(
        operation,
        size_bytes,
        group,
        *links,
        latency=False,
        copies=fitted.ring_copies,
        rails=fitted.rail_fraction,
    )
