"""Units of a schedule: the micro-batches of a step, or the sequence chunks of each, and this rank's piece of them.

Unit u is chunk u mod Q of micro-batch u div Q (`planner.schedule.actions.Action.micro_batch`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from planner.executor.parallel.mesh import Mesh
from planner.executor.train.data import Inputs
from planner.profiler.sequence import KeyValues, Pieces, gather_over
from planner.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class TokenTargets:
    """Targets of a piece."""

    tokens: torch.Tensor
    """(samples, tokens) of the whole sequences."""
    start: int
    """Position of the piece's first token."""


def pieces_of(plan: Plan, context_rank: int = 0) -> Pieces:
    """How a rank cuts the plan's sequences."""
    layout = plan.layout
    length = plan.request.job.sequence_length
    return Pieces(
        length, layout.sequence_chunks, layout.context_parallel_degree, context_rank
    )


def split_inputs(inputs: Inputs, pieces: Pieces, micro_batches: int) -> list[Inputs]:
    """This rank's piece of every unit; what is no whole sequence is cut into micro-batches only.

    Args:
        inputs: samples along dimension 0, tokens along dimension 1.
    """
    whole = zip(
        *(torch.tensor_split(each, micro_batches) for each in inputs), strict=True
    )
    if not pieces.is_split:
        return list(whole)
    ranges = _ranges(pieces)
    return [
        tuple(each[:, start:stop] for each in micro_batch)
        for micro_batch in whole
        for start, stop in ranges
    ]


def split_targets(
    targets: torch.Tensor, pieces: Pieces, micro_batches: int
) -> list[Any]:
    """What the loss of every unit takes."""
    whole = torch.tensor_split(targets, micro_batches)
    if not pieces.is_split:
        return list(whole)
    return [
        TokenTargets(micro_batch, start)
        for micro_batch in whole
        for start, _ in _ranges(pieces)
    ]


def _ranges(pieces: Pieces) -> list[tuple[int, int]]:
    found = [pieces.piece(chunk) for chunk in range(pieces.chunks)]
    return [(piece.start, piece.stop) for piece in found]


class StagePieces:
    """Keys and values that one stage keeps, by micro-batch, while its chunks are on their way."""

    def __init__(self, pieces: Pieces, mesh: Mesh) -> None:
        self._pieces = pieces
        self._gather = (
            gather_over(mesh.context_group) if pieces.context_ranks > 1 else None
        )
        self._kept: dict[int, KeyValues] = {}

    def place(self, unit: int) -> tuple[int, str]:
        """The unit's micro-batch, and what tells this rank's piece of it from others (nothing where it is whole)."""
        micro_batch, chunk = divmod(unit, self._pieces.chunks)
        return (
            micro_batch,
            f".{self._pieces.piece(chunk).start}" if self._pieces.is_split else "",
        )

    def keywords(self, unit: int) -> dict[str, Any]:
        """What the stage's forward takes besides its input."""
        if not self._pieces.is_split:
            return {}
        micro_batch, chunk = divmod(unit, self._pieces.chunks)
        kept = self._kept.setdefault(micro_batch, KeyValues(self._pieces, self._gather))
        return {"past": kept.past(chunk)}

    def release(self, unit: int) -> None:
        """The unit's backward has ended; the backward of a micro-batch's first chunk is its last."""
        micro_batch, chunk = divmod(unit, self._pieces.chunks)
        if chunk == 0:
            self._kept.pop(micro_batch, None)

    def end_forwards(self, unit: int) -> None:
        """The unit's forward has ended, and no backward follows: nobody reads behind a micro-batch's last chunk."""
        micro_batch, chunk = divmod(unit, self._pieces.chunks)
        if chunk == self._pieces.chunks - 1:
            self._kept.pop(micro_batch, None)
