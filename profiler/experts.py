"""Mixtures of experts on meta tensors: the grouped matrix product, with the rows that are really routed.

Which expert a token goes to depends on values, which meta tensors lack. How much work there is does not: every token
goes to exactly top-k experts, so that the experts' products work on tokens x top-k rows in all, however these are
shared out (Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2.1). That is what transformers' own
`grouped_mm` experts run on a GPU, and what is counted here: 2 x tokens x top-k x k x n FLOPs for weights of shape
(experts, k, n), all of whose bytes are read. Uneven routing changes seconds, but neither FLOPs nor bytes; what a
capacity factor would drop or pad is the model's own code and is counted as it runs.

torch's own meta kernel of the product takes bf16 only and has no FLOP formula; `planner::grouped_mm` has both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_library = torch.library.Library("planner", "DEF")  # type: ignore[no-untyped-call]
_library.define("grouped_mm(Tensor rows, Tensor weights, Tensor ends) -> Tensor")  # type: ignore[no-untyped-call]
_library.define(
    "grouped_mm_weight(Tensor rows, Tensor gradients, Tensor ends) -> Tensor"
)  # type: ignore[no-untyped-call]


def grouped_product(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Rows (rows, k), sorted by expert, times weights (experts, k, n) -> (rows, n); by shapes alone, on meta tensors.

    Args:
        offs: one past the last row of every expert; the name that transformers calls it by.
    """
    waiting: list[tuple[Tensor, Tensor, Tensor]] = []
    held = _Weights.apply(weights, waiting)  # type: ignore[no-untyped-call]
    product: Tensor = _Product.apply(rows.to(weights.dtype), held, offs, waiting)  # type: ignore[no-untyped-call]
    return product


class _Product(torch.autograd.Function):
    """The product; its backward is that of the rows, and leaves what the weights' needs to `_Weights`.

    Two nodes, because a node of one function computes all of its gradients: autograd could not leave the weights' out
    where only the gradient of the input is wanted.
    """

    @staticmethod
    def forward(
        context: Any, rows: Tensor, weights: Tensor, ends: Tensor, waiting: list[Any]
    ) -> Tensor:
        """(rows, k) x (experts, k, n) -> (rows, n)."""
        context.save_for_backward(rows, weights, ends)
        context.waiting = waiting
        product: Tensor = torch.ops.planner.grouped_mm(rows, weights, ends)
        return product

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, Tensor, None, None]:
        """(rows, n) -> (rows, k), and a stand-in for the gradient of the weights."""
        rows, weights, ends = context.saved_tensors
        context.waiting[:] = [(rows, gradients[0], ends)]
        stand_in = weights.new_empty(()).expand(weights.shape)
        return (
            torch.ops.planner.grouped_mm(gradients[0], weights.transpose(1, 2), ends),
            stand_in,
            None,
            None,
        )


class _Weights(torch.autograd.Function):
    """The weights as they are; its backward is the product that makes their gradient."""

    @staticmethod
    def forward(context: Any, weights: Tensor, waiting: list[Any]) -> Tensor:
        """(experts, k, n) -> the same."""
        context.waiting = waiting
        return weights.view_as(weights)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None]:
        """(rows, k) and (rows, n) -> (experts, k, n)."""
        ((rows, gradient, ends),) = context.waiting
        context.waiting.clear()
        made: Tensor = torch.ops.planner.grouped_mm_weight(rows, gradient, ends)
        return made, None


def _product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weights.shape[2]))


def _weight_gradient(rows: Tensor, gradients: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((ends.shape[0], rows.shape[1], gradients.shape[1]))


_library.impl("grouped_mm", _product, "Meta")  # type: ignore[no-untyped-call]
_library.impl("grouped_mm_weight", _weight_gradient, "Meta")  # type: ignore[no-untyped-call]

GROUPED_PRODUCT = torch.ops.planner.grouped_mm
"""The product of rows and the weights of their experts, as torch dispatches it."""


@register_flop_formula(GROUPED_PRODUCT)
def _product_flops(rows: Any, weights: Any, ends: Any, *_: Any, **__: Any) -> int:
    return int(2 * rows[0] * weights[1] * weights[2])


@register_flop_formula(torch.ops.planner.grouped_mm_weight)
def _weight_flops(rows: Any, gradients: Any, ends: Any, *_: Any, **__: Any) -> int:
    return int(2 * rows[0] * rows[1] * gradients[1])
