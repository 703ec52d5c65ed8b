"""The device mesh: where this process stands in the plan's grid, and the process groups of every axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planner.executor.support import Grid


class Sharers(NamedTuple):
    """Who shares out the states of a parameter."""

    group: dist.ProcessGroup
    """The ranks that do, each a part."""
    copies: dist.ProcessGroup | None = None
    """Ranks of other such groups that keep the same part; None: there is one group."""


class Hybrid(NamedTuple):
    """One-dimensional meshes of the data and context axis where several groups of ranks share out ZeRO's states."""

    copies: DeviceMesh
    """Ranks that keep the same part, one of every group."""
    shard: DeviceMesh
    """Ranks of one group."""
    expert_shard: DeviceMesh
    """Those of them that hold the same experts."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's coordinates and groups. Axis names are torchtitan's: ``pp``, ``dp``, ``cp``, ``tp``."""

    device_mesh: DeviceMesh
    rank: int
    pipeline: int
    data: int
    context: int
    tensor: int
    summed: DeviceMesh
    """Data and context axis as one."""
    grid: Grid
    experts: DeviceMesh | None = None
    """Data and context axis as ``edp``, ranks that hold the same experts, times ``ep``, ranks that share them out."""
    hybrid: Hybrid | None = None
    """None: all data- and context-parallel ranks share out ZeRO's states."""
    expert_spread: DeviceMesh | None = None
    """One-dimensional mesh of the ranks that hold other experts, expert- times tensor-parallel ones; None: all hold
    all."""

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """One-dimensional mesh of the expert-parallel ranks, which send each other rows; None: there is one."""
        return None if self.experts is None else self.experts["ep"]

    def holds_experts(self, tensor: torch.Tensor) -> bool:
        """Is the tensor shared out over an expert-parallel group?"""
        has_groups = self.experts is not None
        return (
            has_groups
            and isinstance(tensor, DTensor)
            and tensor.device_mesh == self.expert_spread
        )

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """Ranks of one pipeline: the same coordinates on all other axes."""
        return self.device_mesh["pp"].get_group()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks that hold this rank's shard too and sum its gradients: replicas, and context-parallel ranks, which see
        other pieces of the same samples."""
        return self.summed.get_group()

    def replicas(self, parameter: torch.Tensor) -> dist.ProcessGroup | None:
        """Ranks that sum this parameter's gradients: fewer of experts than of all else; None: this rank alone."""
        group = self.data_group
        if self.experts is not None and self.holds_experts(parameter):
            group = self.experts["edp"].get_group()
        return group if group.size() > 1 else None

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Ranks that share out ZeRO's states with this one."""
        return self.data_group if self.hybrid is None else self.hybrid.shard.get_group()

    @property
    def expert_shard_group(self) -> dist.ProcessGroup:
        """Those of them that hold the same experts."""
        if self.experts is None:
            return self.shard_group
        return (
            self.experts["edp"] if self.hybrid is None else self.hybrid.expert_shard
        ).get_group()

    def sharers(self, tensor: torch.Tensor) -> Sharers:
        """Who shares out the states of a parameter: of experts, fewer ranks than of all else."""
        copies = None if self.hybrid is None else self.hybrid.copies.get_group()
        return Sharers(
            self.expert_shard_group if self.holds_experts(tensor) else self.shard_group,
            copies,
        )

    @property
    def context_group(self) -> dist.ProcessGroup:
        """Ranks that share the sequence of this rank's samples."""
        return self.device_mesh["cp"].get_group()

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """Shards of one stage: the same coordinates on all other axes."""
        return self.device_mesh["tp"].get_group()

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """One-dimensional mesh for DTensor."""
        return self.device_mesh["tp"]


def build_mesh(grid: Grid, device_type: str) -> Mesh:
    """Build all process groups of the grid; a collective call of all ranks of the default group."""
    ranks = torch.tensor(grid.ranks, dtype=torch.int)
    device_mesh = DeviceMesh(
        device_type, ranks, mesh_dim_names=("pp", "dp", "cp", "tp")
    )
    summed = (
        device_mesh["dp", "cp"]._flatten("dp_cp")
        if grid.context > 1
        else device_mesh["dp"]
    )
    pipeline, data, context, tensor = device_mesh.get_coordinate() or (0, 0, 0, 0)
    experts = _expert_mesh(grid, ranks, device_type)
    hybrid = _hybrid_mesh(grid, ranks, device_type)
    spread = _expert_spread(grid, experts, device_mesh)
    return Mesh(
        device_mesh,
        dist.get_rank(),
        pipeline,
        data,
        context,
        tensor,
        summed,
        grid,
        experts,
        hybrid,
        spread,
    )


def _expert_mesh(
    grid: Grid, ranks: torch.Tensor, device_type: str
) -> DeviceMesh | None:
    if grid.expert == 1:
        return None
    names = ("pp", "edp", "ep", "tp")
    return DeviceMesh(
        device_type,
        ranks.reshape(grid.pipeline, -1, grid.expert, grid.tensor),
        mesh_dim_names=names,
    )


def _expert_spread(
    grid: Grid, experts: DeviceMesh | None, whole: DeviceMesh
) -> DeviceMesh | None:
    if experts is None:
        return whole["tp"] if grid.tensor > 1 else None
    return experts["ep", "tp"]._flatten("ep_tp") if grid.tensor > 1 else experts["ep"]


def _hybrid_mesh(grid: Grid, ranks: torch.Tensor, device_type: str) -> Hybrid | None:
    if grid.shards is None:
        return None
    names = ("pp", "dp_replicate", "edp_shard", "ep", "tp")
    shape = (grid.pipeline, -1, grid.shards // grid.expert, grid.expert, grid.tensor)
    mesh = DeviceMesh(device_type, ranks.reshape(shape), mesh_dim_names=names)
    shard = (
        mesh["edp_shard", "ep"]._flatten("dp_shard")
        if grid.expert > 1
        else mesh["edp_shard"]
    )
    return Hybrid(mesh["dp_replicate"], shard, mesh["edp_shard"])
