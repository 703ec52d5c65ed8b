"""Tensor parallelism of a stage: DTensor (`parallelize_module`) by the styles that the model's own plan names.

Source of the column and row pattern: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from planner.errors import UnsupportedError
from planner.executor.parallel.mesh import Mesh
from planner.profiler.measure_shard import local as local
from planner.profiler.measure_shard import with_local as with_local
from planner.profiler.sequence_parallel import SequencePlan
from planner.profiler.split_group import split_ours
from planner.profiler.tensor_parallel import (
    REPLICATED,
    is_ours,
    parallel_styles,
    scattered_rows,
)

PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
"""Transformers' name of a replicated parameter that sees only this rank's heads, such as Qwen3's q_norm."""


def shard_tensors(
    stage: nn.Module,
    plan: Mapping[str, str],
    mesh: Mesh,
    *,
    whole: Collection[str] = (),
    sequence: SequencePlan | None = None,
) -> tuple[nn.Parameter, ...]:
    """Shard a stage over the tensor-parallel group, in place; each rank keeps its shard of what it holds whole.

    Args:
        plan: style by qualified module name (`planner.profiler.tensor_parallel.split_modules`).
        whole: modules that stay as they are (`planner.profiler.cut.tied_modules`).
        sequence: where a sequence-parallel stage is entered and left (`planner.executor.parallel.sequence_parallel`).

    Returns:
        Replicated parameters whose gradients are partial sums, to be added up over the group after the backward.

    Raises:
        UnsupportedError: a style that is not known here.
    """
    styles = parallel_styles()
    partial: list[nn.Parameter] = []
    left = sequence.left if sequence is not None else ()
    if sequence is not None:
        partial += [
            each
            for name in sequence.partial
            for each in stage.get_submodule(name).parameters(recurse=False)
        ]
    split_ours(stage, plan, mesh.tensor_mesh, sequence=sequence is not None)
    for name, style in plan.items():
        module = stage.get_submodule(name)
        if (
            style == REPLICATED
            or is_ours(style)
            or next(module.parameters(recurse=False), None) is None
        ):
            continue  # the last stand for modules of another stage
        if style == PARTIAL_GRADIENT:
            partial += module.parameters(recurse=False)
        elif style not in styles:
            raise UnsupportedError(
                f"the module {name!r} wants the style {style!r}.",
                field="layout.tensor_parallel_degree",
                hint=f"use a model whose plan has only {', '.join([*styles, PARTIAL_GRADIENT])}, or degree 1.",
            )
        elif name not in whole:
            chosen = scattered_rows() if name in left else styles[style]
            parallelize_module(module, mesh.tensor_mesh, chosen, src_data_rank=None)
    return tuple(partial)


def placed_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter, spread over the tensor-parallel group as the parameter is."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def is_split(tensor: torch.Tensor) -> bool:
    """Does every rank of a group hold a part of its own?"""
    return isinstance(tensor, DTensor) and not any(
        placement.is_replicate() for placement in tensor.placements
    )


def is_split_by_rows(tensor: torch.Tensor) -> bool:
    """Is each rank's part a run of rows?"""
    return isinstance(tensor, DTensor) and tuple(tensor.placements) == (Shard(0),)
