"""DiT, the diffusion transformer: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", section 3.2
and table 1, with adaLN-Zero blocks, for latents of 256 x 256 images and classes of ImageNet.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

FREQUENCIES = 256
"""Width of the sinusoidal embedding of a time step."""
LABEL_DROPOUT = 0.1
"""Samples that are trained without their class, for classifier-free guidance (section 4)."""


def dit(
    depth: int,
    width: int,
    heads: int,
    patch: int,
    side: int,
    channels: int,
    classes: int,
) -> nn.Module:
    """DiT of `depth` blocks. Takes latents (batch, channels, side, side), time steps (batch,) and classes (batch,)."""
    return DiT(depth, width, heads, patch, side, channels, classes)


class DiT(nn.Module):
    """Patches of a noised latent through transformer blocks that time step and class modulate."""

    def __init__(
        self,
        depth: int,
        width: int,
        heads: int,
        patch: int,
        side: int,
        channels: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(
            torch.zeros(1, (side // patch) ** 2, width), requires_grad=False
        )
        self.time = TimeEmbedding(width)
        self.label = LabelEmbedding(classes, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.final = FinalLayer(width, patch, 2 * channels, side)

    def forward(self, latents: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Latents, time steps and classes -> predicted noise and its variance (batch, 2 x channels, side, side)."""
        hidden = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(times) + self.label(labels)
        for block in self.blocks:
            hidden = block(hidden, condition)
        noise: Tensor = self.final(hidden, condition)
        return noise


class TimeEmbedding(nn.Module):
    """Sinusoids of the time step through two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width)
        )

    def forward(self, times: Tensor) -> Tensor:
        """(batch,) -> (batch, width)."""
        half = FREQUENCIES // 2
        rates = torch.exp(
            torch.arange(half, device=times.device) * (-math.log(10000) / half)
        )
        angles = times[:, None] * rates
        waves = torch.cat((angles.cos(), angles.sin()), dim=1)
        embedding: Tensor = self.layers(waves.to(next(self.layers.parameters()).dtype))
        return embedding


class LabelEmbedding(nn.Module):
    """A vector per class, and one for none."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(classes + 1, width)

    def forward(self, labels: Tensor) -> Tensor:
        """(batch,) -> (batch, width); some classes are replaced by none."""
        dropped = torch.rand(labels.shape, device=labels.device) < LABEL_DROPOUT
        embedding: Tensor = self.table(
            torch.where(dropped, self.table.num_embeddings - 1, labels)
        )
        return embedding


class Modulation(nn.Module):
    """Shifts, scales and gates of a block, from the condition; zero at first, so that blocks start as identities."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.activation = nn.SiLU()
        self.linear = nn.Linear(width, parts * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """(batch, width) -> parts of shape (batch, 1, width)."""
        modulation: Tensor = self.linear(self.activation(condition))
        return tuple(modulation.unsqueeze(1).chunk(self.parts, dim=2))


class Block(nn.Module):
    """Attention and feed-forward, each with modulated norm and gate."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = Modulation(width, parts=6)
        self.norms = nn.ModuleList(_norm(width) for _ in range(2))
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        """(batch, patches, width) and (batch, width) -> (batch, patches, width)."""
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulation(condition)
        hidden = hidden + gate * self._attention(
            self.norms[0](hidden) * (1 + scale) + shift
        )
        output: Tensor = hidden + gate_2 * self.feed_forward(
            self.norms[1](hidden) * (1 + scale_2) + shift_2
        )
        return output

    def _attention(self, hidden: Tensor) -> Tensor:
        parts = self.query_key_value(hidden).chunk(3, dim=2)
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts
        )
        attended = functional.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.projection(attended.transpose(1, 2).flatten(2))
        return output


class FinalLayer(nn.Module):
    """Modulated norm, and a linear layer whose outputs are put together as an image."""

    def __init__(self, width: int, patch: int, outputs: int, side: int) -> None:
        super().__init__()
        self.modulation = Modulation(width, parts=2)
        self.norm = _norm(width)
        self.linear = nn.Linear(width, patch * patch * outputs)
        self.fold = nn.Fold(output_size=(side, side), kernel_size=patch, stride=patch)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        """(batch, patches, width) -> (batch, outputs, side, side)."""
        shift, scale = self.modulation(condition)
        image: Tensor = self.fold(
            self.linear(self.norm(hidden) * (1 + scale) + shift).transpose(1, 2)
        )
        return image


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
