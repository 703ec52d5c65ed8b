"""Losses: each is the mean over one micro-batch, so that the mean over equal micro-batches is that of the batch.

Where sequences are cut into pieces, the loss of a piece is its part of its micro-batch's mean, so that the pieces'
losses, and their gradients, add up to those of the whole.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from planner.errors import UnsupportedError
from planner.executor.pipeline.pieces import TokenTargets
from planner.executor.pipeline.runtime import Loss
from planner.profiler.callables import load_callable
from planner.profiler.sequence import Pieces

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
    targets = functional.pad(tokens[:, 1:].long(), (0, 1), value=IGNORED)
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED
    )


def classification(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Cross entropy of classes (samples,), or of their probabilities (samples, classes), given logits
    (samples, classes)."""
    return functional.cross_entropy(
        logits.float(),
        classes.float() if classes.is_floating_point() else classes.long(),
    )


class CountedTokens:
    """`next_token` of samples with unequally many targets, for targets may be `IGNORED`: every target of a step counts
    alike, whichever micro-batch and replica it stands in.

        L = sum of all targets' cross entropies / their number,

    a micro-batch's share of it times the number of micro-batches: torchtitan likewise divides sums by the number of
    valid tokens of the global batch, and not means by the number of micro-batches.
    """

    def __init__(self) -> None:
        self.mean_targets = 1.0
        """Of the micro-batches of the step at hand; to be set before it."""

    def __call__(
        self, logits: torch.Tensor, targets: torch.Tensor | TokenTargets
    ) -> torch.Tensor:
        """Of a micro-batch, or of a piece of it."""
        if isinstance(targets, TokenTargets):
            total = _total(logits, _following(targets, logits.shape[1]))
        else:
            total = _total(
                logits, functional.pad(targets[:, 1:].long(), (0, 1), value=IGNORED)
            )
        return total / self.mean_targets

    @staticmethod
    def targets(tokens: torch.Tensor) -> int:
        """Number of tokens (samples, tokens) that are to be predicted."""
        return int((tokens[:, 1:] != IGNORED).sum())


def loss_of_pieces(loss: Loss, pieces: Pieces) -> Loss:
    """The loss of a unit.

    Raises:
        UnsupportedError: a loss that nobody told how to cut.
    """
    if not pieces.is_split or isinstance(loss, CountedTokens):
        return loss
    if loss is not next_token:
        raise UnsupportedError(
            "a loss of one's own takes whole sequences, which this layout cuts into pieces.",
            field="loss",
            hint="leave it out, or use sequence_chunks 1 and context_parallel_degree 1.",
        )
    return next_token_of_piece


def next_token_of_piece(logits: torch.Tensor, targets: TokenTargets) -> torch.Tensor:
    """A piece's share of `next_token` of the whole sequences.

    Args:
        logits: (samples, tokens of the piece, vocabulary).
        targets: where the piece stands.
    """
    return (
        _total(logits, _following(targets, logits.shape[1]))
        / targets.tokens[:, 1:].numel()
    )


def _following(targets: TokenTargets, length: int) -> torch.Tensor:
    """The tokens behind those of a piece of this length."""
    first = targets.start + 1
    following = targets.tokens[:, first : first + length].long()
    return functional.pad(following, (0, length - following.shape[1]), value=IGNORED)


def _total(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1).float(),
        following.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
