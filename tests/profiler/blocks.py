"""Users' own modules, written as people write them: nobody has told how to split them over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, TOKENS = 32, 4, 8


class PackedAttention(nn.Module):
    """One product for queries, keys and values, and reshapes by the width of the input (as in nanoGPT)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """(samples, tokens, width) -> the same."""
        samples, tokens, width = hidden.size()
        query, key, value = (
            each.view(samples, tokens, HEADS, width // HEADS).transpose(1, 2)
            for each in self.qkv(hidden).split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        made: Tensor = self.proj(
            mixed.transpose(1, 2).contiguous().view(samples, tokens, width)
        )
        return made


class StackedAttention(nn.Module):
    """Heads stacked by a permutation, normed one by one, and multiplied by matrix products (as in timm)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH // HEADS)
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS) / 10)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """(samples, tokens, width) -> the same."""
        samples, tokens, width = hidden.shape
        packed = (
            self.qkv(hidden)
            .reshape(samples, tokens, 3, HEADS, -1)
            .permute(2, 0, 3, 1, 4)
        )
        query, key, value = packed.unbind(0)
        scores = (
            self.norm(query) @ key.transpose(-2, -1) / (width // HEADS) ** 0.5
            + self.bias
        )
        made: Tensor = self.proj(
            (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)
        )
        return made


class Block(nn.Module):
    """Attention and a feed-forward network, beside a residual."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attention
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """(samples, tokens, width) -> the same."""
        hidden = hidden + self.attention(self.norm1(hidden))
        made: Tensor = hidden + self.network(self.norm2(hidden))
        return made


class Pool(nn.Module):
    """Classes of the mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        """(samples, tokens, width) -> (samples, 5)."""
        made: Tensor = self.head(hidden.mean(dim=1))
        return made


def own_transformer() -> tuple[nn.Module, Tensor]:
    """Blocks with packed and stacked heads."""
    blocks = (
        Block(PackedAttention()),
        Block(StackedAttention()),
        Block(StackedAttention()),
    )
    return nn.Sequential(*blocks, Pool()), torch.randn(2, TOKENS, WIDTH)


class Residual(nn.Module):
    """Two convolutions with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(8, 16, 3, padding=1),
            nn.Conv2d(16, 8, 3, padding=1),
        )
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, images: Tensor) -> Tensor:
        """(samples, 8, height, width) -> the same."""
        made: Tensor = images + self.second(
            functional.relu(self.norm(self.first(images)))
        )
        return made


def own_network() -> tuple[nn.Module, Tensor]:
    """Convolutions, and a gated feed-forward network."""
    head = nn.Sequential(nn.Linear(8, 16), nn.GLU(), nn.Linear(8, 5))
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head
    ), torch.randn(2, 3, 10, 10)


def torch_encoder() -> tuple[nn.Module, Tensor]:
    """torch's own encoder layers, without and with the samples in front, and a norm ahead."""
    layer = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 64, "dropout": 0.0}
    layers = (
        nn.TransformerEncoderLayer(**layer, batch_first=True, norm_first=True),
        Swapped(layer),
    )
    return nn.Sequential(*layers, Pool()), torch.randn(2, TOKENS, WIDTH)


class Swapped(nn.Module):
    """An encoder layer that takes the tokens in front, with a causal mask."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(**settings)

    def forward(self, hidden: Tensor) -> Tensor:
        """(samples, tokens, width) -> the same."""
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=hidden.device).triu(
            1
        )
        made: Tensor = self.layer(hidden.transpose(0, 1), src_mask=mask).transpose(0, 1)
        return made
