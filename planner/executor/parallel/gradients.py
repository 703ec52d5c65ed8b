"""What happens to gradients between the mean over replicas and the optimizer.

Sums first: over a tensor-parallel group for gradients that see only this rank's heads, and over the copies of a
parameter that several stages share. Then what the whole model decides: whether a gradient overflowed, and its norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from planner.executor.parallel.mesh import Mesh
from planner.executor.parallel.sharding import is_split, local
from planner.executor.parallel.zero import ZeroShards


@dataclass(frozen=True, slots=True)
class SharedCopy:
    """This rank's copy of a parameter that several stages hold."""

    parameter: torch.Tensor
    """Or what ZeRO leaves this rank of it: the same piece on all ranks of the group."""
    group: dist.ProcessGroup
    """Ranks with the other copies (one per stage that holds it), of the same replica and shard."""
    is_owner: bool
    """Counts in the model's norm; the other copies are the same parameter again."""


@torch.no_grad()
def sum_partial(parameters: Iterable[torch.Tensor], mesh: Mesh) -> None:
    """Add up gradients of replicated parameters that each saw only this rank's shard of the activations."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.tensor_group)


@torch.no_grad()
def sum_shared(copies: Iterable[SharedCopy]) -> None:
    """Give every copy the gradient of the one parameter that all of them stand for: the sum over the copies."""
    for copy in copies:
        gradient = copy.parameter.grad
        if gradient is None:
            gradient = copy.parameter.grad = torch.zeros_like(copy.parameter)
        # Stages may shard their copies differently, so the sum is taken over whole gradients.
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(whole, group=copy.group)
        if isinstance(gradient, DTensor):
            gradient.copy_(
                distribute_tensor(
                    whole, gradient.device_mesh, gradient.placements, src_data_rank=None
                )
            )


@torch.no_grad()
def any_overflow(parameters: Iterable[torch.Tensor], mesh: Mesh) -> bool:
    """Whether any gradient on any rank is infinite or not a number; a collective call, the same answer on all ranks."""
    gradients = [
        local(parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    # The largest magnitude: unlike a sum it is finite exactly when every gradient is.
    largest = nn.utils.get_total_norm(gradients, math.inf)
    flag = (~torch.isfinite(largest)).to(mesh.device_mesh.device_type, torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


@torch.no_grad()
def total_norm(
    parameters: Iterable[torch.Tensor],
    copies: Iterable[SharedCopy],
    mesh: Mesh,
    shards: ZeroShards | None = None,
) -> float:
    """2-norm of the whole model's gradient, in fp64: shards and stages add up, replicas and further copies count once.

    A collective call, the same answer on all ranks.

    Args:
        shards: of which the parameters are pieces, so that the ranks that share them out add up too.
    """
    owners: Mapping[int, torch.Tensor] = {} if shards is None else shards.owners()
    found = {
        id(parameter): parameter
        for parameter in parameters
        if parameter.grad is not None
    }
    again = {id(copy.parameter) for copy in copies if not copy.is_owner}
    squares = torch.zeros(3, dtype=torch.float64, device=mesh.device_mesh.device_type)
    for key, parameter in found.items():
        if key not in again and parameter.grad is not None:
            owner = owners.get(key, parameter.grad)
            place = 2 if mesh.holds_experts(owner) else 0 if is_split(owner) else 1
            squares[place] += local(parameter.grad).double().square().sum()
    if shards is not None:
        dist.all_reduce(squares[:2], group=mesh.shard_group)
        if mesh.experts is not None:
            dist.all_reduce(squares[2:], group=mesh.expert_shard_group)
    dist.all_reduce(squares[:1], group=mesh.tensor_group)
    if mesh.expert_spread is not None:
        dist.all_reduce(squares[2:], group=mesh.expert_spread.get_group())
    dist.all_reduce(squares, group=mesh.pipeline_group)
    return float(squares.sum().sqrt())


def clip_factor(norm: float, maximum: float) -> float:
    """What to multiply gradients of this 2-norm with so that it is at most `maximum`."""
    return min(
        1.0, maximum / (norm + 1e-6)
    )  # the same guard as torch.nn.utils.clip_grad_norm_
