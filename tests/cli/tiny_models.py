"""Models of the tests, for references such as ``tests.cli.tiny_models:sequential``."""

from __future__ import annotations

import torch
from torch import nn


def sequential() -> tuple[nn.Module, torch.Tensor]:
    """Four linear layers of 16 features, and two samples of input."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.zeros(2, 16)


def tokens() -> nn.Module:
    """Token ids in, logits out."""
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32))


def not_a_model() -> int:
    """A callable that builds no model."""
    return 7
