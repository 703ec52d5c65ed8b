"""One training step of a layout and stage map: simulate the schedule, add what follows it, say where the time goes.

(S1)  F(s) = sum of f(l) over the stage's layers, B(s) = sum of b(l, r), and in a pipeline half of the time that
             an exchange with the neighbours takes and nothing hides (`transfer_seconds`)  -> durations()
      of sequence chunks, their parts: planner.cost.chunks
      where the schedule recomputes ahead of a backward (torchgpipe), B is that of the mode that recomputes least, and
      the recomputation R(s) = max(0, sum of b(l, r) - b(l, least)) is paid by the micro-batches below its stop only
(S2)  schedule with F, B and transfers c(s) between neighbours -> end(p) of pipeline rank p -> simulate
(S3)  tail(p) = reduction latency + sum of g(l) + exchange of parameters shared with another stage
                + sum of u(l); what several layers of the stage share is reduced and updated once; over all
                stages of the rank                                                         -> tail_ticks()
      with two copies of every stage (chimera, dualpipe) a rank holds two stages, and the gradients of each are summed
      over twice the ranks, those of both copies                                          -> planner.cost.groups
(S8)  a schedule without a flush (pipedream): step = the time of M micro-batches in the steady state + the longest
      tail(p); the former is the largest over all runs r..q of neighbouring ranks of M / (q - r + 1) x (sum of F(s) + B(s)
      over the run + twice the transfers inside it)              -> planner.schedule.pipedream.steady_micro_batches()
(S5)  a framework that overlaps them hides gradient reduction behind `overlap_fraction` of the last micro-batch's
      backward, and ZeRO's gathers of updated parameters behind that of the first forward -> tail_ticks()
(S4)  step = max over p of end(p) + tail(p); where no stage waits for the others before its next step
      (`staggers_steps`), counted from its own first action                                 -> evaluate()
(S6)  where ranks differ: of all columns of alike data ranks the one that ends last; each plays the schedule of its
      own number of micro-batches. Memory of a pipeline rank: of the column with least room left
                                                                            -> last_column(), rank_memory()
(S7)  breakdown: the mean over the pipeline ranks of the column that ends last. The parts of every rank add up to
      the step: its layers' compute, recomputation, exchanges and copies; tail(p); what transfers add to the step;
      and the bubble, which is all that is left: waiting for other ranks, in the schedule and at the step's end,
      if transfers took no time                                                      -> _breakdown()
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.cost.chunks import per_chunk
from planner.cost.groups import has_two_copies
from planner.cost.interval import Basis, with_interval
from planner.cost.layers import LayoutCosts
from planner.cost.layout import layout_costs
from planner.cost.memory import (
    StageLayers,
    shared_on_several_stages,
    stage_memory,
    without_recompute,
)
from planner.cost.pricing import LayerCost
from planner.cost.ticks import TICK_SECONDS, ticks
from planner.cost.workload import workload
from planner.errors import DocumentError
from planner.schedule import Durations, Schedule, Simulation, build, find, simulate
from planner.schedule.pipedream import steady_micro_batches
from planner.spec.plan import Breakdown, Plan, Prediction, RankMemory
from planner.spec.profile import ModelProfile, RecomputeMode

StageMap = Sequence[Sequence[tuple[int, RecomputeMode]]]
"""Per stage: (layer index, recompute mode) of its layers, in order."""


@dataclass(frozen=True, slots=True)
class Step:
    """A priced step, in ticks."""

    total_ticks: int
    last_rank: int
    """Pipeline rank that ends last."""
    simulation: Simulation
    tails: tuple[int, ...]
    steady_ticks: float | None = None
    """Of all micro-batches where steps follow without a flush."""

    @property
    def bubble_fraction(self) -> float:
        """Idle part of all ranks between the first and the last action of a step."""
        if self.steady_ticks is None:
            return self.simulation.bubble_fraction
        busy = self.simulation.busy_seconds
        if not self.steady_ticks:
            return 0.0
        return 1 - sum(busy) / (len(busy) * self.steady_ticks)


def schedule_of(costs: LayoutCosts) -> Schedule:
    """The layout's schedule for its micro-batches."""
    layout = costs.layout
    return build(
        layout.schedule,
        ranks=layout.pipeline_parallel_degree,
        micro_batches=costs.micro_batches,
        virtual_stages=layout.virtual_stages_per_rank
        if layout.virtual_stages_per_rank > 1
        else None,
        sequence_chunks=layout.sequence_chunks,
    )


def order_of(costs: LayoutCosts, actions: Sequence[Sequence[str]]) -> Schedule:
    """The order of a plan's or forecast's actions; without any, the one that the layout names.

    One that was synthesized cannot be built again from the layout.
    """
    layout = costs.layout
    if not actions:
        return schedule_of(costs)
    return Schedule.from_text(
        actions, name=layout.schedule, sequence_chunks=layout.sequence_chunks
    )


def choose(costs: LayoutCosts, stage_map: StageMap) -> tuple[StageLayers, ...]:
    """The cost of every layer in its chosen mode; in a column, on the rank of its stage."""
    return tuple(
        tuple(
            (layer, costs.on_stage(index).layers[layer][mode]) for layer, mode in stage
        )
        for index, stage in enumerate(stage_map)
    )


class StageTicks(NamedTuple):
    """Ticks of a stage's actions, of every chunk of a micro-batch: equation (S1)."""

    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    recompute: tuple[int, ...]


def stage_ticks(
    costs: LayoutCosts, stages: Sequence[StageLayers], stage: int
) -> StageTicks:
    """Return what the actions of a stage last without their exchanges."""
    layers = [cost for _, cost in stages[stage]]
    forward = sum(cost.forward_ticks for cost in layers)
    backward = sum(cost.backward_ticks for cost in layers)
    weight = sum(cost.backward_weight_ticks for cost in layers)
    recompute = sum(cost.recompute_ticks for cost in layers)
    chunks = costs.layout.sequence_chunks
    if chunks > 1:
        # What recomputes before a chunk's backward lasts as its backward does.
        recompute = 0
    elif find(costs.layout.schedule).recompute_modes:
        kept = without_recompute(costs, stages, stage)
        least = sum(cost.backward_ticks for cost in kept)
        recompute = max(0, backward - least)
        backward = least + recompute
    backward_input = backward - weight - recompute
    if chunks == 1:
        return StageTicks((forward,), (backward_input,), (weight,), (recompute,))
    of_forward = sum(cost.attention.forward_ticks for cost in layers)
    of_backward = sum(cost.attention.backward_ticks for cost in layers)
    return StageTicks(
        forward=per_chunk([forward], [of_forward], chunks),
        backward_input=per_chunk([backward_input], [of_backward], chunks),
        backward_weight=per_chunk([weight], [0], chunks),
        recompute=(0,) * chunks,
    )


def durations(
    costs: LayoutCosts, stages: Sequence[StageLayers], *, transfers: bool = True
) -> Durations:
    """Ticks per stage for the simulator: equation (S1); without transfers to tell what they cost."""
    boundaries = range(len(stages) - 1)
    moves = [0] * len(boundaries)
    waiting = [0] * len(stages)
    if transfers and boundaries:
        moves = [costs.transfer_ticks(s, stages[s][-1][0]) for s in boundaries]
        waiting = [costs.on_stage(s).waiting_ticks for s in range(len(stages))]
    parts = [stage_ticks(costs, stages, s) for s in range(len(stages))]
    return joined_durations(parts, moves, waiting)


def joined_durations(
    parts: Sequence[StageTicks], moves: Sequence[int], waiting: Sequence[int]
) -> Durations:
    """Return the durations of all stages.

    Args:
        parts: of every stage.
        moves: ticks of a transfer over every stage boundary.
        waiting: ticks that every stage's actions wait for its neighbours.
    """
    forward: list[int] = []
    backward_input: list[int] = []
    backward_weight: list[int] = []
    recompute: list[int] = []
    for part, waits in zip(parts, waiting, strict=True):
        forward += [waits + each for each in part.forward]
        backward_input += [waits + each for each in part.backward_input]
        backward_weight += part.backward_weight
        recompute += part.recompute
    return Durations(
        forward=tuple(forward),
        backward_input=tuple(backward_input),
        backward_weight=tuple(backward_weight),
        recompute=tuple(recompute),
        transfer_forward=tuple(moves),
        transfer_backward=tuple(moves),
        sequence_chunks=len(parts[0].forward),
    )


def by_rank(
    schedule: Schedule, stages: Sequence[StageLayers]
) -> tuple[StageLayers, ...]:
    """All layers of every pipeline rank: those of its virtual stages together."""
    return tuple(
        tuple(layer for stage in schedule.stages_of(rank) for layer in stages[stage])
        for rank in range(schedule.ranks)
    )


def tail_ticks(
    costs: LayoutCosts, ranks: Sequence[StageLayers]
) -> tuple[tuple[int, int], ...]:
    """(gradient reduction, optimizer) of every pipeline rank, by its layers: equations (S3) and (S5)."""
    return tuple(tail_of_rank(costs, ranks, index) for index in range(len(ranks)))


def tail_of_rank(
    costs: LayoutCosts, ranks: Sequence[StageLayers], index: int
) -> tuple[int, int]:
    """Return `tail_ticks` of one rank.

    It depends on the rank's layers, and on which shared parameters other ranks hold.
    """
    layers = [cost for _, cost in ranks[index]]
    costs = costs.on_rank(index)
    reduction = (
        costs.reduction_latency_ticks
        + sum(cost.reduction_ticks for cost in layers)
        - _hidden(costs, layers)
    )
    optimizer = sum(cost.optimizer_ticks for cost in layers) + ticks(
        costs.work.constants.step_seconds
    )
    held = {layer for layer, _ in ranks[index]}
    # A rank and its mirror image hold the same stages, and sum all their gradients anyway.
    copies = 2 if has_two_copies(costs.layout) else 1
    for shared in costs.shared:
        repeated = max(0, len(held.intersection(shared.layers)) - 1)
        reduction -= repeated * shared.reduction_ticks
        optimizer -= repeated * (shared.tail_ticks - shared.reduction_ticks)
        holders = shared_on_several_stages(ranks, shared.layers)
        if index in holders and len(holders) > copies:
            reduction += shared.exchange_ticks
    return reduction, optimizer


def _hidden(costs: LayoutCosts, layers: Sequence[LayerCost]) -> int:
    """Ticks of the reduction that run beside compute: equation (S5). The first layer's gradients come last, so their
    reduction is never hidden."""
    framework, share, hidden = (
        costs.work.framework,
        costs.work.constants.overlap_fraction,
        0,
    )
    if framework.overlaps_reduction:
        reduced = sum(cost.reduction_ticks - cost.update_ticks for cost in layers[1:])
        hidden += min(reduced, int(share * sum(cost.backward_ticks for cost in layers)))
    if framework.overlaps_gathers:
        gathered = sum(cost.update_ticks for cost in layers[1:])
        hidden += min(gathered, int(share * sum(cost.forward_ticks for cost in layers)))
    return hidden


def evaluate(
    costs: LayoutCosts, schedule: Schedule, stages: Sequence[StageLayers]
) -> Step:
    """Ticks of one step: equations (S2), (S4) and (S6)."""
    return last_column(costs, schedule, stages).step


@dataclass(frozen=True, slots=True)
class Played:
    """A stage map on ranks that are alike, or on one of several columns: equation (S6)."""

    costs: LayoutCosts
    schedule: Schedule
    stages: Sequence[StageLayers]
    step: Step


def last_column(
    costs: LayoutCosts, schedule: Schedule, stages: Sequence[StageLayers]
) -> Played:
    """The column that ends last, the first of equals: equation (S6)."""
    if costs.columns:
        return max(
            (_play(*each) for each in per_column(costs, schedule, stages)),
            key=lambda one: one.step.total_ticks,
        )
    return _play(costs, schedule, stages)


def per_column(
    costs: LayoutCosts, schedule: Schedule, stages: Sequence[StageLayers]
) -> Iterator[tuple[LayoutCosts, Schedule, Sequence[StageLayers]]]:
    """Yield every column with its order, and its prices of the same stage map."""
    if not costs.columns:
        yield costs, schedule, stages
        return
    stage_map = [[(layer, cost.mode) for layer, cost in stage] for stage in stages]
    for column, order in column_orders(costs, schedule):
        yield column, order, choose(column, stage_map)


def column_orders(
    costs: LayoutCosts, schedule: Schedule
) -> Iterator[tuple[LayoutCosts, Schedule]]:
    """Yield every column with the order of its own number of micro-batches.

    Where all replicas are alike they are one column.
    """
    for column in costs.columns or (costs,):
        has_as_many = column.micro_batches == schedule.micro_batches
        yield column, schedule if has_as_many else schedule_of(column)


def _play(
    costs: LayoutCosts, schedule: Schedule, stages: Sequence[StageLayers]
) -> Played:
    simulation = simulate(schedule, durations(costs, stages))
    tails = tuple(sum(parts) for parts in tail_ticks(costs, by_rank(schedule, stages)))
    step = simulated_step(costs, simulation, tails)
    return Played(costs, schedule, stages, step)


def simulated_step(
    costs: LayoutCosts, simulation: Simulation, tails: tuple[int, ...]
) -> Step:
    """Return the step of a simulation and every rank's tail: equations (S4) and (S8)."""
    if find(costs.layout.schedule).is_asynchronous:
        return _steady(simulation, tails)
    totals = [
        lasted + tail
        for lasted, tail in zip(_lasted(costs, simulation), tails, strict=True)
    ]
    total = max(totals)
    last_rank = totals.index(total)
    return Step(total, last_rank, simulation, tails)


def _steady(simulation: Simulation, tails: tuple[int, ...]) -> Step:
    """The step of a schedule without a flush: equation (S8)."""
    micro_batches = simulation.schedule.micro_batches
    steady = steady_micro_batches(simulation.durations, micro_batches)
    busy = simulation.busy_seconds
    ends = [int(worked) + tail for worked, tail in zip(busy, tails, strict=True)]
    last_rank = ends.index(max(ends))
    return Step(math.ceil(steady) + max(tails), last_rank, simulation, tails, steady)


def _lasted(costs: LayoutCosts, simulation: Simulation) -> list[int]:
    """Ticks from where every pipeline rank's step begins to its last action's end: equation (S4)."""
    ends = map(int, simulation.end_seconds)
    if not costs.work.framework.staggers_steps:
        return list(ends)
    return [
        end - int(begin)
        for begin, end in zip(simulation.begin_seconds, ends, strict=True)
    ]


def rank_memory(
    costs: LayoutCosts, schedule: Schedule, stages: Sequence[StageLayers]
) -> tuple[RankMemory, ...]:
    """Memory of every pipeline rank at its peak: equations (M1) to (M4), (O2) to (O8) and (S6)."""
    columns = [
        stage_memory(column, chosen, order)
        for column, order, chosen in per_column(costs, schedule, stages)
    ]
    return tuple(max(rows, key=_lacking_bytes) for rows in zip(*columns, strict=True))


def _lacking_bytes(row: RankMemory) -> int:
    """On the device or, where something is offloaded, on its host; less than none where there is room: (V6)."""
    on_device = row.peak_bytes - row.capacity_bytes
    if row.host_capacity_bytes is None or not row.host_bytes:
        return on_device
    return max(on_device, row.host_bytes - row.host_capacity_bytes)


def predict_step(
    costs: LayoutCosts, schedule: Schedule, stages: Sequence[StageLayers]
) -> Prediction:
    """Time and memory of one step.

    Raises:
        DocumentError: the profile's layers take no time at all.
    """
    last = last_column(costs, schedule, stages)
    if last.step.total_ticks == 0:
        raise DocumentError(
            "no layer takes any time, so there is no step to predict.",
            field="profile.layers",
            hint="measure the profile on a device, or give counted FLOPs and bytes.",
        )
    seconds = last.step.total_ticks * TICK_SECONDS
    job = costs.work.job
    per_sample = job.sequence_length or 1
    prediction = Prediction(
        step_seconds=seconds,
        tokens_per_second=job.global_batch_size * per_sample / seconds,
        mfu=_mfu(costs, stages, seconds),
        bubble_fraction=last.step.bubble_fraction,
        breakdown=_breakdown(last.costs, last.schedule, last.stages, last.step),
        memory=rank_memory(costs, schedule, stages),
    )
    work = costs.work
    if work.calibration is None:
        return prediction
    basis = Basis(work.framework.calibration_owner, work.cluster, work.calibration)
    return with_interval(prediction, basis)


def _mfu(
    costs: LayoutCosts, stages: Sequence[StageLayers], seconds: float
) -> float | None:
    """Model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B): recomputation does not count."""
    work, layout = costs.work, costs.layout
    peaks = [
        group.device.peak_flops_per_second.get(work.profile.dtype)
        for group in work.groups or (work,)
    ]
    if None in peaks:
        return None
    every = sum(
        group.devices * (peak or 0.0)
        for group, peak in zip(work.groups or (work,), peaks, strict=True)
    )
    one_micro_batch = sum(cost.model_flops for stage in stages for _, cost in stage)
    micro_batches = sum(layout.shares(work.job.global_batch_size))
    flops = (
        one_micro_batch
        * micro_batches
        * layout.tensor_parallel_degree
        * layout.context_parallel_degree
    )
    return flops / (seconds * every)


def _breakdown(
    costs: LayoutCosts, schedule: Schedule, stages: Sequence[StageLayers], step: Step
) -> Breakdown:
    """Return the mean over pipeline ranks of where each rank's step goes: equation (S7)."""
    tails = tail_ticks(costs, by_rank(schedule, stages))
    free = simulate(schedule, durations(costs, stages, transfers=False))
    free_step = simulated_step(costs, free, step.tails).total_ticks
    totals: Counter[str] = Counter()
    for rank, (reduction, optimizer) in enumerate(tails):
        parts = Counter(
            pipeline=step.total_ticks - free_step,
            data_parallel=reduction,
            optimizer=optimizer,
        )
        for count, cost in _runs(costs, schedule, stages, rank):
            computed = cost.forward_compute_ticks + cost.backward_compute_ticks
            parts["compute"] += count * computed
            parts["recompute"] += count * cost.recompute_ticks
            parts["tensor_parallel"] += count * cost.communication_ticks
            parts["data_parallel"] += count * cost.gather_ticks
            parts["offload"] += count * cost.offload_ticks
        parts["bubble"] = step.total_ticks - sum(parts.values())
        totals.update(parts)
    seconds = {
        f"{part}_seconds": TICK_SECONDS * ticks_ / len(tails)
        for part, ticks_ in totals.items()
    }
    return Breakdown(**seconds)


def _runs(
    costs: LayoutCosts, schedule: Schedule, stages: Sequence[StageLayers], rank: int
) -> Iterator[tuple[int, LayerCost]]:
    """Yield the micro-batches of a step that a rank runs through every layer, and the layer's cost for them."""
    copies = 2 if schedule.replica_ranks else 1
    micro_batches = schedule.micro_batches // copies
    stop = schedule.recompute_stop
    for stage in schedule.stages_of(rank):
        if stop is None:
            for _, cost in stages[stage]:
                yield micro_batches, cost
            continue
        for _, cost in stages[stage]:
            yield stop, cost
        for cost in without_recompute(costs, stages, stage):
            yield micro_batches - stop, cost


def stage_schedule(plan: Plan, profile: ModelProfile) -> Schedule:
    """The order of a plan's actions; where data ranks have different shares, of those that end last."""
    return _planned(plan, profile)[1]


def stage_durations(plan: Plan, profile: ModelProfile) -> Durations:
    """Seconds of every stage of a plan, as the simulator takes them; where data ranks differ, of the last to end."""
    costs, _, stages = _planned(plan, profile)
    in_ticks = durations(costs, stages)
    return Durations(
        forward=_seconds(in_ticks.forward),
        backward_input=_seconds(in_ticks.backward_input),
        backward_weight=_seconds(in_ticks.backward_weight),
        recompute=_seconds(in_ticks.recompute),
        transfer_forward=_seconds(in_ticks.transfer_forward),
        transfer_backward=_seconds(in_ticks.transfer_backward),
        sequence_chunks=in_ticks.sequence_chunks,
    )


def stage_tails(plan: Plan, profile: ModelProfile) -> tuple[tuple[float, ...], ...]:
    """Seconds of (gradient reduction, optimizer) of every pipeline rank of a plan, after its last action."""
    costs, schedule, stages = _planned(plan, profile)
    return tuple(
        _seconds(tail) for tail in tail_ticks(costs, by_rank(schedule, stages))
    )


def _planned(
    plan: Plan, profile: ModelProfile
) -> tuple[LayoutCosts, Schedule, Sequence[StageLayers]]:
    """The plan's layout, order and stages, priced again; of the column that ends last."""
    costs = layout_costs(workload(profile, plan.cluster, plan.request.job), plan.layout)
    places = {layer.name: index for index, layer in enumerate(profile.layers)}
    stage_map = [
        [(places[layer.name], layer.recompute) for layer in stage.layers]
        for stage in plan.stages
    ]
    schedule = order_of(costs, plan.actions)
    stages = choose(costs, stage_map)
    if not costs.columns:
        return costs, schedule, stages
    last = last_column(costs, schedule, stages)
    return last.costs, last.schedule, last.stages


def _seconds(in_ticks: Sequence[float]) -> tuple[float, ...]:
    return tuple(value * TICK_SECONDS for value in in_ticks)
