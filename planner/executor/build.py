"""Build this rank's part of the plan: its stages with initial values, sharded, on the runtime, with its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import LayoutError, MismatchError, UnsupportedError
from planner.executor.checkpoint.materialise import Materialise, keep_all, materialise
from planner.executor.parallel.expert_parallel import (
    check_experts,
    keep_share,
    share_experts,
)
from planner.executor.parallel.gradients import SharedCopy
from planner.executor.parallel.mesh import Mesh
from planner.executor.parallel.replicas import GradientReducer, Reducer
from planner.executor.parallel.sequence_parallel import (
    read_once,
    sequence_plan,
    share_sequence,
)
from planner.executor.parallel.sharding import is_split, is_split_by_rows, shard_tensors
from planner.executor.parallel.shares import share_of
from planner.executor.parallel.zero import LayerParameters, ZeroShards, layers_of
from planner.executor.pipeline.offload import ActivationOffload
from planner.executor.pipeline.pieces import StagePieces, pieces_of
from planner.executor.pipeline.rank_module import merge, tie
from planner.executor.pipeline.runtime import Loss, PipelineRuntime
from planner.executor.pipeline.stages import Boundaries, Boundary, TimedStage
from planner.executor.pipeline.streams import RandomStreams
from planner.executor.pipeline.timeline import Recorder
from planner.executor.support import schedule_of
from planner.executor.train.loss import loss_of_pieces
from planner.executor.train.optimizer import COMPUTE_DTYPE, Optimizer
from planner.executor.train.optimizer_options import DEFAULTS, OptimizerOptions
from planner.executor.train.scaling import LossScaler, scaler_for
from planner.profiler import tensor_parallel
from planner.profiler.compute_type import buffers_to_cast, cast_rest
from planner.profiler.cut import LayerCut, tied_modules
from planner.profiler.float8 import float8_modules, run_in_float8
from planner.profiler.models import ModelSource
from planner.profiler.parameters import hidden_matrices
from planner.spec.plan import Plan, PlannedLayer
from planner.spec.profile import RecomputeMode, SharedParameters


@dataclass(frozen=True, slots=True)
class StageRange:
    """Layers start..stop (exclusive) of the model, and how they recompute."""

    start: int
    stop: int
    recompute: dict[int, RecomputeMode] = field(hash=False)
    """By index of the layer in the model."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """All that one rank trains with."""

    module: nn.Module
    """All stages of the rank, parameters under the names of the user's model."""
    runtime: PipelineRuntime
    optimizer: Optimizer
    offload: ActivationOffload | None
    """Of activations; None: they stay on the device."""
    scaler: LossScaler | None
    """Of the loss, in fp16."""
    streams: RandomStreams
    recorder: Recorder
    partial: tuple[torch.Tensor, ...]
    """Replicated parameters whose gradients are partial sums over the tensor-parallel group."""
    copies: tuple[SharedCopy, ...]
    """Parameters that other ranks' stages hold too."""
    has_first_stage: bool
    """Takes the inputs."""
    has_last_stage: bool
    """Computes the loss."""

    def gathered(self) -> AbstractContextManager[None]:
        """Within, the module's parameters have their values: ZeRO 3 keeps only shards of them. A collective call."""
        shards = self.optimizer.shards
        return nullcontext() if shards is None else shards.gathered()


def stage_ranges(plan: Plan, cut: LayerCut) -> tuple[StageRange, ...]:
    """The plan's stages as ranges of the model's layers.

    Raises:
        MismatchError: the plan's layers are not the model's, in order.
    """
    planned = [layer for stage in plan.stages for layer in stage.layers]
    names = [layer.name for layer in cut.layers]
    if [layer.name for layer in planned] != names:
        position = next(
            (
                i
                for i, (left, right) in enumerate(zip(planned, names, strict=False))
                if left.name != right
            ),
            min(len(planned), len(names)),
        )
        ours = names[position] if position < len(names) else "no layer"
        theirs = planned[position].name if position < len(planned) else "no layer"
        raise MismatchError(
            f"the plan's {len(planned)} layers are not the model's {len(names)}: at position {position} the plan has "
            f"{theirs}, the model {ours}.",
            field="stages",
            hint="run the plan with the model that it was made for.",
        )
    _check_modules(planned, cut)
    ranges, start = [], 0
    for stage in plan.stages:
        stop = start + len(stage.layers)
        ranges.append(
            StageRange(
                start,
                stop,
                {start + i: layer.recompute for i, layer in enumerate(stage.layers)},
            )
        )
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
                hint="profile the model again with this version, and plan with that profile.",
            )


def build_rank(
    plan: Plan,
    source: ModelSource,
    mesh: Mesh,
    *,
    device: torch.device,
    seed: int,
    loss: Loss,
    fill: Materialise = materialise,
    options: OptimizerOptions = DEFAULTS,
) -> RankPart:
    """Build this rank's part; a collective call of all ranks.

    Args:
        fill: gives the stage its values; a dry run leaves it without any.
        options: of the job's optimizer; its learning rate is set with every step.

    Raises:
        MismatchError: a plan of another model.
        UnsupportedError: the model cannot be built or sharded as the plan wants.
    """
    cut, pieces, share = (
        source.cut(),
        pieces_of(plan, mesh.context),
        share_of(plan, mesh.data),
    )
    mine = {
        stage.index: layers
        for stage, layers in zip(plan.stages, stage_ranges(plan, cut), strict=True)
        if stage.pipeline_rank == mesh.pipeline
    }
    check_experts(
        source,
        mesh.grid.expert,
        mesh.grid.tensor,
        sequence_parallel=plan.layout.sequence_parallel,
    )
    stages = {
        index: _fill_stage(source, layers, fill, device, seed, mesh)
        for index, layers in mine.items()
    }
    if pieces.is_split:
        _attend_from_pieces(stages.values())
    _cast_rest(plan, source, stages.values())
    tie(list(stages.values()), cut.shared_parameters)
    partial = _shard(
        plan, {mine[index]: stage for index, stage in stages.items()}, source, mesh
    )
    module = merge(list(stages.values()))
    job = plan.request.job
    layers_held = _layers_held(cut, mine, stages)
    shards = _zero_shards(plan, cut, mesh, stages.values(), layers_held, partial)
    optimizer = Optimizer(
        module,
        name=job.optimizer,
        precision=job.precision,
        options=options,
        hidden=hidden_matrices(source.blueprint, cut),
        shards=shards,
        offloaded=[layer.named for layer in layers_held]
        if plan.layout.optimizer_offload
        else None,
    )
    offload = _activation_offload(plan, module, stages.values(), device)
    scaler = scaler_for(job.precision)
    streams = RandomStreams(seed, device)
    _attach_streams(streams, plan, cut, mine, stages, mesh)
    recorder = Recorder(device)
    runtime = PipelineRuntime(
        [
            _timed_stage(
                plan,
                source,
                mesh,
                index,
                layers,
                stages[index],
                recorder,
                streams,
                device,
            )
            for index, layers in mine.items()
        ],
        share.actions_of(schedule_of(plan)),
        share=share,
        pieces=pieces,
        loss=loss_of_pieces(loss, pieces),
        recorder=recorder,
        reducer=shards if shards is not None else _reducer(stages, mesh),
        scaler=scaler,
        offload=offload,
    )
    return RankPart(
        module=module,
        runtime=runtime,
        optimizer=optimizer,
        offload=offload,
        scaler=scaler,
        streams=streams,
        recorder=recorder,
        partial=tuple(_held(partial, shards)),
        copies=_shared_copies(module, cut.shared_parameters, plan, mesh, shards),
        has_first_stage=0 in mine,
        has_last_stage=len(plan.stages) - 1 in mine,
    )


def _cast_rest(plan: Plan, source: ModelSource, stages: Iterable[nn.Module]) -> None:
    """What is of the precision's type beside the parameters, which the optimizer casts."""
    dtype = COMPUTE_DTYPE[plan.request.job.precision]
    buffers = buffers_to_cast(source.blueprint, dtype)
    for stage in stages:
        cast_rest(stage, dtype, buffers=buffers)


def _attend_from_pieces(stages: Iterable[nn.Module]) -> None:
    from planner.profiler.lower_right import (
        use_lower_right,
    )  # with transformers, which other models do without

    for stage in stages:
        use_lower_right(stage)


def _fill_stage(
    source: ModelSource,
    layers: StageRange,
    fill: Materialise,
    device: torch.device,
    seed: int,
    mesh: Mesh,
) -> nn.Module:
    """A stage with its values, cut out of a model of its own."""
    return fill(
        source,
        lambda model: source.cut().stage(
            model, layers.start, layers.stop, recompute=layers.recompute
        ),
        device=device,
        seed=seed,
        narrow=keep_all
        if mesh.expert_spread is None
        else partial(keep_share, source, mesh.expert_spread),
    )


def _reducer(stages: Mapping[int, nn.Module], mesh: Mesh) -> Reducer | None:
    """Adds gradients up over replicas; None without any."""
    if mesh.data_group.size() == 1:
        return None
    return GradientReducer(
        {index: stage.parameters() for index, stage in stages.items()}, mesh.replicas
    )


def _shard(
    plan: Plan, stages: dict[StageRange, nn.Module], source: ModelSource, mesh: Mesh
) -> tuple[nn.Parameter, ...]:
    """Shard the stages over the tensor- and expert-parallel groups, and let what is left multiply in fp8 where the job
    says so; returns parameters whose gradients are partial sums over the tensor-parallel group."""
    whole = tied_modules(stages.values())  # sharding one of them would tear them apart
    partial: list[nn.Parameter] = []
    for layers, stage in stages.items():
        in_float8 = (
            float8_modules(stage, source, mesh.grid.tensor)
            if plan.request.job.precision == "fp8"
            else ()
        )
        styles = tensor_styles(stage, source, mesh.grid.tensor)
        sequence = (
            sequence_plan(stage, source, styles)
            if plan.layout.sequence_parallel
            else None
        )
        partial += shard_tensors(stage, styles, mesh, whole=whole, sequence=sequence)
        if sequence is None:
            read_once(stage, source, styles, mesh.tensor_mesh)
        else:
            share_sequence(
                stage,
                source,
                range(layers.start, layers.stop),
                sequence,
                mesh.tensor_mesh,
            )
        share_experts(stage, source, mesh)
        run_in_float8(stage, in_float8)
    tie(
        list(stages.values()), source.cut().shared_parameters
    )  # again: each stage has made shards of its own
    return tuple(partial)


def _layers_held(
    cut: LayerCut, mine: Mapping[int, StageRange], stages: Mapping[int, nn.Module]
) -> list[LayerParameters]:
    """Parameters of the layers of this rank's stages."""
    return [
        layer
        for index, held in mine.items()
        for layer in layers_of(
            cut, index, stages[index], range(held.start, held.stop), held.recompute
        )
    ]


def _attach_streams(
    streams: RandomStreams,
    plan: Plan,
    cut: LayerCut,
    mine: Mapping[int, StageRange],
    stages: Mapping[int, nn.Module],
    mesh: Mesh,
) -> None:
    """Give every layer random numbers of its own."""
    for index, layers in mine.items():
        for layer in range(layers.start, layers.stop):
            # Blocks of a sequence-parallel rank see its own tokens: they drop by random numbers of its own.
            is_shared = (
                plan.layout.sequence_parallel and 0 < layer < len(cut.layers) - 1
            )
            streams.attach(
                cut.parts(stages[index], layer), rank=mesh.tensor if is_shared else 0
            )


def _zero_shards(
    plan: Plan,
    cut: LayerCut,
    mesh: Mesh,
    stages: Iterable[nn.Module],
    layers: Sequence[LayerParameters],
    partial: Iterable[nn.Parameter],
) -> ZeroShards | None:
    """What ZeRO shares out among the replicas; None without ZeRO or replicas."""
    if plan.layout.zero_stage == 0 or mesh.data_group.size() == 1:
        return None
    apart = {id(parameter): "partial" for parameter in partial}
    shared = {name for each in cut.shared_parameters for name in each.names}
    for stage in stages:
        named = stage.named_parameters(remove_duplicate=False)
        apart |= {id(parameter): name for name, parameter in named if name in shared}
    return ZeroShards(plan.layout.zero_stage, mesh.sharers, layers, apart)


def _activation_offload(
    plan: Plan, module: nn.Module, stages: Iterable[nn.Module], device: torch.device
) -> ActivationOffload | None:
    """What keeps activations on the host; made when the parameters have the storages that they stay in."""
    if not plan.layout.activation_offload:
        return None
    offload = ActivationOffload(module, device)
    for stage in stages:
        offload.attach(stage)
    return offload


def _held(
    parameters: Iterable[nn.Parameter], shards: ZeroShards | None
) -> Iterator[torch.Tensor]:
    """What this rank keeps of parameters."""
    for parameter in parameters:
        piece = parameter if shards is None else shards.piece_of(parameter)
        if piece is not None:
            yield piece


def _timed_stage(
    plan: Plan,
    source: ModelSource,
    mesh: Mesh,
    index: int,
    layers: StageRange,
    module: nn.Module,
    recorder: Recorder,
    streams: RandomStreams,
    device: torch.device,
) -> TimedStage:
    received, sent = boundaries(plan, source, layers)
    return TimedStage(
        module,
        index,
        len(plan.stages),
        device=device,
        group=mesh.pipeline_group,
        received=received,
        sent=sent,
        recorder=recorder,
        streams=streams,
        first_micro_batch=share_of(plan, mesh.data).first,
        pieces=StagePieces(pieces_of(plan, mesh.context), mesh),
    )


def tensor_styles(
    module: nn.Module, source: ModelSource, degree: int
) -> dict[str, str]:
    """Tensor-parallel style of the stage's modules, by qualified name; none for degree 1.

    Raises:
        LayoutError: the model does not divide by this degree.
    """
    if degree == 1:
        return {}
    allowed = source.tensor_parallel_degrees()
    if degree not in allowed:
        reason = tensor_parallel.refusal(source)
        raise LayoutError(
            f"{source.name} cannot be tensor-parallel by {degree}{reason and f': {reason}'}.",
            field="layout.tensor_parallel_degree",
            hint=f"use one of {', '.join(map(str, allowed))}.",
        )
    return tensor_parallel.split_modules(module, tensor_parallel.plan(source))


def boundaries(
    plan: Plan, source: ModelSource, mine: StageRange
) -> tuple[Boundaries, Boundaries]:
    """What one micro-batch, or a piece of it, carries into and out of a stage."""
    layout, length = plan.layout, plan.request.job.sequence_length
    size, length = (
        layout.micro_batch_size,
        length // (layout.sequence_chunks * layout.context_parallel_degree),
    )
    crossing = source.borders(
        size, length, COMPUTE_DTYPE[plan.request.job.precision]
    ).crossing
    parts = layout.tensor_parallel_degree if layout.sequence_parallel else 1

    def at(position: int) -> Boundaries:
        whole = tuple(map(Boundary.of, crossing[position]))
        is_hidden = 0 < position < len(crossing) - 1
        return (
            tuple(_part_of(each, parts) for each in whole)
            if is_hidden and parts > 1
            else whole
        )

    return at(mine.start), at(mine.stop)


def _part_of(hidden: Boundary, parts: int) -> Boundary:
    """What a sequence-parallel rank sends of a hidden tensor (batch, sequence, features)."""
    batch, length, features = hidden.shape
    return replace(hidden, shape=(batch, length // parts, features))


def _shared_copies(
    module: nn.Module,
    shared: tuple[SharedParameters, ...],
    plan: Plan,
    mesh: Mesh,
    shards: ZeroShards | None,
) -> tuple[SharedCopy, ...]:
    """This rank's copies of parameters that are trained and that other ranks hold too. Every rank makes every group, as
    torch asks."""
    rank_of = {
        layer.name: stage.pipeline_rank
        for stage in plan.stages
        for layer in stage.layers
    }
    held = dict(module.named_parameters(remove_duplicate=False))
    copies = []
    for parameters in shared:
        ranks = sorted({rank_of[layer] for layer in parameters.layers})
        if len(ranks) == 1 or parameters.frozen:
            continue
        group = _group_across(ranks, mesh)
        names = [name for name in parameters.names if name in held]
        if group is not None and names:
            if shards is not None:
                _refuse_split(names[0], held[names[0]])
            is_owner = mesh.pipeline == ranks[0]
            copies += [
                SharedCopy(piece, group, is_owner)
                for piece in _held([held[names[0]]], shards)
            ]
    return tuple(copies)


def _refuse_split(name: str, parameter: nn.Parameter) -> None:
    """Pieces of two copies can be added up only where both are pieces of the same: of whole parameters, or of shards by
    rows, as vocabularies are split in every stage."""
    if is_split(parameter) and not is_split_by_rows(parameter):
        raise UnsupportedError(
            f"{name!r} is shared with another stage and split over the tensor-parallel group, where copies may be "
            "split in different ways.",
            field="layout.zero_stage",
            hint="write 0, or a tensor_parallel_degree of 1.",
        )


def _group_across(ranks: list[int], mesh: Mesh) -> dist.ProcessGroup | None:
    """The group of this rank's replica and shard over the given pipeline ranks; None on other ranks."""
    mine = None
    grid = mesh.grid
    for data, context, tensor in product(
        range(grid.data), range(grid.context), range(grid.tensor)
    ):
        group = dist.new_group(
            [grid.ranks[rank][data][context][tensor] for rank in ranks]
        )
        if (data, context, tensor) == (
            mesh.data,
            mesh.context,
            mesh.tensor,
        ) and mesh.pipeline in ranks:
            mine = group
    return mine
