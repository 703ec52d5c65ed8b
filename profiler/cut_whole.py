"""A model that cannot be cut: a single layer, which can be planned for data and tensor splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import UnsupportedError
from planner.spec.profile import SkipEdge
from profiler.cut import Borders, CutLayer, InputMaker, LayerCut, Size, Tensors, detachable
from profiler.cut_trace import output_tensors
from profiler.transformer_cut import meta_friendly

WHOLE = CutLayer("model", "model", ("",), recomputable=False)


def cut_whole(
    model: nn.Module, inputs: InputMaker, keywords: tuple[str, ...], refusals: Sequence[UnsupportedError]
) -> LayerCut:
    """The model as its only layer.

    Args:
        refusals: why it could not be cut, the last attempt last.

    Raises:
        UnsupportedError: it does not even run on meta tensors, so that nothing could be counted.
    """
    chain = WholeChain(keywords)
    try:
        chain.borders(model, inputs, (2, 8))
    except Exception:  # any: it is the user's code; why it does not run was found before
        raise refusals[-1] from None
    return LayerCut((WHOLE,), (), chain, reason=str(refusals[-1].problems[0].message))


@dataclass(frozen=True)
class WholeChain:
    """One layer."""

    keywords: tuple[str, ...] = field(default=())
    keeps_tree = True

    def stage(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        """The model, returning tensors only."""
        model.forward = partial(_forward, model.forward, self.keywords)
        return model

    def layer(self, model: nn.Module, index: int) -> nn.Module:
        """The same."""
        return self.stage(model, index, index + 1)

    def parts(self, stage: nn.Module, index: int, layer: CutLayer) -> dict[str, nn.Module]:
        """The model."""
        return {layer.name: stage}

    def borders(self, model: nn.Module, inputs: InputMaker, size: Size) -> Borders:
        """One run of the model."""
        given = inputs(*size)
        with meta_friendly():
            output = _run(model, self.keywords, given)
        return Borders((given, output), (given,), (output,), (sum(each.nbytes for each in output),))

    def readers(self, index: int, place: int) -> list[tuple[int, int]]:
        """Nobody."""
        return []

    def later_takers(self, index: int, place: int) -> list[tuple[int, int]]:
        """Nobody."""
        return []

    def edges(self, sequence_length: int, dtype: torch.dtype) -> tuple[SkipEdge, ...]:
        """None."""
        return ()


def _run(forward: Callable[..., Any], keywords: tuple[str, ...], given: Tensors) -> Tensors:
    named = dict(zip(keywords, given, strict=True)) if keywords else {}
    return output_tensors(forward(**named) if named else forward(*given))


def _forward(forward: Callable[..., Any], keywords: tuple[str, ...], *given: Tensor) -> Tensor | Tensors:
    """One tensor, or several."""
    output = tuple(map(detachable, _run(forward, keywords, given)))
    return output[0] if len(output) == 1 else output
