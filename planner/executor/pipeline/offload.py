"""Offloading: what a rank keeps in its host's memory while its device has no use for it.

    activations    a forward hands what autograd saves of it through `saved_tensors_hooks`, which copy it to the host;
                   the backward brings a tensor back when an operation first asks for it, and drops it after the last
    states         of the optimizer, master copies too: those of one layer come to the device for its update, and go

Sources: Rhu et al. 2016, "vDNN"; Ren et al. 2021, "ZeRO-Offload"; Rajbhandari et al. 2021, "ZeRO-Infinity", sections
5.2.2 and 5.2.3. torch's own `save_on_cpu` is not used: it copies parameters too, and a tensor as often as it is saved.

Copies run on the stream that computes, from and to pinned memory: nothing hides them, as the cost model promises. On a
CPU the same copies are made within its own memory: nothing is gained, and everything can be tested.

What stays on the device: parameters and buffers; what a stage receives and puts out, which the pipeline keeps anyway;
and tensors of less than `SMALLEST_BYTES`, whose copy takes longer than its bytes are worth. All others go, of whatever
type: masks and indices too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from planner.executor.parallel.sharding import local, with_local
from planner.executor.train.memory import (
    PINNING_ALLOCATOR,
    HostMemoryError,
    allocator_error,
)

SMALLEST_BYTES = 1024
"""Of a storage that is worth its copy."""


class ActivationOffload:
    """Keeps on the host what autograd saves of a rank's micro-batches.

    Args:
        module: all stages of the rank, in the type that they compute in.
        device: that they compute on.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._resident = {
            _address(local(each.detach()))
            for each in (*module.parameters(), *module.buffers())
        }
        self._passing: set[int] = set()
        """Storages that the stage at hand receives or puts out."""
        self._copies: dict[StorageWeakRef, _HostCopy] = {}
        """Of the unit at hand. The weak reference keeps the storage's identity from being given to another one."""
        self._copied_bytes = 0
        self._held: dict[object, int] = {}
        self.peak_bytes = 0
        """The most that the units in flight had on the host at one time."""

    def attach(self, stage: nn.Module) -> None:
        """Leave on the device what this stage receives and puts out."""
        stage.register_forward_pre_hook(self._entered)
        stage.register_forward_hook(self._left)

    @contextmanager
    def saving(self, unit: object) -> Iterator[None]:
        """Within, what autograd saves goes to the host: of a unit's forward, and its loss."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield
        self._held[unit] = self._copied_bytes
        self.peak_bytes = max(self.peak_bytes, sum(self._held.values()))
        self._copies, self._passing, self._copied_bytes = {}, set(), 0

    def release(self, unit: object) -> None:
        """The unit's backward has ended."""
        del self._held[unit]

    @property
    def bytes(self) -> int:
        """On the host now."""
        return self._copied_bytes + sum(self._held.values())

    def _entered(self, stage: nn.Module, arguments: tuple[Any, ...]) -> None:
        tensors = (each for each in arguments if isinstance(each, torch.Tensor))
        self._passing.update(_address(local(each.detach())) for each in tensors)

    def _left(self, stage: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self._entered(stage, output if isinstance(output, tuple) else (output,))

    def _pack(self, tensor: torch.Tensor) -> _Kept | _Gone:
        # Without its graph: an operation that saves its own output would never be freed.
        kept = tensor.detach()
        values = _plain(kept)
        if values is None or not self._goes(values):
            return _Kept(kept, kept._version)
        placed = (
            (kept.device_mesh, kept.placements, kept.shape, kept.stride())
            if isinstance(kept, DTensor)
            else None
        )
        place = (int(values.storage_offset()), values.shape, values.stride())
        return _Gone(self._copy_of(values), values.dtype, place, placed)

    def _goes(self, values: torch.Tensor) -> bool:
        if (
            values.device != self._device
            or values.untyped_storage().nbytes() < SMALLEST_BYTES
        ):
            return False
        address = values.untyped_storage().data_ptr()
        return address not in self._resident and address not in self._passing

    def _copy_of(self, values: torch.Tensor) -> _HostCopy:
        """Of the whole storage, once: several operations save views of one."""
        storage = values.untyped_storage()
        key = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        found = self._copies.get(key)
        if found is None or found.version != values._version:
            found = self._copies[key] = _HostCopy(storage, values._version)
            self._copied_bytes += storage.nbytes()
        return found


class _HostCopy:
    """Bytes of a storage that the device has let go of; operations that have saved it hold this."""

    def __init__(self, storage: torch.UntypedStorage, version: int) -> None:
        self.version = version
        """Of the tensors on the storage: it may have been written to between two operations that save it."""
        self._device = storage.device
        self._host: torch.Tensor | None = to_host(_bytes_of(storage))
        self._back: torch.UntypedStorage | None = None

    def brought_back(self) -> torch.UntypedStorage:
        """On the device again, until the last operation that has saved it is done; the host's copy goes at once."""
        if self._host is not None:
            self._back, self._host = (
                self._host.to(
                    self._device, non_blocking=True, copy=True
                ).untyped_storage(),
                None,
            )
        assert self._back is not None
        return self._back


@dataclass(frozen=True, slots=True)
class _Gone:
    """A saved tensor whose storage is on the host."""

    copy: _HostCopy
    dtype: torch.dtype
    place: tuple[int, tuple[int, ...], tuple[int, ...]]
    """Offset, size and stride in the storage."""
    placed: tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]] | None
    """Of a DTensor: mesh, placements, size and stride."""

    def tensor(self) -> torch.Tensor:
        """On the device again."""
        storage = self.copy.brought_back()
        values = torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, *self.place
        )
        if self.placed is None:
            return values
        mesh, placements, shape, stride = self.placed
        return DTensor.from_local(
            values, mesh, placements, run_check=False, shape=shape, stride=stride
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """A saved tensor that stays on the device."""

    tensor: torch.Tensor
    version: int
    """When it was saved."""


def _unpack(saved: _Kept | _Gone) -> torch.Tensor:
    if isinstance(saved, _Gone):
        return saved.tensor()
    if saved.tensor._version != saved.version:
        # autograd itself compares versions only of what no hook has packed.
        raise RuntimeError(
            "a tensor that the backward needs has been changed in place after it was saved."
        )
    return saved.tensor


class ParkedStates:
    """Tensors that an optimizer works on, whose bytes are on the host, and on the device only while it does. The
    tensors themselves stay; it is their storages that are freed and made again.
    """

    def __init__(self) -> None:
        self._hosts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensor and its bytes on the host, by the tensor's id."""

    def add(self, tensor: torch.Tensor) -> None:
        """Send one to the host, and free its storage on the device, which it must not share."""
        values = local(tensor.detach())
        _, host = self._hosts.get(id(tensor), (None, None))
        host = (
            to_host(values) if host is None else host.copy_(values, non_blocking=True)
        )
        self._hosts[id(tensor)] = (tensor, host)
        values.untyped_storage().resize_(0)

    def park(self, tensors: Iterable[torch.Tensor]) -> None:
        """Likewise all that are to be on the host from now on."""
        every = list(tensors)
        for tensor in every:
            self.add(tensor)
        self._hosts = {id(tensor): self._hosts[id(tensor)] for tensor in every}

    def fetch(self) -> None:
        """Bring back all that is parked."""
        for tensor, host in self._hosts.values():
            values = local(tensor.detach())
            values.untyped_storage().resize_(host.untyped_storage().nbytes())
            values.copy_(host, non_blocking=True)

    def adopt(self, like: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        """A tensor whose values these on the host are from now on; spread as `like` is, where it is of its shape."""
        spread = local(like.detach())
        is_like = host.shape == spread.shape
        # Fused updates walk through the memory of parameter and states alike.
        values = torch.empty_like(
            spread if is_like else host, dtype=host.dtype, device=like.device
        )
        tensor = with_local(like, values) if is_like else values
        values.untyped_storage().resize_(0)
        self._hosts[id(tensor)] = (tensor, host)
        return tensor

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's values of a parked tensor, on the host."""
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # its copy may be under way
        return self._hosts[id(tensor)][1]

    @property
    def nbytes(self) -> int:
        """On the host."""
        return sum(host.nbytes for _, host in self._hosts.values())


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, pinned where the tensor is on an accelerator; of meta tensors a meta tensor."""
    return host_like(tensor).copy_(tensor, non_blocking=True)


def host_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Room on the host for a tensor of this shape; contiguous, for checkpoints take it apart.

    Raises:
        HostMemoryError: there is none.
    """
    is_accelerator = tensor.device.type not in ("cpu", "meta")
    device, dtype = "meta" if tensor.is_meta else "cpu", dtype or tensor.dtype
    try:
        return torch.empty(
            tensor.shape, dtype=dtype, device=device, pin_memory=is_accelerator
        )
    except (RuntimeError, MemoryError) as error:
        if allocator_error(error) is None and PINNING_ALLOCATOR not in str(error):
            raise
        raise HostMemoryError(
            tensor.numel() * dtype.itemsize, is_pinned=is_accelerator
        ) from error


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's values of a tensor; None: its kind has no storage of its own."""
    values = local(tensor)
    if isinstance(values, AsyncCollectiveTensor):
        values = values.wait()
    if (
        is_traceable_wrapper_subclass(values)
        or values.is_nested
        or values.layout != torch.strided
    ):
        return None
    return values.resolve_conj().resolve_neg()


def _address(tensor: torch.Tensor) -> int:
    """Of the storage; 0 for tensors that wrap others."""
    values = _plain(tensor)
    return 0 if values is None else values.untyped_storage().data_ptr()
