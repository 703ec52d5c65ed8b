"""Runs of a tensor's flat order as boxes."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from planner.executor.checkpoint.stored_pieces import StoredPiece, boxes


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape, and a run of its elements."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@settings(deadline=None)
@given(runs())
def test_boxes_are_the_run(run: tuple[tuple[int, ...], int, int]) -> None:
    """In order, each element once, and few: no more than two per dimension."""
    shape, start, stop = run
    flat = torch.arange(prod(shape)).view(shape)
    found = list(boxes(start, stop, shape))
    parts = [
        flat[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1)
        for box in found
    ]
    assert [int(each) for part in parts for each in part] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape))


def test_a_piece_of_a_shard_stands_in_the_whole_tensor() -> None:
    """Offsets count from the whole tensor's start; what is read goes into the piece itself."""
    values = torch.zeros(5)
    piece = StoredPiece(values, start=1, shape=(2, 4), offsets=(2, 4), whole=(8, 8))
    items = piece.__create_write_items__("name", piece)
    assert [tuple(item.index.offset or ()) for item in items] == [(2, 5), (3, 4)]
    assert [item.tensor_data.chunk.sizes for item in items if item.tensor_data] == [
        (1, 3),
        (1, 2),
    ]
    assert all(item.tensor_data.size == (8, 8) for item in items if item.tensor_data)
    for number, chunk in enumerate(piece.__create_chunk_list__()):
        piece.__get_tensor_shard__(MetadataIndex("name", chunk.offsets)).fill_(
            number + 1
        )
    assert values.tolist() == [1, 1, 1, 2, 2]
