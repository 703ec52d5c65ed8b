"""Random numbers of the forward pass (dropout): the same for every micro-batch, whatever rank computes it.

Before a layer runs, the generator is seeded from the layer's name, the step and the micro-batch's number in the global
batch. A pipeline of any shape then drops the same activations as one process that takes the same micro-batches one
after the other; and recomputation drops what the forward dropped, since torch's checkpoint restores the generator.
Ranks of one tensor-parallel group use one stream: right where activations are replicated; where heads are sharded,
each rank's heads drop alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


class RandomStreams:
    """Seeds a rank's layers for the micro-batch at hand."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generator = _default_generator(device)
        self.step = 0
        self.micro_batch = 0
        """Number in the global batch: data rank x micro-batches per rank + micro-batch."""
        self.piece = ""
        """Tells apart the pieces of a micro-batch's sequences; they cannot drop what the whole would drop."""

    def attach(self, parts: Mapping[str, nn.Module], *, rank: int = 0) -> None:
        """Seed before each of these modules, by a name that is the same on all ranks (`LayerCut.parts`).

        Args:
            rank: in a group whose ranks work on other tokens of the same samples.
        """
        for name, module in parts.items():
            module.register_forward_pre_hook(
                partial(self._before, f"{name}:{rank}" if rank else name)
            )

    def _before(self, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        text = f"{self._seed}:{name}:{self.step}:{self.micro_batch}{self.piece}"
        self._generator.manual_seed(
            int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
        )


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
