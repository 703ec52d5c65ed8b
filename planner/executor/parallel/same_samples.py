"""Ranks that read the same samples must get the same: the first stage's inputs belong to the last one's targets.

Samples that a callable draws anew on every rank (from generators that nobody seeded, or in the order of a folder) would
train on targets of other inputs, without a word.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from planner.errors import DocumentError
from planner.executor.parallel.mesh import Mesh
from planner.executor.train.data import Batch


def refuse_unlike(batch: Batch | None, mesh: Mesh, numbers: tuple[int, int]) -> None:
    """Compare what ranks of the same replica have read; a collective call of all ranks.

    Args:
        batch: None: this rank reads none.
        numbers: of this rank's first sample, and one past its last.

    Raises:
        DocumentError: they differ; on all ranks.
    """
    told: list[tuple[tuple[int, int], str] | None] = [None] * mesh.grid.size
    dist.all_gather_object(told, None if batch is None else (numbers, _digest(batch)))
    first: dict[tuple[int, int], tuple[int, str]] = {}
    for rank, each in enumerate(told):
        if each is None:
            continue
        other, digest = first.setdefault(each[0], (rank, each[1]))
        if digest != each[1]:
            start, stop = each[0]
            raise DocumentError(
                f"gave rank {rank} other samples than rank {other} for the numbers {start}..{stop - 1}.",
                field="data",
                hint="let the same numbers always give the same samples: seed a generator by them.",
            )


def _digest(batch: Batch) -> str:
    inputs, targets = batch
    hashed = hashlib.sha256()
    for each in (*inputs, targets):
        hashed.update(f"{each.dtype} {tuple(each.shape)}".encode())
        hashed.update(
            each.detach()
            .cpu()
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
    return hashed.hexdigest()
