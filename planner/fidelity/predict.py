"""Predict one measured run with the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner.cost import (
    TICK_SECONDS,
    StageLayers,
    StageMap,
    choose,
    evaluate,
    held_units,
    layout_costs,
    predict_step,
    schedule_of,
    workload,
)
from planner.cost.layers import LayoutCosts
from planner.cost.workload import Workload, with_constants
from planner.fidelity.calibrations import constants_for
from planner.fidelity.rows import Run
from planner.profiler.transformer import Shard, TransformerCounter
from planner.schedule import Schedule
from planner.spec.calibration import DEFAULT, Constants
from planner.spec.cluster import Cluster, NodeGroup
from planner.spec.devices import catalogue
from planner.spec.job import Job
from planner.spec.plan import Prediction
from planner.spec.profile import ModelProfile, RecomputeMode


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the cost model says of a run."""

    run: Run
    prediction: Prediction
    capacity_bytes: int
    """All memory of the device, as torch reports it; the prediction's `reserved_bytes` counts the context."""
    cached_bytes: float = 0.0
    block_activation_bytes: int = 0
    """What the first pipeline rank's blocks keep when it holds most, where memory was measured: what equations of
    activations count (Korthikanti et al. 2022, section 4), without embedding, output layer and receive buffers."""

    @property
    def step_seconds(self) -> float:
        """Seconds of what was timed: one step, or forward and backward of the layers alone."""
        if not self.run.is_one_layer:
            return self.prediction.step_seconds
        parts = self.prediction.breakdown
        return (
            parts.compute_seconds
            + parts.recompute_seconds
            + parts.tensor_parallel_seconds
        )

    @property
    def time_error(self) -> float | None:
        """(predicted - measured) / measured."""
        measured = self.run.step_seconds
        return None if measured is None else self.step_seconds / measured - 1

    @property
    def memory_bytes(self) -> float:
        """Bytes of the rank and of the kind that was measured."""
        ranks = self.prediction.memory
        chosen = {"first": ranks[:1], "last": ranks[-1:], "largest": ranks}[
            self.run.memory_rank
        ]
        if self.run.memory_kind == "device":
            return max(row.peak_bytes for row in chosen) + self.cached_bytes
        cached = self.cached_bytes if self.run.memory_kind == "reserved" else 0.0
        return max(row.peak_bytes - row.reserved_bytes for row in chosen) + cached

    @property
    def memory_error(self) -> float | None:
        """(predicted - measured) / measured."""
        measured = self.run.memory_bytes
        return None if measured is None else self.memory_bytes / measured - 1

    @property
    def fits(self) -> bool:
        """Does it fit the device?"""
        return (
            max(row.peak_bytes for row in self.prediction.memory) <= self.capacity_bytes
        )


def predict_run(run: Run, constants: Constants | None = None) -> Predicted:
    """Step time and memory of a run.

    Args:
        run: what was measured.
        constants: None: those that were fitted to its framework and device.
    """
    costs = costs_of(run, constants)
    return predicted(run, costs, schedule_of(costs), choose(costs, stage_map(run)))


def predicted(
    run: Run, costs: LayoutCosts, schedule: Schedule, stages: Sequence[StageLayers]
) -> Predicted:
    """Step time and memory of a run whose layers are priced."""
    capacity = costs.work.device.memory_bytes
    cached = costs.work.constants.cached_bytes
    activations = (
        0
        if run.memory_bytes is None
        else _block_activations(run, costs, schedule, stages)
    )
    return Predicted(
        run, predict_step(costs, schedule, stages), capacity, cached, activations
    )


def _block_activations(
    run: Run, costs: LayoutCosts, schedule: Schedule, stages: Sequence[StageLayers]
) -> int:
    units = held_units(costs, stages, schedule)[0]
    blocks = range(1, run.shape.layers + 1)
    kept = {
        index: sum(
            cost.activation_bytes for layer, cost in stages[index] if layer in blocks
        )
        for index in units
    }
    return sum(count * kept[index] for index, count in units.items())


def costs_of(run: Run, constants: Constants | None = None) -> LayoutCosts:
    """Every layer of the run's model, priced under its layout."""
    return layout_costs(workload_of(run, constants), run.layout)


def workload_of(run: Run, constants: Constants | None = None) -> Workload:
    """Profile, cluster and job of a run."""
    if constants is None:
        architecture = catalogue()[run.device].architecture
        constants = constants_for(run.framework.name, architecture)
    return workload(
        _profile(run),
        _cluster(run),
        _job(run),
        framework=run.framework,
        constants=constants,
    )


def stage_map(run: Run) -> StageMap:
    """Embedding, blocks and head on their stages."""
    stages, start, head = [], 1, run.shape.layers + 1
    for index, count in enumerate(run.blocks_per_stage):
        blocks: list[tuple[int, RecomputeMode]] = [
            (layer, run.recompute) for layer in range(start, start + count)
        ]
        start += count
        first: list[tuple[int, RecomputeMode]] = [(0, "none")] if index == 0 else []
        last: list[tuple[int, RecomputeMode]] = (
            [(head, "none")] if index == len(run.blocks_per_stage) - 1 else []
        )
        if run.splits_vocabulary:
            first, last = [*first, (head + index, "none")], []
        stages.append(first + blocks + last)
    return stages


@dataclass(frozen=True)
class Prepared:
    """A run whose documents are read once: for pricing it under many constants."""

    run: Run
    work: Workload
    """Under the default constants, whose links are the cluster's own."""
    schedule: Schedule
    stages: StageMap

    def costs(self, constants: Constants) -> LayoutCosts:
        """Every layer, priced under these constants."""
        return layout_costs(with_constants(self.work, constants), self.run.layout)

    def seconds(self, costs: LayoutCosts) -> float:
        """Step seconds at these prices; cheaper than a whole prediction."""
        stages = choose(costs, self.stages)
        if self.run.is_one_layer:
            return predicted(self.run, costs, self.schedule, stages).step_seconds
        return evaluate(costs, self.schedule, stages).total_ticks * TICK_SECONDS


def prepare(run: Run) -> Prepared:
    """Read a run's documents once."""
    work = workload_of(run, DEFAULT)
    return Prepared(
        run, work, schedule_of(layout_costs(work, run.layout)), stage_map(run)
    )


@lru_cache(maxsize=4096)
def _profile(run: Run) -> ModelProfile:
    layout = run.layout
    shard = Shard(
        micro_batch_size=layout.micro_batch_size,
        sequence_length=run.sequence_length,
        tensor=layout.tensor_parallel_degree,
        context=layout.context_parallel_degree,
        expert=layout.expert_parallel_degree,
        sequence_parallel=layout.sequence_parallel,
        splits_experts=run.splits_experts,
    )
    heads = len(run.blocks_per_stage) if run.splits_vocabulary else 1
    counter = TransformerCounter(
        run.shape, run.framework, shard, run.attention, run.dtype, heads, run.is_fp8
    )
    return counter.profile(run.source_id, (run.recompute,))


@lru_cache(maxsize=4096)
def _cluster(run: Run) -> Cluster:
    group = NodeGroup(
        device=run.device,
        nodes=run.nodes,
        devices_per_node=run.devices_per_node,
        inter_node=run.inter_node,
    )
    return Cluster(node_groups=(group,))


def _job(run: Run) -> Job:
    mixed = "fp16-mixed" if run.dtype == "fp16" else "bf16-mixed"
    return Job(
        global_batch_size=run.global_batch_size,
        sequence_length=run.sequence_length,
        precision="fp8" if run.is_fp8 else mixed if run.keeps_master else "bf16",
        optimizer="adamw",
        memory_headroom=0,
    )
