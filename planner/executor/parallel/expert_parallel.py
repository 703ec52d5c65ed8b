"""Expert parallelism of a stage: every rank of a group holds its share of the experts, as DTensors over the group.

The group is a run of neighbours among the data- and context-parallel ranks (equation (P1) of `planner.cost.placement`),
times a tensor-parallel group. Gradients of experts are summed over the ranks that hold the same ones, in other groups.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from planner.errors import LayoutError, UnsupportedError
from planner.executor.parallel.mesh import Mesh
from planner.executor.parallel.sharding import local
from planner.profiler.expert_parallel import (
    Alone,
    Routes,
    experts_of,
    local_share,
    refusal,
    share_out,
)
from planner.profiler.models import ModelSource
from planner.profiler.transformer_cut import TransformerChain


class RankGroup:
    """Real exchanges."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = group.size()

    def routes(self, experts: torch.Tensor, count: int) -> Routes:
        """Tell every rank how many rows of each of its experts it gets; one wait of the host for the numbers."""
        wanted = torch.bincount(experts, minlength=count)
        come = all_to_all_single(wanted, None, None, self._group)
        wanted, come = wanted.view(self._ranks, -1), come.view(self._ranks, -1)
        sent, received = torch.stack((wanted.sum(1), come.sum(1))).tolist()
        here = torch.arange(come.shape[1], device=come.device).expand_as(come)
        return Routes(
            sent, received, here.reshape(-1).repeat_interleave(come.reshape(-1))
        )

    def exchange(
        self, rows: torch.Tensor, sent: list[int] | None, received: list[int] | None
    ) -> torch.Tensor:
        """See `planner.profiler.expert_parallel.Group`."""
        exchanged: torch.Tensor = all_to_all_single_autograd(
            rows, received, sent, self._group
        )
        return exchanged


class TensorGroup:
    """A real tensor-parallel group; see `planner.profiler.expert_parallel.TensorRanks`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank goes on with other rows, so that gradients are partial sums."""
        spread = DTensor.from_local(part, self._mesh, [Shard(0)], run_check=False)
        return spread.redistribute(placements=[Replicate()]).to_local(
            grad_placements=[Partial()]
        )

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """See `planner.profiler.expert_parallel.TensorRanks`."""
        summed = DTensor.from_local(whole, self._mesh, [Partial()], run_check=False)
        return summed.redistribute(placements=[Shard(0)]).to_local()

    def places(self, mask: torch.Tensor) -> torch.Tensor:
        """One wait of the host for their number."""
        return mask.nonzero().squeeze(-1)


def check_experts(
    source: ModelSource,
    expert: int,
    tensor: int = 1,
    *,
    sequence_parallel: bool = False,
) -> None:
    """Refuse degrees that the model's experts cannot be shared out by.

    Args:
        expert, tensor: degrees, over which experts are spread both.

    Raises:
        UnsupportedError: the model has no experts, or none that are known here; or the tensor-parallel ranks do not
            share out the tokens.
        LayoutError: they do not divide.
    """
    reason = refusal(source)
    if expert == 1 and (reason or tensor == 1):
        return
    if reason:
        raise UnsupportedError(
            f"{source.name} cannot be expert-parallel: {reason}.",
            field="layout.expert_parallel_degree",
            hint="write 1.",
        )
    if tensor > 1 and not sequence_parallel:
        raise UnsupportedError(
            f"the experts of {source.name} gather tokens that the tensor-parallel ranks share out, but these do not.",
            field="layout.sequence_parallel",
            hint="write true, or a tensor_parallel_degree of 1.",
        )
    for name, module in experts_of(source.blueprint).items():
        number = int(module.num_experts)  # type: ignore[arg-type]
        if number % (expert * tensor):
            raise LayoutError(
                f"{name} has {number} experts, which expert_parallel_degree({expert}) * tensor_parallel_degree({tensor}"
                f") = {expert * tensor} ranks cannot share.",
                field="layout.expert_parallel_degree",
                hint=f"use degrees whose product divides {number}.",
            )


def keep_share(
    source: ModelSource, mesh: DeviceMesh, name: str, module: nn.Module
) -> None:
    """Of a block's experts keep this rank's, when all of the block has its values (`materialise.Narrow`)."""
    chain = source.cut().chain
    if (
        not isinstance(chain, TransformerChain)
        or name.rpartition(".")[0] != chain.blocks_name
    ):
        return  # `check_experts` has refused others that have experts
    for experts in experts_of(module).values():
        for attribute, parameter in list(experts.named_parameters(recurse=False)):
            share = local_share(
                parameter.detach(), mesh.get_local_rank(), mesh.size()
            ).clone()
            experts.register_parameter(
                attribute, nn.Parameter(share, parameter.requires_grad)
            )


def share_experts(stage: nn.Module, source: ModelSource, mesh: Mesh) -> None:
    """Let a stage whose modules hold this rank's share of the experts work with those of its group, in place."""
    spread = mesh.expert_spread
    if spread is None:
        return
    group = (
        Alone() if mesh.expert_mesh is None else RankGroup(mesh.expert_mesh.get_group())
    )
    ranks, tensors = (
        mesh.grid.expert,
        TensorGroup(mesh.tensor_mesh) if mesh.grid.tensor > 1 else None,
    )
    held = dict(stage.named_modules())
    for module in (held[name] for name in experts_of(source.blueprint) if name in held):
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(
                parameter.detach(), spread, [Shard(0)], run_check=False
            )
            module.register_parameter(
                attribute, nn.Parameter(whole, parameter.requires_grad)
            )
        share_out(module, ranks, group, partial(_locals, module), tensors)


def _locals(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: local(parameter)
        for name, parameter in module.named_parameters(recurse=False)
    }
