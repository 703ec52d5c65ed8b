"""Shards of a layer with their real local shapes, on one device: DTensor over a process group that moves nothing.

torch's fake process group lets one process be rank 0 of any number of ranks: collectives give tensors of the right
shapes at once. So a shard's modules run exactly as the executor runs them (`parallelize_module`), and what is timed
is all but their exchanges, which the cost model prices by the links.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from planner.errors import UnsupportedError
from planner.profiler.local_tensor import local as local
from planner.profiler.local_tensor import with_local as with_local
from planner.profiler.models import ModelSource
from planner.profiler.split_group import split_ours
from planner.profiler.tensor_parallel import parallel_styles, plan, split_modules


@contextmanager
def fake_group(rank: int, ranks: int, *, field: str = "") -> Iterator[None]:
    """Within, this process is one of so many ranks, of which no other exists, in a group that moves nothing.

    Args:
        field: that asks for it.

    Raises:
        UnsupportedError: this process already is a rank of a real group.
    """
    if dist.is_initialized():
        raise UnsupportedError(
            "ranks that do not exist are played by one process, but this one is a rank of a process group.",
            field=field,
            hint="do it in a process of its own, outside of torchrun.",
        )
    # Importing it registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_groups()


def _forget_groups() -> None:
    """DTensor keeps how it has split operations, and takes meshes of the same ranks for the same: a later run would
    look for groups of this one by their names."""
    # As torch.distributed.tensor.debug does, whose import takes a second.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:  # not every version of torch has one in C++
        clear()


def split(
    stage: nn.Module, source: ModelSource, degree: int, device: torch.device
) -> None:
    """Leave one rank's shard of a stage of this model, in place; to be called within `fake_group`."""
    mesh = DeviceMesh(device.type, torch.arange(degree))
    styles, chosen = parallel_styles(), split_modules(stage, plan(source))
    split_ours(stage, chosen, mesh)
    for name, style in chosen.items():
        if style in styles:
            parallelize_module(
                stage.get_submodule(name), mesh, styles[style], src_data_rank=None
            )
