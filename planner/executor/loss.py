"""Losses: each is the mean over one micro-batch, so that the mean over equal micro-batches is that of the batch."""

from __future__ import annotations

import torch
from torch.nn import functional

from planner.executor.data import load_callable
from planner.executor.runtime import Loss

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
