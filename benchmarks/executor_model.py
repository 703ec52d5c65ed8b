"""The model of the executor's benchmark: a GPT as a plain chain of modules, so that anyone can split it by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

LENGTH = 128
"""Tokens per sample."""


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(LENGTH, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(samples, tokens) -> (samples, tokens, width)."""
        embedded: torch.Tensor = (
            self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        )
        return embedded


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with layer norm and residual (Radford et al. 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = (
            nn.LayerNorm(width),
            nn.LayerNorm(width),
        )
        self.projections, self.output = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.wide, self.narrow = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(samples, tokens, width) -> the same."""
        projected = self.projections(self.attention_norm(hidden)).chunk(3, dim=-1)
        queries, keys, values = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected
        )
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True
        )
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        fed: torch.Tensor = hidden + self.narrow(
            functional.gelu(self.wide(self.feed_forward_norm(hidden)))
        )
        return fed


class Head(nn.Module):
    """Logits."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(samples, tokens, width) -> (samples, tokens, vocabulary)."""
        logits: torch.Tensor = self.logits(self.norm(hidden))
        return logits


def _gpt(
    blocks: int, width: int, heads: int, vocabulary: int
) -> tuple[nn.Module, torch.Tensor]:
    chain = (
        Embedding(vocabulary, width),
        *(Block(width, heads) for _ in range(blocks)),
        Head(vocabulary, width),
    )
    return nn.Sequential(*chain), torch.zeros(1, LENGTH, dtype=torch.long)


def small() -> tuple[nn.Module, torch.Tensor]:
    """Eight blocks of width 384."""
    return _gpt(blocks=8, width=384, heads=6, vocabulary=2048)


def tiny() -> tuple[nn.Module, torch.Tensor]:
    """Four blocks of width 32, to try the benchmark."""
    return _gpt(blocks=4, width=32, heads=2, vocabulary=256)
