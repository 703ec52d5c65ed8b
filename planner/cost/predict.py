"""Predict a measured run by the path that plans take.

documents -> operations that the runtime launches -> seconds and bytes -> one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from planner import runtimes
from planner.cost.interval import Basis, with_interval
from planner.cost.layers import LayoutCosts
from planner.cost.layout import layout_costs
from planner.cost.memory import StageLayers
from planner.cost.operations import DecoderCounts, Split, decoder_profile
from planner.cost.stage_rule import default_blocks
from planner.cost.step import (
    StageMap,
    choose,
    evaluate,
    predict_step,
    rank_memory,
    schedule_of,
)
from planner.cost.ticks import TICK_SECONDS
from planner.cost.workload import Workload, with_constants, workload
from planner.errors import UnsupportedError
from planner.runtimes import Runtime
from planner.schedule import Schedule
from planner.spec.calibration import (
    DEFAULT,
    CalibrationTable,
    Constants,
    constants_for,
)
from planner.spec.cluster import Link
from planner.spec.devices import catalogue
from planner.spec.job import COMPUTE_TYPE
from planner.spec.plan import Prediction, RankMemory
from planner.spec.profile import DataType, RecomputeMode
from planner.spec.run import MemoryKind, MemoryRank, Run


@dataclass(frozen=True)
class PricedRun:
    """A run whose documents are read once, for prices under many constants."""

    run: Run
    runtime: Runtime
    work: Workload
    """Under the default constants, whose links are the cluster's own."""
    stage_map: StageMap

    @cached_property
    def schedule(self) -> Schedule:
        """The order of the layout."""
        return schedule_of(layout_costs(self.work, self.run.layout))

    def costs(self, constants: Constants) -> LayoutCosts:
        """Every layer, priced under these constants."""
        return layout_costs(with_constants(self.work, constants), self.run.layout)

    def stages(self, costs: LayoutCosts) -> tuple[StageLayers, ...]:
        """The layers of every stage at these prices."""
        return choose(costs, self.stage_map)

    def step_seconds(self, constants: Constants) -> float:
        """Seconds of what was timed: a step, or the blocks alone."""
        costs = self.costs(constants)
        stages = self.stages(costs)
        if self.run.result.timed == "layers":
            layers = [cost for stage in stages for _, cost in stage]
            ticks = sum(one.forward_ticks + one.backward_ticks for one in layers)
            return ticks * TICK_SECONDS
        step = evaluate(costs, self.schedule, stages)
        return step.total_ticks * TICK_SECONDS

    def memory(self, constants: Constants) -> tuple[RankMemory, ...]:
        """Memory of every pipeline rank under these constants."""
        costs = self.costs(constants)
        return rank_memory(costs, self.schedule, self.stages(costs))

    def prediction(self, constants: Constants) -> RunPrediction:
        """Step time and memory under these constants."""
        costs = self.costs(constants)
        prediction = predict_step(costs, self.schedule, self.stages(costs))
        return RunPrediction(
            run=self.run,
            timed_seconds=self.step_seconds(constants),
            prediction=prediction,
            cached_fraction=constants.cached_fraction,
            device_bytes=self.work.device.memory_bytes,
        )


@dataclass(frozen=True, slots=True)
class RunPrediction:
    """What the cost model predicts for a run."""

    run: Run
    timed_seconds: float
    """Of what was timed: a step, or the blocks alone."""
    prediction: Prediction
    cached_fraction: float
    """Bytes that the allocator caches / its peak."""
    device_bytes: int

    @property
    def step_seconds(self) -> float:
        """Seconds of a whole step."""
        return self.prediction.step_seconds

    @property
    def step_seconds_80(self) -> tuple[float, float] | None:
        """Interval that contains a measured step with a probability of 80 %."""
        return self.prediction.step_seconds_80

    @property
    def out_of_memory_probability(self) -> float | None:
        """Probability that the peak exceeds the device's memory."""
        return self.prediction.out_of_memory_probability

    @property
    def memory_bytes(self) -> float:
        """Bytes of the kind, and on the rank, that was measured."""
        result = self.run.result
        return self.memory_bytes_of(result.memory_kind, result.memory_rank)

    def memory_bytes_of(self, kind: MemoryKind, rank: MemoryRank) -> float:
        """Bytes as a counter of this kind shows them on a pipeline rank."""
        return counted_bytes(self.prediction.memory, kind, rank, self.cached_fraction)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        peak = max(row.peak_bytes for row in self.prediction.memory)
        return peak <= self.device_bytes


def predict_run(run: Run, calibration: CalibrationTable | None = None) -> RunPrediction:
    """Return the step time and memory of a measured run, with their intervals.

    Args:
        run: its measured values are not used.
        calibration: None: the one of this release.

    Raises:
        SpecError: the documents do not belong together, or name something unknown.
    """
    priced = priced_run(run)
    owner = priced.runtime.calibration_owner
    group = run.cluster.node_groups[0]
    known = catalogue().get(priced.work.device.id)
    constants = constants_for(
        owner,
        known.architecture if known else "",
        calibration=calibration,
        has_intra_node=_is_effective(group.intra_node),
        has_inter_node=_is_effective(group.inter_node),
        data_format=data_format(priced),
        source=run.source.name,
    )
    found = priced.prediction(constants)
    basis = Basis(owner, run.cluster, calibration)
    return replace(found, prediction=with_interval(found.prediction, basis))


def data_format(priced: PricedRun) -> str:
    """Return the format of matrix products, such as ``bf16-mixed`` or ``fp8-current``."""
    precision = priced.run.job.precision
    if precision != "fp8":
        return precision
    return f"fp8-{priced.runtime.fp8_scaling}"


def _is_effective(link: Link | None) -> bool:
    """Return whether a link has measured figures, which are used unchanged."""
    return link is not None and not link.is_nominal


def counted_bytes(
    rows: Sequence[RankMemory],
    kind: MemoryKind,
    rank: MemoryRank,
    cached_fraction: float,
) -> float:
    """Return the bytes that a counter of this kind shows on a pipeline rank.

    Args:
        rows: memory of every pipeline rank.
        kind: of the counter.
        rank: on which pipeline rank.
        cached_fraction: bytes that the allocator caches / its peak.
    """
    chosen = {"first": rows[:1], "last": rows[-1:], "largest": rows}[rank]
    allocated = max(allocated_bytes(row) for row in chosen)
    if kind == "allocated":
        return allocated
    reserved = allocated * (1 + cached_fraction)
    if kind == "device":
        return reserved + chosen[0].reserved_bytes
    return reserved


def allocated_bytes(row: RankMemory) -> int:
    """Return the bytes that the framework's allocator counts."""
    return row.peak_bytes - row.reserved_bytes


def priced_run(run: Run) -> PricedRun:
    """Read the documents of a run, and count its operations.

    Raises:
        SpecError: the documents do not belong together, or name something unknown.
    """
    runtime = runtime_of(run)
    heads = run.layout.pipeline_parallel_degree if runtime.vocab_in_pipeline else 1
    counts = DecoderCounts(
        model=run.model,
        runtime=runtime,
        split=split_of(run),
        dtype=cast(DataType, COMPUTE_TYPE[run.job.precision]),
        is_fp8=run.job.precision == "fp8",
        heads=heads,
    )
    modes: tuple[RecomputeMode, ...] = ("none",)
    if run.layout.recompute != "none":
        modes = ("none", block_mode(run))
        if modes[1] not in counts.modes:
            raise UnsupportedError(
                f"{runtime.name} does not recompute this model in mode {modes[1]}.",
                field="layout.recompute",
                hint=f"use one of {', '.join(counts.modes)}.",
            )
    profile = decoder_profile(counts, run.source.id or "run", modes)
    work = workload(profile, run.cluster, run.job, framework=runtime, constants=DEFAULT)
    return PricedRun(run, runtime, work, stage_map(run, runtime, heads))


def runtime_of(run: Run) -> Runtime:
    """Return the traits of the run's framework, with the run's own settings."""
    choice = run.runtime
    found = runtimes.get(choice.name, release=choice.release, settings=choice.settings)
    return found.without_overlap() if found.launch_blocking else found


def split_of(run: Run) -> Split:
    """Return how a micro-batch of the run is split over ranks."""
    layout = run.layout
    return Split(
        micro_batch_size=layout.micro_batch_size,
        sequence_length=run.job.sequence_length,
        tensor=layout.tensor_parallel_degree,
        context=layout.context_parallel_degree,
        expert=layout.expert_parallel_degree,
        expert_tensor=layout.expert_tensor_parallel_degree,
        sequence_parallel=layout.sequence_parallel,
    )


def block_mode(run: Run) -> RecomputeMode:
    """Return the recompute mode of the run's recomputed blocks."""
    word = run.layout.recompute
    if word == "none" or word == "per-layer":
        return "full"
    return word


def stage_map(run: Run, runtime: Runtime, heads: int = 1) -> StageMap:
    """Return (layer index, recompute mode) of every layer, by stage."""
    layout, model = run.layout, run.model
    stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
    blocks = run.stages or default_blocks(model, runtime, stages)
    modes = _block_modes(run, runtime)
    first_head = 1 + model.layers + model.multi_token_layers
    found: list[list[tuple[int, RecomputeMode]]] = []
    start = 0
    for stage, count in enumerate(blocks):
        layers: list[tuple[int, RecomputeMode]] = []
        if stage == 0:
            layers.append((0, "none"))
        for block in range(start, start + count):
            layers.append((1 + block, modes[block]))
        start += count
        if stage == stages - 1:
            extra = range(1 + model.layers, first_head)
            layers += [(layer, modes[-1]) for layer in extra]
        if heads > 1 or stage == stages - 1:
            layers.append((first_head + (stage if heads > 1 else 0), "none"))
        found.append(layers)
    return found


def _block_modes(run: Run, runtime: Runtime) -> list[RecomputeMode]:
    """Return the recompute mode of every block."""
    if run.layout.recompute == "none":
        return ["none"] * run.model.layers
    mode = block_mode(run)
    share = runtime.recompute_fraction
    modes: list[RecomputeMode] = []
    for block in range(run.model.layers):
        is_recomputed = int((block + 1) * share) > int(block * share)
        modes.append(mode if is_recomputed else "none")
    return modes
