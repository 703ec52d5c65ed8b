"""A model that cannot be cut: a single layer, which can be planned for data and tensor splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import UnsupportedError
from planner.profiler.compute_type import cast, cast_inputs, dtype_of
from planner.profiler.cut import (
    Borders,
    CutLayer,
    InputMaker,
    LayerCut,
    RealModel,
    Size,
    Tensors,
    detachable,
)
from planner.profiler.cut_trace import output_tensors
from planner.profiler.transformer_cut import meta_friendly
from planner.spec.profile import SkipEdge

WHOLE = CutLayer("model", "model", ("",), recomputable=False)


def cut_whole(
    model: nn.Module,
    inputs: InputMaker,
    keywords: tuple[str, ...],
    refusals: Sequence[UnsupportedError],
    real: RealModel | None = None,
    longest_sequence: int = 0,
) -> LayerCut:
    """The model as its only layer: on meta tensors if it runs on them, else with values.

    Args:
        refusals: why it could not be cut, the last attempt last.
        real: the same model with values.
        longest_sequence: tokens that it takes; 0: any number.

    Raises:
        UnsupportedError: it does not run, or returns nothing that carries gradients, so that nothing could be counted.
    """
    reason = str(refusals[-1].problems[0].message)
    short = min(longest_sequence, 8) or 8
    lengths = {short: 0, longest_sequence or short: longest_sequence}
    chains = (WholeChain(keywords), *([WholeChain(keywords, real)] if real else []))
    for chain, (tokens, only) in product(chains, lengths.items()):
        try:
            outputs = chain.borders(model, inputs, (2, tokens)).makes[-1]
        except (
            Exception
        ):  # any: it is the user's code; why it does not run was found before
            continue
        if any(each.requires_grad for each in outputs):
            needs_values = chain.real is not None
            return LayerCut(
                (WHOLE,),
                (),
                chain,
                reason=reason,
                needs_values=needs_values,
                only_sequence=only,
            )
    raise refusals[-1] from None


@dataclass(frozen=True)
class WholeChain:
    """One layer."""

    keywords: tuple[str, ...] = field(default=())
    real: RealModel | None = field(default=None, repr=False, compare=False)
    """Runs in the place of models on meta."""
    keeps_tree = True

    def stage(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        """The model, returning tensors only."""
        model.forward = partial(_forward, model.forward, self.keywords)
        return model

    def layer(self, model: nn.Module, index: int) -> nn.Module:
        """The same."""
        return self.stage(model, index, index + 1)

    def parts(
        self, stage: nn.Module, index: int, layer: CutLayer
    ) -> dict[str, nn.Module]:
        """The model."""
        return {layer.name: stage}

    def borders(self, model: nn.Module, inputs: InputMaker, size: Size) -> Borders:
        """One run of the model, or of the real one in the same type."""
        given = inputs(*size)
        if self.real is not None:
            output = _run_really(self.real, self.keywords, size, dtype_of(model))
        else:
            with meta_friendly():
                output = _run(model, self.keywords, given)
        return Borders(
            (given, output), (given,), (output,), (sum(each.nbytes for each in output),)
        )

    def readers(
        self, index: int, place: int, dtype: torch.dtype
    ) -> list[tuple[int, int]]:
        """Nobody."""
        return []

    def later_takers(
        self, index: int, place: int, dtype: torch.dtype
    ) -> list[tuple[int, int]]:
        """Nobody."""
        return []

    def edges(self, sequence_length: int, dtype: torch.dtype) -> tuple[SkipEdge, ...]:
        """None."""
        return ()


@contextmanager
def same_numbers() -> Iterator[None]:
    """Within, random numbers of the CPU are the same every time: so is the way that a model takes by its values."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        yield


def _run_really(
    real: RealModel, keywords: tuple[str, ...], size: Size, dtype: torch.dtype
) -> Tensors:
    """What the real model returns at this size, on meta."""
    with same_numbers():
        model = cast(real.build(), dtype)
        output = _run(model, keywords, cast_inputs(real.inputs(*size), dtype))
    return tuple(
        torch.empty(
            each.shape,
            dtype=each.dtype,
            device="meta",
            requires_grad=each.requires_grad,
        )
        for each in output
    )


def _run(
    forward: Callable[..., Any], keywords: tuple[str, ...], given: Tensors
) -> Tensors:
    named = dict(zip(keywords, given, strict=True)) if keywords else {}
    return output_tensors(forward(**named) if named else forward(*given))


def _forward(
    forward: Callable[..., Any], keywords: tuple[str, ...], *given: Tensor
) -> Tensor | Tensors:
    """One tensor, or several."""
    output = tuple(map(detachable, _run(forward, keywords, given)))
    return output[0] if len(output) == 1 else output
