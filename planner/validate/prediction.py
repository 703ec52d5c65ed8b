"""Seconds of one step, recomputed from the actions and the prices of the layers, and all that a plan promises.

    (S4)  step = the latest end over columns and pipeline ranks; breakdown and bubble are those of the column that ends
          last, the first of equals
    (H7)  memory of a pipeline rank: of the column that has least room left, on its device or, where it keeps something
          there, in its host's memory; the first of equals
    (H8)  MFU = FLOPs of the step / (step x sum of the peaks of all devices)

Of one column see `planner.validate.pipeline`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from planner.spec.plan import Breakdown, Plan, Prediction, RankMemory
from planner.validate.actions import parse
from planner.validate.cells import Cells
from planner.validate.facts import Facts
from planner.validate.findings import Findings
from planner.validate.memory import StageMap, capacity_bytes
from planner.validate.pipeline import Pipeline
from planner.validate.play import Actions
from planner.validate.prices import NANOSECOND

_RELATIVE = 1e-6
_ROUNDING = 1e-9
_MEMORY_PARTS = (
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "temporary_bytes",
    "reserved_bytes",
)
"""Fields of `RankMemory` that add up to its peak."""


@dataclass(frozen=True)
class StepCheck:
    """One stage map under one layout, to be recomputed."""

    cells: Cells
    stage_map: StageMap
    actions: Actions
    """For as many micro-batches as the data-parallel rank has that has most."""

    def prediction(self) -> Prediction | None:
        """All that a plan promises about time and memory; None when nothing takes any time."""
        steps = [pipeline.step_nanoseconds for pipeline in self._pipelines]
        if not max(steps):
            return None
        last, seconds = (
            self._pipelines[steps.index(max(steps))],
            max(steps) * NANOSECOND,
        )
        job = self.cells.facts.job
        return Prediction(
            step_seconds=seconds,
            tokens_per_second=job.global_batch_size
            * (job.sequence_length or 1)
            / seconds,
            mfu=self.mfu(seconds),
            bubble_fraction=last.bubble_fraction(),
            breakdown=last.breakdown(),
            memory=self.memory(),
        )

    def step_nanoseconds(self) -> int:
        """The step alone: equation (S4)."""
        return max(pipeline.step_nanoseconds for pipeline in self._pipelines)

    def memory(self) -> tuple[RankMemory, ...]:
        """One row per pipeline rank: equation (H7)."""
        columns = [pipeline.memory() for pipeline in self._pipelines]
        return tuple(min(rows, key=_room_left) for rows in zip(*columns, strict=True))

    @cached_property
    def _pipelines(self) -> tuple[Pipeline, ...]:
        return tuple(
            Pipeline(self.cells, column, self.stage_map, self.actions)
            for column in self.cells.columns
        )

    def mfu(self, seconds: float) -> float | None:
        """FLOPs of forward and backward, recomputation apart, over what the devices could do (PaLM, appendix B):
        equation (H8)."""
        facts, layout = self.cells.facts, self.cells.facts.layout
        peaks = [
            group.device.peak_flops_per_second.get(facts.profile.dtype)
            for group in facts.groups
        ]
        known = [
            group.devices * peak
            for group, peak in zip(facts.groups, peaks, strict=True)
            if peak is not None
        ]
        if len(known) < len(peaks):
            return None
        rows = self._pipelines[0].plain_rows()
        flops = sum(
            row.forward_flops + row.backward_input_flops + row.backward_weight_flops
            for row in rows
        )
        each = layout.tensor_parallel_degree * layout.context_parallel_degree
        return flops * sum(facts.shares) * each / (seconds * sum(known))


def recompute(plan: Plan, facts: Facts) -> Prediction | None:
    """The prediction of the plan's own stage map and actions; None when nothing takes any time."""
    return _step_check(plan, facts).prediction()


def _step_check(plan: Plan, facts: Facts) -> StepCheck:
    order = {layer.name: index for index, layer in enumerate(facts.profile.layers)}
    stage_map = [
        [(order[layer.name], layer.recompute) for layer in stage.layers]
        for stage in plan.stages
    ]
    return StepCheck(Cells(facts), stage_map, parse(plan.actions))


def check_prediction(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Check every number of the plan's prediction against the recomputed one.

    Other runtimes than our own executor have kernels and overlaps that are not known here.
    Of their predictions only what does not depend on these is checked.
    """
    if not facts.is_priced_here:
        _check_without_prices(plan, facts, findings)
        return
    recomputed = recompute(plan, facts)
    if recomputed is None:
        findings.wrong(
            "prediction.step_seconds",
            f"the plan says {plan.prediction.step_seconds}, recomputed 0.",
        )
        return
    _check_time(plan.prediction, recomputed, findings)
    _check_breakdown(plan.prediction, recomputed, findings)
    _check_memory(plan.prediction, recomputed, findings)


def _check_without_prices(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Check what a prediction says whatever its seconds and bytes are: sums, rates, and that the plan fits."""
    stated, job = plan.prediction, facts.job
    step = stated.step_seconds
    tokens = job.global_batch_size * (job.sequence_length or 1)
    findings.close(
        "prediction.tokens_per_second",
        stated.tokens_per_second,
        tokens / step,
        relative=_RELATIVE,
    )
    mfu = _step_check(plan, facts).mfu(step)
    if stated.mfu is None or mfu is None:
        findings.equal("prediction.mfu", stated.mfu, mfu)
    else:
        findings.close("prediction.mfu", stated.mfu, mfu, relative=_RELATIVE)
    if not 0 <= stated.bubble_fraction < 1:
        findings.wrong(
            "prediction.bubble_fraction", f"{stated.bubble_fraction} is no share."
        )
    _check_sum(stated, findings)
    for name in Breakdown.model_fields:
        if getattr(stated.breakdown, name) < -_RELATIVE * step:
            findings.wrong(f"prediction.breakdown.{name}", "it is below zero.")
    _check_memory_sums(plan, facts, findings)
    findings.checked.append(
        "tokens per second and MFU of the stated step, the breakdown's sum, memory's sums, and that it fits"
    )
    findings.checked.append(
        f"not recomputed: the seconds and bytes of the runtime {facts.runtime}, whose kernels are not modelled here"
    )


def _check_sum(stated: Prediction, findings: Findings) -> None:
    total = stated.breakdown.total_seconds
    findings.close(
        "prediction.step_seconds", stated.step_seconds, total, relative=_ROUNDING
    )


def _check_memory_sums(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Check that every rank's parts add up to its peak, within the capacity of a device that the plan uses."""
    rows, ranks = plan.prediction.memory, plan.layout.pipeline_parallel_degree
    numbers = [row.pipeline_rank for row in rows]
    findings.equal("prediction.memory: ranks", numbers, list(range(ranks)))
    capacities = {capacity_bytes(facts, group.device) for group in facts.groups}
    for row in rows:
        where = f"prediction.memory[{row.pipeline_rank}]"
        parts = sum(getattr(row, name) for name in _MEMORY_PARTS)
        findings.equal(f"{where}.peak_bytes", row.peak_bytes, parts)
        if row.capacity_bytes not in capacities:
            known = " or ".join(map(str, sorted(capacities)))
            findings.equal(f"{where}.capacity_bytes", row.capacity_bytes, known)
        _check_fits(where, row, findings)


def _check_fits(where: str, row: RankMemory, findings: Findings) -> None:
    if row.peak_bytes > row.capacity_bytes:
        findings.wrong(
            f"{where}.peak_bytes",
            f"{row.peak_bytes} bytes of {row.capacity_bytes} do not fit.",
        )
    host = row.host_capacity_bytes
    if host is not None and row.host_bytes > host:
        findings.wrong(
            f"{where}.host_bytes",
            f"{row.host_bytes} bytes of {host} do not fit the host.",
        )


def _check_time(stated: Prediction, recomputed: Prediction, findings: Findings) -> None:
    for name in ("step_seconds", "tokens_per_second", "bubble_fraction", "mfu"):
        said, found = getattr(stated, name), getattr(recomputed, name)
        if said is None or found is None:
            findings.equal(f"prediction.{name}", said, found)
        else:
            rounding = (
                _ROUNDING if name == "bubble_fraction" else 0.0
            )  # a difference: it may vanish but for rounding
            findings.close(
                f"prediction.{name}", said, found, relative=_RELATIVE, absolute=rounding
            )
    findings.checked.append(
        "step time by playing the actions, tokens per second, bubble fraction and MFU"
    )


def _room_left(row: RankMemory) -> int:
    """Of device and host, the less: equation (H7)."""
    rooms = [row.capacity_bytes - row.peak_bytes]
    if row.host_bytes > 0 and row.host_capacity_bytes is not None:
        rooms.append(row.host_capacity_bytes - row.host_bytes)
    return min(rooms)


def _check_breakdown(
    stated: Prediction, recomputed: Prediction, findings: Findings
) -> None:
    rounding = _RELATIVE * recomputed.step_seconds
    for name in Breakdown.model_fields:
        said, found = (
            getattr(stated.breakdown, name),
            getattr(recomputed.breakdown, name),
        )
        findings.close(
            f"prediction.breakdown.{name}",
            said,
            found,
            relative=_RELATIVE,
            absolute=rounding,
        )
    _check_sum(stated, findings)
    findings.checked.append("the breakdown part by part, and its sum against the step")


def _check_memory(
    stated: Prediction, recomputed: Prediction, findings: Findings
) -> None:
    findings.equal(
        "prediction.memory: rows", len(stated.memory), len(recomputed.memory)
    )
    for said, found in zip(stated.memory, recomputed.memory, strict=False):
        where = f"prediction.memory[{found.pipeline_rank}]"
        for name in RankMemory.model_fields:
            if name == "device_bytes" and said.device_bytes is None:
                continue  # a plan of a release without this field
            findings.equal(f"{where}.{name}", getattr(said, name), getattr(found, name))
        _check_fits(where, found, findings)
    findings.checked.append(
        "memory of every pipeline rank part by part, its sum, and that it fits the device"
    )
