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
from torch.distributed.tensor.parallel import parallelize_module

from planner.errors import UnsupportedError
from profiler.local_tensor import local as local
from profiler.local_tensor import with_local as with_local
from profiler.models import ModelSource
from profiler.split_group import split_ours
from profiler.tensor_parallel import parallel_styles, plan, split_modules


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Within, this process is rank 0 of so many ranks, none of which exists; one rank needs no group.

    Raises:
        UnsupportedError: this process already is a rank of a real group.
    """
    if ranks == 1:
        yield
        return
    if dist.is_initialized():
        raise UnsupportedError(
            "shards are measured in a process of their own, but this one is a rank of a process group.",
            field="tensor_parallel_degrees",
            mend="measure outside of torchrun, or measure degree 1 only.",
        )
    # Importing it registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def split(stage: nn.Module, source: ModelSource, degree: int, device: torch.device) -> None:
    """Leave one rank's shard of a stage of this model, in place; to be called within `fake_ranks`."""
    mesh = DeviceMesh(device.type, torch.arange(degree))
    styles, chosen = parallel_styles(), split_modules(stage, plan(source))
    split_ours(stage, chosen, mesh)
    for name, style in chosen.items():
        if style in styles:
            parallelize_module(stage.get_submodule(name), mesh, styles[style], src_data_rank=None)
