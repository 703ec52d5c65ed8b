"""Flat shards: parameters one after the other in one tensor, cut into equal parts, one per data-parallel rank.

Of n elements on r ranks every rank holds ceil(n / r), whatever the shapes: what the cost model promises (M1), and as
DeepSpeed and FSDP's first version do (Rajbhandari et al. 2020, "ZeRO", section 5; Zhao et al. 2023, "PyTorch FSDP",
section 3.2.1). Shards by rows, as in FSDP2, would leave more to the first ranks wherever rows do not divide.

A unit is what is gathered and reduced in one collective. Its parameters are views of one tensor, whose storage can be
freed and made again without their noticing, so that what autograd has saved of them stays valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from planner.executor.sharding import like, local


@dataclass(frozen=True, slots=True)
class Span:
    """Where a parameter stands in its unit."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of a parameter."""

    span: Span
    start: int
    """In the parameter's elements, one after the other."""
    stop: int
    place: int
    """Of its first element in the rank's shard."""


class Unit:
    """Parameters that are gathered and reduced together.

    Args:
        named: all of one type, all trained or none.
        group: the replicas.
        stage: whose backward fills the gradients; None: several stages'.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], group: dist.ProcessGroup, stage: int | None) -> None:
        self.group, self.stage = group, stage
        self.spans: list[Span] = []
        end = 0
        for name, parameter in named.items():
            start, end = end, end + local(parameter.detach()).numel()
            self.spans.append(Span(name, parameter, start, end))
        self.is_trained = next(iter(named.values())).requires_grad
        self.shard_elements = -(-end // group.size())
        self.padding_elements = self.shard_elements * group.size() - end
        self.first = self.shard_elements * group.rank()
        self.full = self.shard = self.gradient = torch.empty(0)
        """All values; this rank's part of them; this rank's part of the gradient."""
        self.full_gradient: torch.Tensor | None = None
        """ZeRO 1: of all values."""
        self.unfilled = len(self.spans)
        """Gradients that the backward at hand has not filled yet."""
        self.is_gathered = True
        self._own_shard = False

    def pieces(self) -> Iterator[Piece]:
        """What this rank holds, without what is empty."""
        last = self.first + self.shard_elements
        for span in self.spans:
            start, stop = max(span.start, self.first), min(span.stop, last)
            if start < stop:
                yield Piece(span, start - span.start, stop - span.start, start - self.first)

    @torch.no_grad()
    def bind(self, *, own_shard: bool, own_gradient: bool) -> None:
        """Make the parameters views of one tensor.

        Args:
            own_shard: keep this rank's values apart, so that those of all ranks can be freed.
            own_gradient: likewise the gradient, which is else kept whole.
        """
        sample = local(self.spans[0].parameter.detach())
        self.full = sample.new_zeros(self.shard_elements * self.group.size())
        for span in self.spans:
            view = self._view(self.full, span)
            view.copy_(local(span.parameter.detach()))
            whole = nn.Parameter(like(span.parameter, view), span.parameter.requires_grad)
            torch.utils.swap_tensors(span.parameter, whole)  # type: ignore[no-untyped-call]
        self.shard = self._mine(self.full)
        self._own_shard = own_shard
        if own_shard:
            self.shard = self.shard.clone()
            self.free()
        if self.is_trained:
            self._bind_gradient(own_gradient)

    def _bind_gradient(self, own: bool) -> None:
        if own:
            self.gradient = torch.zeros_like(self.shard)
            return
        self.full_gradient = torch.zeros_like(self.full)
        self.gradient = self._mine(self.full_gradient)
        for span in self.spans:
            span.parameter.grad = like(span.parameter, self._view(self.full_gradient, span))

    def gather(self) -> None:
        """Make all values again, from all ranks."""
        if not self.is_gathered:
            self.full.untyped_storage().resize_(self.full.nbytes)
            dist.all_gather_into_tensor(self.full, self.shard, group=self.group)
            self.is_gathered = True

    def free(self) -> None:
        """Free all values but this rank's."""
        self.full.untyped_storage().resize_(0)
        self.is_gathered = False

    def publish(self) -> dist.Work | None:
        """Send this rank's values, which have changed, to all; where they are kept apart, `gather` will."""
        if self._own_shard:
            self.free()
            return None
        work: dist.Work | None = dist.all_gather_into_tensor(self.full, self.shard, group=self.group, async_op=True)
        return work

    @torch.no_grad()
    def take_gradients(self) -> torch.Tensor:
        """The gradients of the parameters, one after the other; the parameters have none afterwards."""
        taken = self.full.new_zeros(self.shard_elements * self.group.size())
        for span in self.spans:
            gradient = span.parameter.grad
            if gradient is not None:
                self._view(taken, span).copy_(local(_as_placed(gradient, span.parameter)))
                span.parameter.grad = None
        return taken

    def _mine(self, full: torch.Tensor) -> torch.Tensor:
        return full[self.first : self.first + self.shard_elements]

    @staticmethod
    def _view(full: torch.Tensor, span: Span) -> torch.Tensor:
        return full[span.start : span.stop].view(local(span.parameter.detach()).shape)


def _as_placed(gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The gradient of a tensor-parallel parameter, placed as the parameter is."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """The elements start..stop (exclusive) of a tensor's flat order as boxes, in order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(last, boxes(start - last * row, stop - last * row, shape[1:]))
        return
    yield from _in_row(first - 1, boxes(start - (first - 1) * row, row, shape[1:]) if start < first * row else ())
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(last, boxes(0, stop - last * row, shape[1:]))


def _in_row(row: int, found: Iterator[Box] | tuple[()]) -> Iterator[Box]:
    for offsets, sizes in found:
        yield (row, *offsets), (1, *sizes)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece of a tensor as a checkpoint holds it: as boxes of the whole tensor, so that any other layout finds its
    own parts in it (torch's `_Checkpointable` protocol).
    """

    values: torch.Tensor
    """Flat: of the parameter's piece, or a state of it."""
    start: int
    shape: tuple[int, ...]
    """Of the tensor that it is a piece of, on this rank."""
    offsets: tuple[int, ...]
    """Of that tensor in the whole one: it may be a tensor-parallel rank's."""
    whole: tuple[int, ...]

    @classmethod
    def of(cls, piece: Piece, values: torch.Tensor) -> StoredPiece:
        """The piece of a parameter, or of something of its shape."""
        parameter = piece.span.parameter
        shape, offsets = tuple(parameter.shape), (0,) * parameter.dim()
        if isinstance(parameter, DTensor):
            placed = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
            shape, offsets = placed
        return cls(values, piece.start, shape, offsets, tuple(parameter.shape))

    def _parts(self) -> Iterator[tuple[ChunkStorageMetadata, torch.Tensor]]:
        begin, flat = 0, self.values.view(-1)
        for offsets, sizes in boxes(self.start, self.start + flat.numel(), self.shape):
            end = begin + prod(sizes)
            place = torch.Size(mine + box for mine, box in zip(self.offsets, offsets, strict=True))
            yield ChunkStorageMetadata(place, torch.Size(sizes)), flat[begin:end].view(sizes)
            begin = end

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties, size = TensorProperties.create_from_tensor(self.values), torch.Size(self.whole)
        facts = (TensorWriteData(chunk, properties, size) for chunk, _ in self._parts())
        return [
            WriteItem(MetadataIndex(name, each.chunk.offsets), WriteItemType.SHARD, tensor_data=each) for each in facts
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._parts()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(part for chunk, part in self._parts() if chunk.offsets == index.offset)
