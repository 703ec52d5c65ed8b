"""Where each second and each byte of a forecast goes: per stage and micro-batch, per pipeline rank and step.

The parts of every rank add up to the forecast's step, and the parts of its memory to its peak. The mean over the ranks of
idle and waiting seconds is the bubble and the transfers of the forecast's breakdown, but for the exchange of (S1), which
is part of the work here. Every part names the equations that it comes from (`planner.cost`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.cost import (
    TICK_SECONDS,
    LayerCost,
    LayoutCosts,
    StageLayers,
    choose,
    durations,
    held_units,
    last_column,
    layout_costs,
    order_of,
    stage_memory,
    tail_ticks,
    workload,
)
from planner.cost.memory import host_states_bytes
from planner.cost.step import Played, by_rank
from planner.schedule import Durations, Schedule
from planner.spec.calibration import CalibrationTable, Constants
from planner.spec.cluster import Cluster
from planner.spec.job import Job
from planner.spec.plan import Forecast, RankMemory
from planner.spec.profile import ModelProfile

EQUATIONS = {
    "forward_seconds": "T1 C2",
    "backward_seconds": "T2 C3",
    "recompute_seconds": "T2 C4",
    "offload_seconds": "O1",
    "collectives_seconds": "T1 T2 L1-L5",
    "gathers_seconds": "T6",
    "exchange_seconds": "S1",
    "transfer_seconds": "T5 L4",
    "work_seconds": "S1",
    "idle_seconds": "S2",
    "reduction_seconds": "T4 L1-L3",
    "shared_seconds": "S3",
    "hidden_seconds": "S5",
    "optimizer_seconds": "T3 O5",
    "wait_seconds": "S4 S7",
    "step_seconds": "S4",
    "parameters_bytes": "M1",
    "gradients_bytes": "M1",
    "optimizer_bytes": "M1 O6",
    "saved_bytes": "M2 M5",
    "buffers_bytes": "M2 O2",
    "temporary_bytes": "M3 M5 O3 O6",
    "gathered_bytes": "M3",
    "reserved_bytes": "M4",
    "peak_bytes": "M4",
    "saved_on_host_bytes": "O4",
    "states_on_host_bytes": "O7",
    "host_bytes": "O8",
}
"""Part -> equations of `planner.cost`: T and C of a layer, L of links, S of the step, M of memory, O of offloading."""


@dataclass(frozen=True, slots=True)
class StageAccount:
    """One stage and micro-batch: a forward and its backward."""

    stage: int
    pipeline_rank: int
    layers: int
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    collectives_seconds: float
    """Tensor-, context- and expert-parallel, forward, backward and recomputed."""
    offload_seconds: float
    """Saved activations on their way to the host and back."""
    gathers_seconds: float
    """ZeRO 3: what compute does not hide."""
    exchange_seconds: float
    """With the neighbouring stages: host time that nothing hides."""
    transfer_seconds: float
    """Of one tensor to the next stage, beside compute; zero for the last."""
    in_flight: int
    """Micro-batches held at most."""


@dataclass(frozen=True, slots=True)
class RankAccount:
    """One pipeline rank: its step, and its memory at the peak."""

    pipeline_rank: int
    work_seconds: float
    """All micro-batches of its stages, transfers and waiting apart."""
    idle_seconds: float
    """Waiting for other ranks and for transfers until its last action ends."""
    reduction_seconds: float
    """Of gradients over the data-parallel ranks, and gathers of updated parameters, before any of it is hidden."""
    shared_seconds: float
    """Exchange of the gradients of parameters that other stages hold too."""
    hidden_seconds: float
    """What runs beside compute, below zero."""
    optimizer_seconds: float
    wait_seconds: float
    """Waiting for the rank that ends last; 0 for that one."""
    step_seconds: float
    """Sum of the above: the forecast's step."""
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    """Activations of the micro-batches in flight."""
    buffers_bytes: int
    """Outputs kept for the backward, with offloaded activations inputs too, and receive buffers."""
    temporary_bytes: int
    gathered_bytes: int
    """ZeRO 3: whole parameters of the layers at work."""
    reserved_bytes: int
    peak_bytes: int
    """Sum of the above."""
    capacity_bytes: int
    saved_on_host_bytes: int
    """Activations of the micro-batches in flight."""
    states_on_host_bytes: int
    """Of the optimizer."""
    host_bytes: int
    """Sum of both."""
    host_capacity_bytes: int | None
    """None: not known."""


@dataclass(frozen=True, slots=True)
class Account:
    """Of one forecast."""

    framework: str
    constants: Constants
    micro_batches: int
    last_rank: int
    """Pipeline rank that ends last: the others wait for it."""
    stages: tuple[StageAccount, ...]
    ranks: tuple[RankAccount, ...]


def account(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    forecast: Forecast,
    *,
    framework: str | None = None,
    constants: Constants | None = None,
    calibration: CalibrationTable | None = None,
) -> Account:
    """Return the parts of a forecast that `predict` gave for the same documents, framework and constants.

    Args:
        profile: of the model.
        cluster: what the job may use.
        job: what is to be trained.
        forecast: of one layout.
        framework: whose traits the forecast is for; None: the job's runtime.
        constants: None: those of the calibration for this framework and device.
        calibration: None: the one of this release, unless constants are given.

    Raises:
        SpecError: as `predict` does.
    """
    work = workload(
        profile,
        cluster,
        job,
        framework=framework,
        constants=constants,
        calibration=calibration,
    )
    costs = layout_costs(work, forecast.layout)
    order = {layer.name: index for index, layer in enumerate(profile.layers)}
    stage_map = [
        [(order[layer.name], layer.recompute) for layer in stage.layers]
        for stage in forecast.stages
    ]
    return _account(
        last_column(costs, order_of(costs, forecast.actions), choose(costs, stage_map))
    )


def _account(played: Played) -> Account:
    """Where replicas differ, of those that end last."""
    costs, schedule, stages, step = (
        played.costs,
        played.schedule,
        played.stages,
        played.step,
    )
    spent, held = durations(costs, stages), held_units(costs, stages, schedule)
    tails = tail_ticks(costs, by_rank(schedule, stages))
    ends = [int(end) for end in step.simulation.end_seconds]
    return Account(
        framework=costs.work.framework.name,
        constants=costs.work.constants,
        micro_batches=costs.micro_batches,
        last_rank=step.last_rank,
        stages=tuple(
            _stage(costs, stages[stage], spent, stage, rank, held[rank][stage])
            for stage, rank in enumerate(schedule.stage_ranks)
        ),
        ranks=tuple(
            _rank(
                costs,
                stages,
                schedule,
                spent,
                memory,
                held[rank],
                ends[rank],
                tails[rank],
                step.total_ticks,
            )
            for rank, memory in enumerate(stage_memory(costs, stages, schedule))
        ),
    )


def _stage(
    costs: LayoutCosts,
    layers: StageLayers,
    spent: Durations,
    stage: int,
    rank: int,
    in_flight: int,
) -> StageAccount:
    mine = [cost for _, cost in layers]
    is_last = stage == len(spent.forward) - 1
    worked = sum(cost.forward_ticks + cost.backward_ticks for cost in mine)
    return StageAccount(
        stage=stage,
        pipeline_rank=rank,
        layers=len(mine),
        forward_seconds=_sum(mine, "forward_compute_ticks"),
        backward_seconds=_sum(mine, "backward_compute_ticks"),
        recompute_seconds=_sum(mine, "recompute_ticks"),
        collectives_seconds=_sum(mine, "communication_ticks"),
        offload_seconds=_sum(mine, "offload_ticks"),
        gathers_seconds=_sum(mine, "gather_ticks"),
        exchange_seconds=(_worked(spent, stage) - worked) * TICK_SECONDS,
        transfer_seconds=0.0
        if is_last
        else spent.transfer_forward[stage] * TICK_SECONDS,
        in_flight=in_flight,
    )


def _rank(
    costs: LayoutCosts,
    stages: Sequence[StageLayers],
    schedule: Schedule,
    spent: Durations,
    memory: RankMemory,
    units: Mapping[int, int],
    end: int,
    tail: tuple[int, int],
    step_ticks: int,
) -> RankAccount:
    rank = memory.pipeline_rank
    held = schedule.stages_of(rank)
    layers = [cost for stage in held for _, cost in stages[stage]]
    work = costs.micro_batches * int(sum(_worked(spent, stage) for stage in held))
    reduction = _reduction_ticks(
        costs.on_rank(rank),
        layers,
        {layer for stage in held for layer, _ in stages[stage]},
    )
    shared = _shared_ticks(costs, by_rank(schedule, stages), rank)
    states_on_host = host_states_bytes(
        costs.on_rank(rank), [layer for stage in held for layer in stages[stage]]
    )
    saved = sum(
        count * sum(cost.activation_bytes for _, cost in stages[stage])
        for stage, count in units.items()
    )
    return RankAccount(
        pipeline_rank=rank,
        work_seconds=work * TICK_SECONDS,
        idle_seconds=(end - work) * TICK_SECONDS,
        reduction_seconds=reduction * TICK_SECONDS,
        shared_seconds=shared * TICK_SECONDS,
        hidden_seconds=(tail[0] - reduction - shared) * TICK_SECONDS,
        optimizer_seconds=tail[1] * TICK_SECONDS,
        wait_seconds=(step_ticks - end - sum(tail)) * TICK_SECONDS,
        step_seconds=step_ticks * TICK_SECONDS,
        parameters_bytes=memory.parameters_bytes,
        gradients_bytes=memory.gradients_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        saved_bytes=saved,
        buffers_bytes=memory.activations_bytes - saved,
        temporary_bytes=memory.temporary_bytes - costs.on_rank(rank).gathered_bytes,
        gathered_bytes=costs.on_rank(rank).gathered_bytes,
        reserved_bytes=memory.reserved_bytes,
        peak_bytes=memory.peak_bytes,
        capacity_bytes=memory.capacity_bytes,
        saved_on_host_bytes=memory.host_bytes - states_on_host,
        states_on_host_bytes=states_on_host,
        host_bytes=memory.host_bytes,
        host_capacity_bytes=memory.host_capacity_bytes,
    )


def _reduction_ticks(
    costs: LayoutCosts, layers: Sequence[LayerCost], held: set[int]
) -> int:
    """Of the rank's gradients, those that several of its layers share once: equation (S3)."""
    spared = sum(
        max(0, len(held & set(shared.layers)) - 1) * shared.reduction_ticks
        for shared in costs.shared
    )
    return (
        costs.reduction_latency_ticks
        + sum(cost.reduction_ticks for cost in layers)
        - spared
    )


def _worked(spent: Durations, stage: int) -> float:
    """Ticks of one micro-batch."""
    again = spent.recompute[stage] if spent.recompute else 0
    return (
        spent.forward[stage]
        + spent.backward_input[stage]
        + spent.backward_weight[stage]
        + again
    )


def _shared_ticks(costs: LayoutCosts, ranks: Sequence[StageLayers], rank: int) -> int:
    """Exchange of parameters that another rank holds too: equation (S3)."""
    holders = [{layer for layer, _ in layers} for layers in ranks]
    return sum(
        shared.exchange_ticks
        for shared in costs.on_rank(rank).shared
        if holders[rank] & set(shared.layers)
        and sum(bool(held & set(shared.layers)) for held in holders) > 1
    )


def _sum(layers: Sequence[LayerCost], name: str) -> float:
    ticks: int = sum(getattr(cost, name) for cost in layers)
    return ticks * TICK_SECONDS
