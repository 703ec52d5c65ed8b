"""Modules that work element by element, by an autograd function of their own that takes no `SplitTensor`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from planner.profiler.split_tensor import SplitTensor

ELEMENTWISE = frozenset({("transformers.models.bloom.modeling_bloom", "BloomGelu")})
"""Their modules and classes. Nobody can see what an autograd function does with its elements, so each is told here."""


def take_split_tensors(model: nn.Module) -> None:
    """Let those modules of a model run on this rank's part where a tensor is split, in place."""
    for module in model.modules():
        if (type(module).__module__, type(module).__name__) in ELEMENTWISE:
            module.forward = partial(_by_parts, module.forward)


def _by_parts(whole: Any, input: Tensor) -> Tensor:
    made: Tensor = (
        input.like(whole(input.local))
        if isinstance(input, SplitTensor)
        else whole(input)
    )
    return made
