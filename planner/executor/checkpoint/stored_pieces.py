"""Pieces of parameters in checkpoints: as boxes of the whole tensors, so that any other layout finds its own in them.

A run of a tensor's flat order is a part of a row, then whole rows, then a part of a row, and a row's part is the same
of fewer dimensions. torch.distributed.checkpoint stores and reads such boxes of a tensor under one name, whoever holds
them: a piece says what its own are (torch's `_Checkpointable` protocol).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from planner.executor.parallel.flat import Piece

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""
_Offsets = tuple[int, ...]


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
        yield from _in_row(
            last, boxes(start - last * row, stop - last * row, shape[1:])
        )
        return
    yield from _in_row(
        first - 1,
        boxes(start - (first - 1) * row, row, shape[1:]) if start < first * row else (),
    )
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(last, boxes(0, stop - last * row, shape[1:]))


def _in_row(row: int, found: Iterator[Box] | tuple[()]) -> Iterator[Box]:
    for offsets, sizes in found:
        yield (row, *offsets), (1, *sizes)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece of a tensor as a checkpoint holds it."""

    values: torch.Tensor
    """Flat: of the parameter's piece, or a state of it."""
    start: int
    shape: tuple[int, ...]
    """Of the tensor that it is a piece of, on this rank."""
    offsets: tuple[int, ...]
    """Of that tensor in the whole one: it may be a tensor-parallel rank's."""
    whole: tuple[int, ...]
    dimension: int = 0
    sections: int = 1
    """Of that dimension of the whole tensor, one behind the other: the rank's has a part of each (a packed product of
    queries, keys and values)."""

    @classmethod
    def of(cls, piece: Piece, values: torch.Tensor) -> StoredPiece:
        """The piece of a parameter, or of something of its shape."""
        return cls(values, piece.start, *_place_of(piece.span.parameter))

    @classmethod
    def of_rank(cls, tensor: torch.Tensor, values: torch.Tensor) -> StoredPiece:
        """All that this rank has of a tensor, or of something of its shape."""
        return cls(values, 0, *_place_of(tensor))

    def _parts(self) -> Iterator[tuple[ChunkStorageMetadata, torch.Tensor]]:
        begin, flat = 0, self.values.view(-1)
        for offsets, sizes in boxes(self.start, self.start + flat.numel(), self.shape):
            end = begin + prod(sizes)
            for place, part in self._by_section(offsets, flat[begin:end].view(sizes)):
                at = torch.Size(
                    mine + box for mine, box in zip(self.offsets, place, strict=True)
                )
                yield ChunkStorageMetadata(at, part.shape), part
            begin = end

    def _by_section(
        self, offsets: tuple[int, ...], box: torch.Tensor
    ) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """A box of the rank's tensor as boxes that lie in one section each, at the places that they would have if the
        whole tensor were the rank's part and what other ranks have behind each section."""
        if self.sections == 1:
            yield offsets, box
            return
        held, apart = (
            shape[self.dimension] // self.sections for shape in (self.shape, self.whole)
        )
        start, stop = (
            offsets[self.dimension],
            offsets[self.dimension] + box.shape[self.dimension],
        )
        for section in range(start // held, -(-stop // held)):
            first, last = max(start, section * held), min(stop, (section + 1) * held)
            place = (
                *offsets[: self.dimension],
                first + section * (apart - held),
                *offsets[self.dimension + 1 :],
            )
            yield place, box.narrow(self.dimension, first - start, last - first)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties, size = (
            TensorProperties.create_from_tensor(self.values),
            torch.Size(self.whole),
        )
        facts = (TensorWriteData(chunk, properties, size) for chunk, _ in self._parts())
        return [
            WriteItem(
                MetadataIndex(name, each.chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=each,
            )
            for each in facts
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._parts()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(
            part for chunk, part in self._parts() if chunk.offsets == index.offset
        )


def _place_of(
    tensor: torch.Tensor,
) -> tuple[tuple[int, ...], _Offsets, tuple[int, ...], int, int]:
    """Shape of this rank's part, its offsets in the whole tensor, the shape of that, and of which dimension the part is
    one of each of how many sections."""
    shape, whole = tuple(tensor.shape), tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return shape, (0,) * tensor.dim(), whole, 0, 1
    placement = tensor.placements[0]
    if not isinstance(placement, _StridedShard):
        shape, offsets = compute_local_shape_and_global_offset(
            whole, tensor.device_mesh, tensor.placements
        )
        return shape, offsets, whole, 0, 1
    shape, dimension, sections = (
        tuple(tensor.to_local().shape),
        placement.dim,
        int(placement.split_factor),
    )
    first = tensor.device_mesh.get_local_rank() * (shape[dimension] // sections)
    return (
        shape,
        tuple(first if each == dimension else 0 for each in range(len(shape))),
        whole,
        dimension,
        sections,
    )


def is_sectioned(tensor: torch.Tensor) -> bool:
    """Is it a DTensor of which every rank has a part of each of several sections?"""
    return isinstance(tensor, DTensor) and isinstance(
        tensor.placements[0], _StridedShard
    )


class WritePieces(DefaultSavePlanner):
    """Looks into stored pieces as torch's looks into its own sharded tensors."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The box that is to be written."""
        found = self.state_dict[index.fqn]
        return (
            found.__get_tensor_shard__(index)
            if isinstance(found, StoredPiece)
            else super().lookup_object(index)
        )


class ReadPieces(DefaultLoadPlanner):
    """Likewise."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state to read into; torch's would replace what is no tensor by None."""
        pieces = {
            name: each
            for name, each in state_dict.items()
            if isinstance(each, StoredPiece)
        }
        others = {name: each for name, each in state_dict.items() if name not in pieces}
        super().set_up_planner(others, metadata, is_coordinator)
        self.state_dict |= pieces

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The box that is to be read into."""
        found = self.state_dict[index.fqn]
        return (
            found.__get_tensor_shard__(index)
            if isinstance(found, StoredPiece)
            else super().lookup_tensor(index)
        )
