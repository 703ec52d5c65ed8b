"""What ranks of one replica read is compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from planner.errors import DocumentError
from planner.executor.parallel import same_samples
from planner.executor.train.data import Batch

FIRST, SECOND = (0, 2), (2, 4)
"""Numbers of two replicas' samples."""


def _batch(value: int) -> Batch:
    return (torch.full((2, 3), value, dtype=torch.bfloat16),), torch.zeros(2)


def _compare(
    read: list[tuple[tuple[int, int], Batch | None]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    rank: int = 0,
) -> None:
    """On one of the ranks that have read this."""
    mesh, rows = (
        cast("Any", SimpleNamespace(grid=SimpleNamespace(size=len(read)))),
        list[Any](),
    )
    gather = "planner.executor.parallel.same_samples.dist.all_gather_object"
    monkeypatch.setattr(gather, lambda told, mine: rows.append(mine))
    for numbers, batch in read:
        same_samples.refuse_unlike(batch, mesh, numbers)
    monkeypatch.setattr(gather, lambda told, mine: told.__setitem__(slice(None), rows))
    same_samples.refuse_unlike(read[rank][1], mesh, read[rank][0])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_must_read_the_same_samples(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage's targets were those of other inputs where a callable drew anew, and the run learned nothing."""
    read = [(FIRST, _batch(1)), (FIRST, None), (FIRST, _batch(2))]
    with pytest.raises(
        DocumentError,
        match=r"data: gave rank 2 other samples than rank 0 for the numbers 0\.\.1",
    ):
        _compare(read, monkeypatch, rank=rank)


def test_replicas_read_samples_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of the same numbers are compared."""
    _compare(
        [
            (FIRST, _batch(1)),
            (SECOND, _batch(2)),
            (FIRST, _batch(1)),
            (SECOND, _batch(2)),
        ],
        monkeypatch,
    )
