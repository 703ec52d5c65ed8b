"""Seconds and bytes of one step, recomputed from the actions and the prices of the layers, against what the plan says.

Step: equations (S1) to (S4); memory: (M1) to (M4), as the cost model documents them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.spec.plan import Breakdown, Plan, Prediction, RankMemory
from planner.spec.profile import RecomputeMode
from planner.validate.actions import Action, StageTimes, end_nanoseconds, in_flight, parse
from planner.validate.facts import Facts
from planner.validate.findings import Findings
from planner.validate.prices import NANOSECOND, LayerPrice, Prices, StateBytes

RESERVED_BYTES = 1_600_000_000
"""Context, communicators and allocator overhead of a process on a device that does not say its own."""
RECEIVE_BUFFERS = 2
"""Per direction: the one in use and the one being filled."""
_RELATIVE = 1e-6
_ROUNDING = 1e-9

StageMap = Sequence[Sequence[tuple[int, RecomputeMode]]]
"""Per stage: (layer index, recompute mode)."""
Actions = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class StepCheck:
    """One stage map under one layout, to be recomputed."""

    prices: Prices
    stage_map: StageMap
    actions: Actions

    @property
    def facts(self) -> Facts:
        """What the prices stand on."""
        return self.prices.facts

    def prediction(self) -> Prediction:
        """All that a plan promises about time and memory."""
        times = self._times()
        ends = end_nanoseconds(self.actions, times)
        totals = self.step_totals(ends)
        step = max(totals)
        last, seconds = totals.index(step), step * NANOSECOND
        job = self.facts.job
        return Prediction(
            step_seconds=seconds,
            tokens_per_second=job.global_batch_size * (job.sequence_length or 1) / seconds,
            mfu=self._mfu(seconds),
            bubble_fraction=self._bubble_fraction(times, ends),
            breakdown=self._breakdown(times, ends, last),
            memory=self.memory(),
        )

    def step_nanoseconds(self) -> int:
        """The step alone: equation (S4)."""
        return max(self.step_totals(end_nanoseconds(self.actions, self._times())))

    def memory(self) -> tuple[RankMemory, ...]:
        """One row per pipeline rank."""
        return tuple(self._memory(stage) for stage in range(len(self.stage_map)))

    def step_totals(self, ends: Sequence[int]) -> list[int]:
        """Per rank: end of its actions, then gradient reduction and optimizer."""
        return [end + sum(self._tail(stage)) for stage, end in enumerate(ends)]

    def _layers(self, stage: int) -> list[LayerPrice]:
        return [self.prices.layers[layer][mode] for layer, mode in self.stage_map[stage]]

    def _times(self) -> list[StageTimes]:
        """Equation (S1)."""
        last = len(self.stage_map) - 1
        return [
            StageTimes(
                forward=sum(price.whole_forward for price in self._layers(stage)),
                backward_input=sum(price.whole_backward_input for price in self._layers(stage)),
                backward_weight=sum(price.backward_weight for price in self._layers(stage)),
                transfer=self.prices.transfer(stage, layers[-1][0]) if stage < last else 0,
            )
            for stage, layers in enumerate(self.stage_map)
        ]

    def _users(self, stage: int, users: Sequence[int]) -> int:
        """Layers of a stage that use some shared parameters."""
        return sum(layer in users for layer, _ in self.stage_map[stage])

    def _tail(self, stage: int) -> tuple[int, int]:
        """(gradient reduction, optimizer): equation (S3). A stage reduces and updates what its layers share once."""
        reduction = self.prices.reduction_latency + sum(price.reduction for price in self._layers(stage))
        update = sum(price.update for price in self._layers(stage))
        for shared in self.prices.shared:
            here = self._users(stage, shared.users)
            update -= max(0, here - 1) * shared.reduction_and_update
            if 0 < here < len(shared.users):
                reduction += shared.exchange
        return reduction, update

    def _mfu(self, seconds: float) -> float | None:
        """FLOPs of forward and backward, recomputation apart, over what the devices could do (PaLM, appendix B)."""
        facts = self.facts
        peak = facts.device.peak_flops_per_second.get(facts.profile.dtype)
        if peak is None:
            return None
        rows = [price.plain for stage in range(len(self.stage_map)) for price in self._layers(stage)]
        flops = sum(row.forward_flops + row.backward_input_flops + row.backward_weight_flops for row in rows)
        per_stage = facts.layout.data_parallel_degree * facts.layout.tensor_parallel_degree
        return flops * facts.micro_batches * per_stage / (seconds * facts.layout.devices * peak)

    def _bubble_fraction(self, times: Sequence[StageTimes], ends: Sequence[int]) -> float:
        busy = sum(times[action.stage].of(action.kind) for one in self.actions for action in one)
        return 1 - busy / (len(ends) * max(ends)) if max(ends) else 0.0

    def _breakdown(self, times: Sequence[StageTimes], ends: Sequence[int], last: int) -> Breakdown:
        """Of the rank that ends last, the lowest of several; transfers are told by playing the actions without them."""
        count, layers = self.facts.micro_batches, self._layers(last)
        without = end_nanoseconds(self.actions, [replace(one, transfer=0) for one in times])[last]
        computed = sum(price.forward + price.backward_input + price.backward_weight for price in layers)
        recomputed = sum(price.recompute for price in layers)
        exchanged = sum(price.exchanged for price in layers)
        gathered = sum(price.gathered_forward + price.gathered_backward for price in layers)
        reduction, update = self._tail(last)
        return Breakdown(
            compute_seconds=count * computed * NANOSECOND,
            recompute_seconds=count * recomputed * NANOSECOND,
            tensor_parallel_seconds=count * exchanged * NANOSECOND,
            pipeline_seconds=(ends[last] - without) * NANOSECOND,
            data_parallel_seconds=(reduction + count * gathered) * NANOSECOND,
            optimizer_seconds=update * NANOSECOND,
            bubble_seconds=(without - count * (computed + recomputed + exchanged + gathered)) * NANOSECOND,
        )

    def _memory(self, stage: int) -> RankMemory:
        layers, state = self._layers(stage), self._state(stage)
        reserved = self.facts.device.reserved_bytes
        parts = {
            "parameters_bytes": state.parameters,
            "gradients_bytes": state.gradients,
            "optimizer_bytes": state.optimizer,
            "activations_bytes": self._activations(stage),
            "temporary_bytes": max(self._allocated(price.row.temporary_bytes) for price in layers)
            + 2 * self._largest
            + int(self.facts.constants.workspace_bytes),
            "reserved_bytes": RESERVED_BYTES if reserved is None else reserved,
        }
        return RankMemory(
            pipeline_rank=stage, **parts, peak_bytes=sum(parts.values()), capacity_bytes=capacity_bytes(self.facts)
        )

    @property
    def _largest(self) -> int:
        """ZeRO 3 gathers one layer while another runs."""
        return max(next(iter(prices.values())).gathered_bytes for prices in self.prices.layers)

    def _allocated(self, size_bytes: int) -> int:
        """Equation (M5), rounded up layer by layer."""
        overhead = 1 + self.facts.device.allocation_overhead
        return math.ceil(size_bytes * overhead * self.facts.constants.allocated_factor)

    def _state(self, stage: int) -> StateBytes:
        """Equation (M1)."""
        states = [price.state for price in self._layers(stage)]
        extra = [(max(0, self._users(stage, shared.users) - 1), shared.state) for shared in self.prices.shared]
        return StateBytes(
            parameters=sum(one.parameters for one in states) - sum(count * one.parameters for count, one in extra),
            gradients=sum(one.gradients for one in states) - sum(count * one.gradients for count, one in extra),
            optimizer=sum(one.optimizer for one in states) - sum(count * one.optimizer for count, one in extra),
        )

    def _activations(self, stage: int) -> int:
        """Equation (M2): what is held in flight, and the receive buffers of both directions."""
        outputs = [self.prices.boundary_bytes[layers[-1][0]] for layers in self.stage_map]
        saved = sum(self._allocated(price.row.activation_bytes) for price in self._layers(stage)) + outputs[stage]
        received = outputs[stage - 1] if stage > 0 else 0
        received += outputs[stage] if stage < len(outputs) - 1 else 0
        return in_flight(self.actions[stage]) * saved + RECEIVE_BUFFERS * received


def capacity_bytes(facts: Facts) -> int:
    """What the job may use of a device: its memory less the headroom, a fraction below 1, bytes otherwise."""
    headroom, memory = facts.job.memory_headroom, facts.device.memory_bytes
    return int(memory - (headroom * memory if headroom < 1 else headroom))


def check_prediction(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Every number of the plan's prediction against the recomputed one."""
    order = {layer.name: index for index, layer in enumerate(facts.profile.layers)}
    stage_map = [[(order[layer.name], layer.recompute) for layer in stage.layers] for stage in plan.stages]
    step = StepCheck(Prices(facts), stage_map, parse(plan.actions))
    if step.step_nanoseconds() == 0:
        findings.wrong("prediction.step_seconds", f"the plan says {plan.prediction.step_seconds}, recomputed 0.")
        return
    recomputed = step.prediction()
    _check_time(plan.prediction, recomputed, findings)
    _check_breakdown(plan.prediction, recomputed, findings)
    _check_memory(plan.prediction, recomputed, findings)


def _check_time(stated: Prediction, recomputed: Prediction, findings: Findings) -> None:
    for name in ("step_seconds", "tokens_per_second", "bubble_fraction", "mfu"):
        said, found = getattr(stated, name), getattr(recomputed, name)
        if said is None or found is None:
            findings.equal(f"prediction.{name}", said, found)
        else:
            findings.close(f"prediction.{name}", said, found, relative=_RELATIVE, absolute=_ROUNDING)
    findings.checked.append("step time by playing the actions, tokens per second, bubble fraction and MFU")


def _check_breakdown(stated: Prediction, recomputed: Prediction, findings: Findings) -> None:
    rounding = _RELATIVE * recomputed.step_seconds
    for name in Breakdown.model_fields:
        said, found = getattr(stated.breakdown, name), getattr(recomputed.breakdown, name)
        findings.close(f"prediction.breakdown.{name}", said, found, relative=_RELATIVE, absolute=rounding)
    total = stated.breakdown.total_seconds
    findings.close("prediction.step_seconds", stated.step_seconds, total, relative=_ROUNDING)
    findings.checked.append("the breakdown part by part, and its sum against the step")


def _check_memory(stated: Prediction, recomputed: Prediction, findings: Findings) -> None:
    findings.equal("prediction.memory: rows", len(stated.memory), len(recomputed.memory))
    for said, found in zip(stated.memory, recomputed.memory, strict=False):
        where = f"prediction.memory[{found.pipeline_rank}]"
        for name in RankMemory.model_fields:
            findings.equal(f"{where}.{name}", getattr(said, name), getattr(found, name))
        if found.peak_bytes > found.capacity_bytes:
            findings.wrong(f"{where}.peak_bytes", f"{found.peak_bytes} bytes of {found.capacity_bytes} do not fit.")
    findings.checked.append("memory of every pipeline rank part by part, its sum, and that it fits the device")
