"""Collectives by shapes alone, on meta tensors: what they make, and the copies that torch makes around them.

torch's collectives join and cut tensors along their first dimension; along any other one DTensor moves the pieces by a
chunk and a cat, before a reduce-scatter and after an all-gather. Selective recomputation keeps what a collective gives
(`planner.profiler.recompute`). Nothing here is a kernel: the cost model prices exchanges by the links.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("planner", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("all_gather(Tensor part, int parts) -> Tensor")  # type: ignore[no-untyped-call]
_library.define("reduce_scatter(Tensor whole, int parts) -> Tensor")  # type: ignore[no-untyped-call]
_library.define("all_to_all(Tensor rows) -> Tensor")  # type: ignore[no-untyped-call]


def _all_gather(part: Tensor, parts: int) -> Tensor:
    return part.new_empty((part.shape[0] * parts, *part.shape[1:]))


def _reduce_scatter(whole: Tensor, parts: int) -> Tensor:
    return whole.new_empty((whole.shape[0] // parts, *whole.shape[1:]))


def _all_to_all(rows: Tensor) -> Tensor:
    return torch.empty_like(rows)


_library.impl("all_gather", _all_gather, "Meta")  # type: ignore[no-untyped-call]
_library.impl("reduce_scatter", _reduce_scatter, "Meta")  # type: ignore[no-untyped-call]
_library.impl("all_to_all", _all_to_all, "Meta")  # type: ignore[no-untyped-call]

COLLECTIVES = frozenset(
    {
        torch.ops.planner.all_gather,
        torch.ops.planner.reduce_scatter,
        torch.ops.planner.all_to_all,
    }
)


def _gathered(part: Tensor, parts: int, dimension: int) -> Tensor:
    joined: Tensor = torch.ops.planner.all_gather(part.contiguous(), parts)
    return (
        joined
        if dimension % part.dim() == 0
        else torch.cat(joined.chunk(parts, 0), dimension)
    )


def _scattered(whole: Tensor, parts: int, dimension: int) -> Tensor:
    if dimension % whole.dim() != 0:
        whole = torch.cat(whole.chunk(parts, dimension), 0)
    scattered: Tensor = torch.ops.planner.reduce_scatter(whole, parts)
    return scattered


def _part(whole: Tensor, parts: int, dimension: int) -> Tensor:
    return whole.chunk(parts, dimension)[0].clone()


Move = Callable[[Tensor, int, int], Tensor]
"""(tensor, parts, dimension) -> the tensor that a rank has afterwards."""


def _there_and_back(there: Move, back: Move) -> Any:
    """A `torch.autograd.Function` of (tensor, parts, dimension): moves the tensor there, and its gradient back."""

    class ThereAndBack(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, tensor: Tensor, parts: int, dimension: int) -> Tensor:
            context.arguments = parts, dimension
            return there(tensor, parts, dimension)

        @staticmethod
        def backward(context: Any, *gradients: Any) -> tuple[Tensor, None, None]:
            return back(gradients[0], *context.arguments), None, None

    return ThereAndBack


Enter = _there_and_back(_gathered, _scattered)
"""A part to the whole tensor; the backward sums and scatters the gradients."""
Leave = _there_and_back(_scattered, _gathered)
"""Partial sums to this rank's part of the sum; the backward gathers the gradients."""
Gather = _there_and_back(_gathered, _part)
"""A part to the whole tensor, with which all ranks do the same; the backward keeps this rank's part."""
Take = _there_and_back(_part, _gathered)
"""The whole tensor, the same on all ranks, to this rank's part; the backward gathers the gradients."""


class Exchange(torch.autograd.Function):
    """Rows to other ranks for as many rows of theirs; the backward sends the gradients back."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        """(rows, ...) -> (rows, ...)."""
        exchanged: Tensor = torch.ops.planner.all_to_all(rows)
        return exchanged

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Tensor:
        """(rows, ...) -> (rows, ...)."""
        exchanged: Tensor = torch.ops.planner.all_to_all(gradients[0].contiguous())
        return exchanged
