"""Losses: each is the mean over one micro-batch, so that the mean over equal micro-batches is that of the batch.

Where sequences are cut into pieces, the loss of a piece is its part of its micro-batch's mean, so that the pieces'
losses, and their gradients, add up to those of the whole.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from planner.errors import UnsupportedError
from planner.executor.data import load_callable
from planner.executor.pieces import TokenTargets
from planner.executor.runtime import Loss
from profiler.sequence import Pieces

IGNORED = -100
"""cross_entropy's mark of a position without a target."""


def load_loss(name: str | None, input_kind: str) -> Loss:
    """The loss that a name tells: next-token prediction for tokens, classification otherwise, or the user's own
    ``package.module:callable`` with the signature of `Loss`.

    Raises:
        DocumentError: the callable cannot be imported.
    """
    if name is not None:
        return load_callable(name, field="loss")
    return next_token if input_kind == "tokens" else classification


def next_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every token but the first, given those before it.

    Args:
        logits: (samples, tokens, vocabulary).
        tokens: (samples, tokens), the model's own inputs.
    """
    # Shifting the targets rather than the logits saves a copy of the largest tensor of the model.
    targets = functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def classification(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Cross entropy of classes (samples,) given logits (samples, classes)."""
    return functional.cross_entropy(logits.float(), classes)


def loss_of_pieces(loss: Loss, pieces: Pieces) -> Loss:
    """The loss of a unit.

    Raises:
        UnsupportedError: a loss that nobody told how to cut.
    """
    if not pieces.is_split:
        return loss
    if loss is not next_token:
        raise UnsupportedError(
            "a loss of one's own takes whole sequences, which this layout cuts into pieces.",
            field="loss",
            mend="leave it out, or use sequence_chunks 1 and context_parallel_degree 1.",
        )
    return next_token_of_piece


def next_token_of_piece(logits: torch.Tensor, targets: TokenTargets) -> torch.Tensor:
    """A piece's share of `next_token` of the whole sequences.

    Args:
        logits: (samples, tokens of the piece, vocabulary).
        targets: where the piece stands.
    """
    tokens, first = targets.tokens, targets.start + 1
    following = tokens[:, first : first + logits.shape[1]]
    following = functional.pad(following, (0, logits.shape[1] - following.shape[1]), value=IGNORED)
    total = functional.cross_entropy(
        logits.flatten(0, 1).float(), following.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / tokens[:, 1:].numel()
