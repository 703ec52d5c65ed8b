"""The device mesh: where this process stands in the plan's grid, and the process groups of every axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planner.executor.support import Grid


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

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """One-dimensional mesh of the ranks that share out the experts; None: all ranks hold all."""
        return None if self.experts is None else self.experts["ep"]

    def holds_experts(self, tensor: torch.Tensor) -> bool:
        """Is the tensor shared out with the experts?"""
        return isinstance(tensor, DTensor) and tensor.device_mesh == self.expert_mesh

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """Ranks of one pipeline: the same coordinates on all other axes."""
        return self.device_mesh["pp"].get_group()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks that hold this rank's shard too and sum its gradients: replicas, and context-parallel ranks, which see
        other pieces of the same samples."""
        return self.summed.get_group()

    def summed_group(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        """Ranks that hold this very parameter too and sum its gradient: for experts, fewer than for all else."""
        if self.experts is not None and self.holds_experts(tensor):
            return self.experts["edp"].get_group()
        return self.data_group

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
    device_mesh = DeviceMesh(device_type, ranks, mesh_dim_names=("pp", "dp", "cp", "tp"))
    summed = device_mesh["dp", "cp"]._flatten("dp_cp") if grid.context > 1 else device_mesh["dp"]
    pipeline, data, context, tensor = device_mesh.get_coordinate() or (0, 0, 0, 0)
    experts = _expert_mesh(grid, ranks, device_type)
    return Mesh(device_mesh, dist.get_rank(), pipeline, data, context, tensor, summed, grid, experts)


def _expert_mesh(grid: Grid, ranks: torch.Tensor, device_type: str) -> DeviceMesh | None:
    if grid.expert == 1:
        return None
    names = ("pp", "edp", "ep", "tp")
    return DeviceMesh(device_type, ranks.reshape(grid.pipeline, -1, grid.expert, grid.tensor), mesh_dim_names=names)
