"""Ranks that do not exist, one after the other in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from planner.profiler.measure_shard import fake_group


def _gather(groups_before: int) -> torch.Size:
    """A DTensor's whole shape, by a group of a mesh that so many other groups were made before."""
    for _ in range(groups_before):
        dist.new_group([0, 1])
    mesh = DeviceMesh(
        "cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp")
    )["tp"]
    part = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
    return (part * 2).full_tensor().shape


def test_a_later_group_knows_nothing_of_an_earlier_one() -> None:
    """torch numbers groups as they are made, and DTensor remembers them by the mesh: "Could not resolve the process
    group" met whoever ran a plan after a dry run."""
    for groups_before in (3, 0, 1):
        with fake_group(0, 4):
            assert _gather(groups_before) == (4, 4)
