"""Split tensors over a real tensor-parallel group: its exchanges, and parameters as DTensors over it.

Collectives are torch's functional ones, which selective recomputation knows (`planner.profiler.recompute`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from planner.profiler.split_modules import split_module
from planner.profiler.split_products import Entered, once_each
from planner.profiler.split_tensor import join_parts, take_part
from planner.profiler.tensor_parallel import is_ours

# Before torch 2.13 it had another name, which warns by now.
_all_gather: Callable[..., Tensor] = getattr(
    collectives, "all_gather_single", collectives.all_gather_tensor
)
_wait: Callable[[Tensor], Tensor] = collectives.wait_tensor


def _summed(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    return _wait(collectives.all_reduce(tensor.contiguous(), "sum", mesh))


def largest_in_group(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """For each of some numbers the largest one of all ranks of a group; without a gradient."""
    return _wait(collectives.all_reduce(values, "max", mesh))


class _Enter(torch.autograd.Function):
    """Nothing on the way there; the gradients are added up on the way back."""

    @staticmethod
    def forward(context: Any, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        context.mesh = mesh
        return whole.view_as(whole)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None]:
        return _summed(gradients[0], context.mesh), None


class _Leave(torch.autograd.Function):
    """Partial sums are added up on the way there; nothing on the way back."""

    @staticmethod
    def forward(context: Any, partial: Tensor, mesh: DeviceMesh) -> Tensor:
        return _summed(partial, mesh)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


class _Take(torch.autograd.Function):
    """This rank's part on the way there; the gradients of all parts are gathered on the way back."""

    @staticmethod
    def forward(
        context: Any, whole: Tensor, dimension: int, sections: int, mesh: DeviceMesh
    ) -> Tensor:
        context.arguments = dimension, sections, mesh
        return take_part(whole, dimension, sections, mesh.get_local_rank(), mesh.size())

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        dimension, sections, mesh = context.arguments
        joined = _wait(_all_gather(gradients[0].contiguous(), 0, mesh))
        return (
            join_parts(list(joined.chunk(mesh.size(), 0)), dimension, sections),
            None,
            None,
            None,
        )


class _Gather(torch.autograd.Function):
    """All ranks' features on the way there; of the gradients, the same on all ranks, this one's on the way back."""

    @staticmethod
    def forward(context: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        context.mesh = mesh
        return torch.cat(
            _wait(_all_gather(part.contiguous(), 0, mesh)).chunk(mesh.size(), 0), -1
        )

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None]:
        mesh = context.mesh
        return take_part(
            gradients[0], gradients[0].dim() - 1, 1, mesh.get_local_rank(), mesh.size()
        ).clone(), None


class GroupRanks:
    """A real group; see `planner.profiler.split_tensor.Ranks`.

    Args:
        sequence: with sequence parallelism: `planner.executor.parallel.sequence_parallel` enters regions.
    """

    def __init__(self, mesh: DeviceMesh, *, sequence: bool = False) -> None:
        self._mesh, self._sequence = mesh, sequence
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self._entered = Entered()

    def read(self, whole: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`; what several products of a region read enters once."""
        return whole if self._sequence else self._entered.once(whole, self.enter)

    def leave(self, partial: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        self._entered.forget()
        if self._sequence:
            spread = DTensor.from_local(
                partial, self._mesh, [Partial()], run_check=False
            )
            return spread.redistribute(placements=[Shard(partial.dim() - 2)]).to_local()
        summed: Tensor = _Leave.apply(partial, self._mesh)  # type: ignore[no-untyped-call]
        return summed

    def add(self, whole: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        return self.enter(whole) if self._sequence else whole

    def total(self, partial: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        summed: Tensor = _Leave.apply(partial, self._mesh)  # type: ignore[no-untyped-call]
        return summed

    def largest(self, values: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        return largest_in_group(values, self._mesh)

    def gather(self, part: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        whole: Tensor = _Gather.apply(part, self._mesh)  # type: ignore[no-untyped-call]
        return whole

    def enter(self, whole: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        if not (whole.requires_grad and torch.is_grad_enabled()):
            return whole
        entered: Tensor = _Enter.apply(whole, self._mesh)  # type: ignore[no-untyped-call]
        return entered

    def take(self, whole: Tensor, dimension: int, sections: int) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        if not whole.requires_grad:
            return take_part(whole, dimension, sections, self.rank, self.ranks)
        part: Tensor = _Take.apply(whole, dimension, sections, self._mesh)  # type: ignore[no-untyped-call]
        return part

    @contextmanager
    def drawing(self, device: torch.device) -> Iterator[None]:
        """See `planner.profiler.split_tensor.Ranks`. Seeded from the state of the generator, so that recomputation, which
        restores that state, draws the same numbers again."""
        if device.type == "meta":
            yield
            return
        generator = (
            torch.cuda.default_generators[device.index or 0]
            if device.type == "cuda"
            else torch.default_generator
        )
        before = generator.get_state()
        digest = hashlib.sha256(
            before.numpy().tobytes() + bytes(f":{self.rank}", "ascii")
        ).digest()
        generator.manual_seed(int.from_bytes(digest[:8]))
        try:
            yield
        finally:
            generator.set_state(before)
            torch.rand(1, device=device)  # so that what is drawn next differs

    def divide(self, length: int) -> bool:
        """See `planner.profiler.split_tensor.Ranks`."""
        return length % self.ranks == 0


def placement_of(dimension: int, sections: int) -> Placement:
    """How a parameter is placed whose dimension consists of sections that are split each by itself."""
    return (
        Shard(dimension)
        if sections == 1
        else _StridedShard(dimension, split_factor=sections)
    )


def _hold(
    mesh: DeviceMesh, parameter: nn.Parameter, dimension: int, sections: int
) -> nn.Parameter:
    """This rank's part of a parameter, as a DTensor of the whole one's shape."""
    part = take_part(
        parameter.detach(), dimension, sections, mesh.get_local_rank(), mesh.size()
    )
    spread = DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),
        mesh,
        [placement_of(dimension, sections)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(spread, parameter.requires_grad)


def split_ours(
    stage: nn.Module,
    styles: Mapping[str, str],
    mesh: DeviceMesh,
    *,
    sequence: bool = False,
) -> None:
    """Leave a rank's part of the modules that torch's `parallelize_module` does not split, in place.

    Args:
        styles: by qualified name; modules of other styles are left as they are.
        sequence: with sequence parallelism.
    """
    ranks, hold = GroupRanks(mesh, sequence=sequence), once_each(partial(_hold, mesh))
    for name, style in styles.items():
        if is_ours(style):
            split_module(stage.get_submodule(name), style, ranks, hold)
