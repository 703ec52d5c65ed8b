"""The device mesh: where this process stands in the plan's grid, and the process groups of every axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from planner.executor.support import Grid


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's coordinates and groups. Axis names are torchtitan's: ``pp``, ``dp``, ``tp``."""

    device_mesh: DeviceMesh
    rank: int
    pipeline: int
    data: int
    tensor: int
    grid: Grid

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """Ranks of one pipeline: same data and tensor coordinate."""
        return self.device_mesh["pp"].get_group()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Replicas of this rank's shard: same pipeline and tensor coordinate."""
        return self.device_mesh["dp"].get_group()

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """Shards of one stage: same pipeline and data coordinate."""
        return self.device_mesh["tp"].get_group()

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """One-dimensional mesh for DTensor."""
        return self.device_mesh["tp"]


def build_mesh(grid: Grid, device_type: str) -> Mesh:
    """Build all process groups of the grid; a collective call of all ranks of the default group."""
    device_mesh = DeviceMesh(device_type, torch.tensor(grid.ranks, dtype=torch.int), mesh_dim_names=("pp", "dp", "tp"))
    pipeline, data, tensor = device_mesh.get_coordinate() or (0, 0, 0)
    return Mesh(device_mesh, dist.get_rank(), pipeline, data, tensor, grid)
