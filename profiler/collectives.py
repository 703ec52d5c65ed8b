"""Collectives by shapes alone, on meta tensors: what they make, and the copies that torch makes around them.

torch's collectives join and cut tensors along their first dimension; along any other one DTensor moves the pieces by a
chunk and a cat, before a reduce-scatter and after an all-gather. Selective recomputation keeps what a collective gives
(`profiler.recompute`). Nothing here is a kernel: the cost model prices exchanges by the links.
"""

from __future__ import annotations

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

COLLECTIVES = frozenset({torch.ops.planner.all_gather, torch.ops.planner.reduce_scatter, torch.ops.planner.all_to_all})


def _gathered(part: Tensor, parts: int, dimension: int) -> Tensor:
    joined: Tensor = torch.ops.planner.all_gather(part.contiguous(), parts)
    return joined if dimension % part.dim() == 0 else torch.cat(joined.chunk(parts, 0), dimension)


def _scattered(whole: Tensor, parts: int, dimension: int) -> Tensor:
    if dimension % whole.dim() != 0:
        whole = torch.cat(whole.chunk(parts, dimension), 0)
    scattered: Tensor = torch.ops.planner.reduce_scatter(whole, parts)
    return scattered


def _part(whole: Tensor, parts: int, dimension: int) -> Tensor:
    return whole.chunk(parts, dimension)[0].clone()


class Enter(torch.autograd.Function):
    """A part to the whole tensor; the backward sums and scatters the gradients."""

    @staticmethod
    def forward(context: Any, part: Tensor, parts: int, dimension: int) -> Tensor:
        """(..., n / parts, ...) -> (..., n, ...)."""
        context.arguments = parts, dimension
        return _gathered(part, parts, dimension)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        """(..., n, ...) -> (..., n / parts, ...)."""
        return _scattered(gradients[0], *context.arguments), None, None


class Leave(torch.autograd.Function):
    """Partial sums to this rank's part of the sum; the backward gathers the gradients."""

    @staticmethod
    def forward(context: Any, whole: Tensor, parts: int, dimension: int) -> Tensor:
        """(..., n, ...) -> (..., n / parts, ...)."""
        context.arguments = parts, dimension
        return _scattered(whole, parts, dimension)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        """(..., n / parts, ...) -> (..., n, ...)."""
        return _gathered(gradients[0], *context.arguments), None, None


class Gather(torch.autograd.Function):
    """A part to the whole tensor, with which all ranks do the same; the backward keeps this rank's part."""

    @staticmethod
    def forward(context: Any, part: Tensor, parts: int, dimension: int) -> Tensor:
        """(..., n / parts, ...) -> (..., n, ...)."""
        context.arguments = parts, dimension
        return _gathered(part, parts, dimension)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        """(..., n, ...) -> (..., n / parts, ...)."""
        return _part(gradients[0], *context.arguments), None, None


class Take(torch.autograd.Function):
    """The whole tensor, the same on all ranks, to this rank's part; the backward gathers the gradients."""

    @staticmethod
    def forward(context: Any, whole: Tensor, parts: int, dimension: int) -> Tensor:
        """(..., n, ...) -> (..., n / parts, ...)."""
        context.arguments = parts, dimension
        return _part(whole, parts, dimension)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        """(..., n / parts, ...) -> (..., n, ...)."""
        return _gathered(gradients[0], *context.arguments), None, None


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
