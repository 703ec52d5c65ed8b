"""Whether a model's inputs have their samples in dimension 0.

Every count takes dimension 0 of the inputs for the samples of a micro-batch. torch's own recurrent and attention layers
take tokens there by default (``batch_first=False``), and a model of such layers runs on any shape: it would be counted
as sequences of as many tokens as there are samples. So a model is run on two micro-batches on meta tensors, and
whatever goes over the tokens of a sequence (an attention's softmax, a recurrent layer) may not go over more of them for
more samples. Not seen are models that treat every token by itself, whose counts are the same either way, and models
that do not run on meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import UnsupportedError

SIZES = (2, 3)
"""Samples of the two micro-batches."""
_SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)
"""Their first arguments are the scores and the dimension."""
_LEAST_DIMENSIONS = 3
"""Of an attention's scores: (batch, queries, keys). Two are classes of samples, or a contrastive loss of all pairs."""


def check_samples_first(
    name: str,
    module: nn.Module,
    inputs: Callable[[int], Sequence[Tensor]],
    keywords: Sequence[str] = (),
) -> None:
    """Refuse a model that takes dimension 0 of its inputs for the tokens of a sequence.

    Args:
        name: of the model, in error messages.
        module: on meta.
        inputs: meta tensors of a micro-batch of so many samples.
        keywords: names of the inputs in the module's forward; empty: they are known by their places.

    Raises:
        UnsupportedError: the tokens of a sequence grow with the samples.
    """
    lengths = []
    for size in SIZES:
        seen = _Lengths()
        try:
            with torch.no_grad(), seen.of_recurrent_layers(module), seen:
                _call(module, inputs(size), keywords)
        except Exception:  # the user's code: whoever counts it says what is wrong
            return
        lengths.append(seen.found)
    few, many = lengths
    if len(few) != len(many) or few == many:
        return
    raise UnsupportedError(
        f"the model takes dimension 0 of its inputs for the tokens of a sequence: with {SIZES[1]} instead of {SIZES[0]} "
        "samples its sequences become longer.",
        field=name,
        hint="take inputs with samples first: batch_first=True, or inputs.transpose(0, 1) in the model's forward, and "
        "example inputs of that shape.",
    )


def _call(module: nn.Module, inputs: Sequence[Tensor], keywords: Sequence[str]) -> None:
    if keywords:
        module(**dict(zip(keywords, inputs, strict=True)))
    else:
        module(*inputs)


class _Lengths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the tokens that every softmax of an attention, and every recurrent layer, goes over."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and record a softmax."""
        if func in _SOFTMAX:
            scores, dimension = args[:2]
            if scores.dim() >= _LEAST_DIMENSIONS:
                self.found.append(scores.shape[dimension])
        return func(*args, **(kwargs or {}))

    def of_recurrent_layers(self, module: nn.Module) -> _Hooks:
        """Record the recurrent layers of a module, too, while the context lasts."""
        return _Hooks(module, self._see)

    def _see(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        given = inputs[0] if inputs else None
        if isinstance(given, Tensor):
            is_batch_first = bool(layer.batch_first) and given.dim() > 2
            self.found.append(given.shape[1 if is_batch_first else 0])


class _Hooks:
    """Calls a function before every recurrent layer of a module runs."""

    def __init__(
        self, module: nn.Module, see: Callable[[nn.Module, tuple[Any, ...]], None]
    ) -> None:
        self._layers = [
            part for part in module.modules() if isinstance(part, nn.RNNBase)
        ]
        self._see = see
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles = [
            layer.register_forward_pre_hook(self._see) for layer in self._layers
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
