"""Build this rank's part of the plan: its stage with initial values, sharded, on the runtime, with its optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import LayoutError, MismatchError
from planner.executor.gradients import SharedCopy
from planner.executor.materialise import Materialise, materialise
from planner.executor.mesh import Mesh
from planner.executor.optimizer import COMPUTE_DTYPE, Optimizer
from planner.executor.replicas import GradientReducer
from planner.executor.runtime import Loss, PipelineRuntime
from planner.executor.scaling import LossScaler, scaler_for
from planner.executor.sharding import shard_tensors
from planner.executor.stages import Boundaries, Boundary, TimedStage
from planner.executor.streams import RandomStreams
from planner.executor.timeline import Recorder
from planner.schedule import build as build_schedule
from planner.spec.plan import Plan, PlannedLayer
from planner.spec.profile import RecomputeMode, SharedParameters
from profiler import tensor_parallel
from profiler.cut import LayerCut
from profiler.models import ModelSource
from profiler.parameters import hidden_matrices


@dataclass(frozen=True, slots=True)
class StageRange:
    """Layers start..stop (exclusive) of the model, and how they recompute."""

    start: int
    stop: int
    recompute: dict[int, RecomputeMode]
    """By index of the layer in the model."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """All that one rank trains with."""

    module: nn.Module
    """The stage, parameters under the names of the user's model."""
    runtime: PipelineRuntime
    optimizer: Optimizer
    scaler: LossScaler | None
    """Of the loss, in fp16."""
    streams: RandomStreams
    recorder: Recorder
    partial: tuple[nn.Parameter, ...]
    """Replicated parameters whose gradients are partial sums over the tensor-parallel group."""
    copies: tuple[SharedCopy, ...]
    """Parameters that other stages hold too."""


def stage_ranges(plan: Plan, cut: LayerCut) -> tuple[StageRange, ...]:
    """The plan's stages as ranges of the model's layers.

    Raises:
        MismatchError: the plan's layers are not the model's, in order.
    """
    planned = [layer for stage in plan.stages for layer in stage.layers]
    names = [layer.name for layer in cut.layers]
    if [layer.name for layer in planned] != names:
        position = next(
            (i for i, (left, right) in enumerate(zip(planned, names, strict=False)) if left.name != right),
            min(len(planned), len(names)),
        )
        ours = names[position] if position < len(names) else "no layer"
        theirs = planned[position].name if position < len(planned) else "no layer"
        raise MismatchError(
            f"the plan's {len(planned)} layers are not the model's {len(names)}: at position {position} the plan has "
            f"{theirs}, the model {ours}.",
            field="stages",
            mend="run the plan with the model that it was made for.",
        )
    _check_modules(planned, cut)
    ranges, start = [], 0
    for stage in plan.stages:
        stop = start + len(stage.layers)
        ranges.append(StageRange(start, stop, {start + i: layer.recompute for i, layer in enumerate(stage.layers)}))
        start = stop
    return tuple(ranges)


def _check_modules(planned: list[PlannedLayer], cut: LayerCut) -> None:
    """A plan that names modules must cut the model where this version does."""
    for row, layer in zip(planned, cut.layers, strict=True):
        if row.modules and row.modules != layer.modules:
            raise MismatchError(
                f"layer {row.name!r} of the plan is made of {', '.join(row.modules)}, the model's of "
                f"{', '.join(layer.modules)}.",
                field="stages",
                mend="profile the model again with this version, and plan with that profile.",
            )


def build_rank(
    plan: Plan,
    source: ModelSource,
    mesh: Mesh,
    *,
    device: torch.device,
    seed: int,
    learning_rate: float,
    loss: Loss,
    fill: Materialise = materialise,
) -> RankPart:
    """Build this rank's part; a collective call of all ranks.

    Args:
        fill: gives the stage its values; a dry run leaves it without any.

    Raises:
        MismatchError: a plan of another model.
        UnsupportedError: the model cannot be built or sharded as the plan wants.
    """
    cut = source.cut()
    ranges = stage_ranges(plan, cut)
    mine = ranges[mesh.pipeline]
    module = fill(
        source,
        lambda model: cut.stage(model, mine.start, mine.stop, recompute=mine.recompute),
        device=device,
        seed=seed,
    )
    partial = shard_tensors(module, tensor_styles(module, source, mesh.grid.tensor), mesh)
    job = plan.request.job
    optimizer = Optimizer(
        module,
        name=job.optimizer,
        precision=job.precision,
        learning_rate=learning_rate,
        hidden=hidden_matrices(source.blueprint, cut),
    )
    scaler = scaler_for(job.precision)
    streams = RandomStreams(seed, device)
    for index in range(mine.start, mine.stop):
        streams.attach(cut.parts(module, index))
    recorder = Recorder(device)
    received, sent = boundaries(plan, source, mine)
    stage = TimedStage(
        module,
        mesh.pipeline,
        mesh.grid.pipeline,
        device=device,
        group=mesh.pipeline_group,
        received=received,
        sent=sent,
        recorder=recorder,
        streams=streams,
        first_micro_batch=mesh.data * plan.micro_batches,
    )
    runtime = PipelineRuntime(
        [stage],
        actions_of(plan),
        micro_batches=plan.micro_batches,
        replicas=mesh.grid.data,
        loss=loss,
        recorder=recorder,
        reducer=GradientReducer(module.parameters(), mesh.data_group) if mesh.grid.data > 1 else None,
        scaler=scaler,
    )
    copies = _shared_copies(module, cut.shared_parameters, plan, mesh)
    return RankPart(module, runtime, optimizer, scaler, streams, recorder, partial, copies)


def tensor_styles(module: nn.Module, source: ModelSource, degree: int) -> dict[str, str]:
    """Tensor-parallel style of the stage's modules, by qualified name; none for degree 1.

    Raises:
        LayoutError: the model does not divide by this degree.
    """
    allowed = source.tensor_parallel_degrees()
    if degree not in allowed:
        raise LayoutError(
            f"{source.name} cannot be tensor-parallel by {degree}.",
            field="layout.tensor_parallel_degree",
            mend=f"use one of {', '.join(map(str, allowed))}.",
        )
    return tensor_parallel.split_modules(module, tensor_parallel.plan(source)) if degree > 1 else {}


def boundaries(plan: Plan, source: ModelSource, mine: StageRange) -> tuple[Boundaries, Boundaries]:
    """What one micro-batch carries into and out of a stage."""
    size, length = plan.layout.micro_batch_size, plan.request.job.sequence_length
    crossing = source.borders(size, length).crossing
    dtype = COMPUTE_DTYPE[plan.request.job.precision]
    received, sent = (
        tuple(Boundary.of(each, dtype) for each in crossing[position]) for position in (mine.start, mine.stop)
    )
    return received, sent


def actions_of(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The plan's actions per pipeline rank; built from the schedule's name where the plan does not list them."""
    if plan.actions:
        return plan.actions
    ranks = plan.layout.pipeline_parallel_degree
    return build_schedule(plan.layout.schedule, ranks=ranks, micro_batches=plan.micro_batches).to_text()


def _shared_copies(
    module: nn.Module, shared: tuple[SharedParameters, ...], plan: Plan, mesh: Mesh
) -> tuple[SharedCopy, ...]:
    """This rank's copies of parameters that several stages hold. Every rank makes every group, as torch asks."""
    stage_of = {layer.name: stage.index for stage in plan.stages for layer in stage.layers}
    held = dict(module.named_parameters(remove_duplicate=False))
    copies = []
    for parameters in shared:
        stages = sorted({stage_of[layer] for layer in parameters.layers})
        if len(stages) == 1:
            continue
        group = _group_across(stages, mesh)
        names = [name for name in parameters.names if name in held]
        if group is not None and names:
            copies.append(SharedCopy(held[names[0]], group, is_owner=mesh.pipeline == stages[0]))
    return tuple(copies)


def _group_across(stages: list[int], mesh: Mesh) -> dist.ProcessGroup | None:
    """The group of this rank's replica and shard over the given stages; None on ranks of other stages."""
    mine = None
    for data in range(mesh.grid.data):
        for tensor in range(mesh.grid.tensor):
            group = dist.new_group([mesh.grid.ranks[stage][data][tensor] for stage in stages])
            if (data, tensor) == (mesh.data, mesh.tensor) and mesh.pipeline in stages:
                mine = group
    return mine
