"""Seconds of one step, recomputed from the actions and the prices of the layers, and all that a plan promises.

Step: equations (S1) to (S4), as the cost model documents them; (S5) hides nothing in our own executor. Memory stands in
`planner.validate.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from planner.spec.plan import Breakdown, Plan, Prediction, RankMemory
from planner.validate.actions import parse
from planner.validate.facts import Facts
from planner.validate.findings import Findings
from planner.validate.memory import MemoryCheck, StageMap
from planner.validate.play import Actions, StageTimes, end_nanoseconds, holdings_of, owners
from planner.validate.prices import NANOSECOND, LayerPrice, Prices, nanoseconds
from planner.validate.schedules import joint_pairs

_RELATIVE = 1e-6
_ROUNDING = 1e-9


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

    def prediction(self) -> Prediction | None:
        """All that a plan promises about time and memory; None when nothing takes any time."""
        times = self._times()
        ends = self._ends(times)
        totals = self.step_totals(ends)
        step = max(totals)
        if step == 0:
            return None
        last, seconds = totals.index(step), step * NANOSECOND
        job = self.facts.job
        return Prediction(
            step_seconds=seconds,
            tokens_per_second=job.global_batch_size * (job.sequence_length or 1) / seconds,
            mfu=self._mfu(seconds),
            bubble_fraction=self._bubble_fraction(times, ends),
            breakdown=self._breakdown(ends, last),
            memory=self.memory(),
        )

    def step_nanoseconds(self) -> int:
        """The step alone: equation (S4)."""
        return max(self.step_totals(self._ends(self._times())))

    def memory(self) -> tuple[RankMemory, ...]:
        """One row per pipeline rank."""
        rows = []
        for rank, stages in enumerate(self._stages):
            holdings = [{stage: each[stage] for stage in stages} for each in holdings_of(self.actions[rank])]
            checks = [MemoryCheck(self.prices, self.stage_map, held) for held in holdings]
            rows.append(max(checks, key=MemoryCheck.in_flight_bytes).row(rank))
        return tuple(rows)

    def step_totals(self, ends: Sequence[int]) -> list[int]:
        """Per rank: end of its actions, then gradient reduction and optimizer."""
        return [end + sum(self._tail(rank)) for rank, end in enumerate(ends)]

    @cached_property
    def _owners(self) -> Mapping[int, int]:
        return owners(self.actions)

    @cached_property
    def _stages(self) -> list[list[int]]:
        """Stages of every pipeline rank, in order."""
        return [
            [stage for stage in range(len(self.stage_map)) if self._owners[stage] == rank]
            for rank in range(len(self.actions))
        ]

    @cached_property
    def _pairs(self) -> frozenset[tuple[int, str, int]]:
        return joint_pairs(self.facts.layout.schedule, self.actions)

    def _ends(self, times: Sequence[StageTimes]) -> tuple[int, ...]:
        return end_nanoseconds(self.actions, times, self._pairs)

    def _layers(self, *stages: int) -> list[LayerPrice]:
        return [self.prices.layers[layer][mode] for stage in stages for layer, mode in self.stage_map[stage]]

    def _times(self, *, transfers: bool = True) -> list[StageTimes]:
        """Equation (S1); without transfers, the half exchange of every forward and backward is left out too."""
        last = len(self.stage_map) - 1
        waiting = nanoseconds(self.facts.constants.transfer_seconds / 2) if transfers and last else 0
        return [
            self._stage_times(
                self._layers(stage),
                waiting,
                transfer=self.prices.transfer(stage, layers[-1][0]) if transfers and stage < last else 0,
            )
            for stage, layers in enumerate(self.stage_map)
        ]

    def _stage_times(self, layers: Sequence[LayerPrice], waiting: int, *, transfer: int) -> StageTimes:
        """Of a stage, chunk by chunk: attention to the keys of a chunk and all before it, all else in equal parts."""
        chunks = self.facts.layout.sequence_chunks
        forward = sum(price.whole_forward for price in layers)
        backward = sum(price.whole_backward_input for price in layers)
        first, *later = (
            StageTimes(waiting + one, waiting + two, three, transfer)
            for one, two, three in zip(
                _by_chunk(forward, sum(price.attention_forward for price in layers), chunks),
                _by_chunk(backward, sum(price.attention_backward for price in layers), chunks),
                _by_chunk(sum(price.backward_weight for price in layers), 0, chunks),
                strict=True,
            )
        )
        return replace(first, later=tuple(later))

    def _tail(self, rank: int) -> tuple[int, int]:
        """(gradient reduction, optimizer): equation (S3). A rank reduces and updates what its layers share once."""
        layers = self._layers(*self._stages[rank])
        held = [layer for stage in self._stages[rank] for layer, _ in self.stage_map[stage]]
        reduction = self.prices.reduction_latency + sum(price.reduction for price in layers)
        update = sum(price.update for price in layers) + nanoseconds(self.facts.constants.step_seconds)
        for shared in self.prices.shared:
            here = sum(layer in shared.users for layer in held)
            update -= max(0, here - 1) * shared.reduction_and_update
            if 0 < here < len(shared.users):
                reduction += shared.exchange
        return reduction, update

    def _mfu(self, seconds: float) -> float | None:
        """FLOPs of forward and backward, recomputation apart, over what the devices could do (PaLM, appendix B)."""
        facts, layout = self.facts, self.facts.layout
        peak = facts.device.peak_flops_per_second.get(facts.profile.dtype)
        if peak is None:
            return None
        rows = [price.plain for price in self._layers(*range(len(self.stage_map)))]
        flops = sum(row.forward_flops + row.backward_input_flops + row.backward_weight_flops for row in rows)
        per_stage = layout.data_parallel_degree * layout.tensor_parallel_degree * layout.context_parallel_degree
        return flops * facts.micro_batches * per_stage / (seconds * layout.devices * peak)

    def _bubble_fraction(self, times: Sequence[StageTimes], ends: Sequence[int]) -> float:
        busy = sum(times[action.stage].of(action.kind, action.micro_batch) for one in self.actions for action in one)
        return 1 - busy / (len(ends) * max(ends)) if max(ends) else 0.0

    def _breakdown(self, ends: Sequence[int], last: int) -> Breakdown:
        """Of the rank that ends last, the lowest of several; transfers are told by playing the actions without them."""
        count, layers = self.facts.micro_batches, self._layers(*self._stages[last])
        without = self._ends(self._times(transfers=False))[last]
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


def _by_chunk(whole: int, attention: int, chunks: int) -> list[int]:
    """Differences of c (whole - attention) / chunks + attention (c / chunks)^2, each term rounded down."""
    sums = [c * (whole - attention) // chunks + attention * c**2 // chunks**2 for c in range(chunks + 1)]
    return [after - before for before, after in pairwise(sums)]


def check_prediction(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Every number of the plan's prediction against the recomputed one."""
    order = {layer.name: index for index, layer in enumerate(facts.profile.layers)}
    stage_map = [[(order[layer.name], layer.recompute) for layer in stage.layers] for stage in plan.stages]
    step = StepCheck(Prices(facts), stage_map, parse(plan.actions))
    recomputed = step.prediction()
    if recomputed is None:
        findings.wrong("prediction.step_seconds", f"the plan says {plan.prediction.step_seconds}, recomputed 0.")
        return
    _check_time(plan.prediction, recomputed, findings)
    _check_breakdown(plan.prediction, recomputed, findings)
    _check_memory(plan.prediction, recomputed, findings)


def _check_time(stated: Prediction, recomputed: Prediction, findings: Findings) -> None:
    for name in ("step_seconds", "tokens_per_second", "bubble_fraction", "mfu"):
        said, found = getattr(stated, name), getattr(recomputed, name)
        if said is None or found is None:
            findings.equal(f"prediction.{name}", said, found)
        else:
            rounding = _ROUNDING if name == "bubble_fraction" else 0.0  # a difference: it may vanish but for rounding
            findings.close(f"prediction.{name}", said, found, relative=_RELATIVE, absolute=rounding)
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
