"""Expert parallelism of a stage: every rank of a group holds its share of the experts, as DTensors over the group.

The group is a run of neighbours among the data- and context-parallel ranks (equation (P1) of `planner.cost.placement`).
Gradients of experts are summed over the ranks that hold the same ones, in other groups.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from planner.errors import LayoutError, UnsupportedError
from planner.executor.sharding import local
from profiler.expert_parallel import Routes, experts_of, local_share, refusal, share_out
from profiler.models import ModelSource
from profiler.transformer_cut import TransformerChain


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
        return Routes(sent, received, here.reshape(-1).repeat_interleave(come.reshape(-1)))

    def exchange(self, rows: torch.Tensor, sent: list[int] | None, received: list[int] | None) -> torch.Tensor:
        """See `profiler.expert_parallel.Group`."""
        exchanged: torch.Tensor = all_to_all_single_autograd(rows, received, sent, self._group)
        return exchanged


def check_experts(source: ModelSource, degree: int) -> None:
    """Refuse a degree that the model's experts cannot be shared out by.

    Raises:
        UnsupportedError: the model has no experts, or none that are known here.
        LayoutError: they do not divide.
    """
    if degree == 1:
        return
    reason = refusal(source)
    if reason:
        raise UnsupportedError(
            f"{source.name} cannot be expert-parallel: {reason}.",
            field="layout.expert_parallel_degree",
            mend="write 1.",
        )
    for name, module in experts_of(source.blueprint).items():
        number = int(module.num_experts)  # type: ignore[arg-type]
        if number % degree:
            raise LayoutError(
                f"{name} has {number} experts, which {degree} ranks cannot share.",
                field="layout.expert_parallel_degree",
                mend=f"use a divisor of {number}.",
            )


def keep_share(source: ModelSource, mesh: DeviceMesh, name: str, module: nn.Module) -> None:
    """Of a block's experts keep this rank's, when all of the block has its values (`materialise.Narrow`)."""
    chain = source.cut().chain
    assert isinstance(chain, TransformerChain)  # `check_experts` has refused all others
    if name.rpartition(".")[0] != chain.blocks_name:
        return
    for experts in experts_of(module).values():
        for attribute, parameter in list(experts.named_parameters(recurse=False)):
            share = local_share(parameter.detach(), mesh.get_local_rank(), mesh.size()).clone()
            experts.register_parameter(attribute, nn.Parameter(share, parameter.requires_grad))


def share_experts(stage: nn.Module, source: ModelSource, mesh: DeviceMesh) -> None:
    """Let a stage whose modules hold this rank's share of the experts work with those of its group, in place."""
    held = dict(stage.named_modules())
    for module in (held[name] for name in experts_of(source.blueprint) if name in held):
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            spread = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
            module.register_parameter(attribute, nn.Parameter(spread, parameter.requires_grad))
        share_out(module, mesh.size(), RankGroup(mesh.get_group()), partial(_locals, module))


def _locals(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(parameter) for name, parameter in module.named_parameters(recurse=False)}
