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
_library.define("grouped_mm_weight(Tensor rows, Tensor gradients, Tensor ends) -> Tensor")  # type: ignore[no-untyped-call]


def grouped_product(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Rows (rows, k), sorted by expert, times weights (experts, k, n) -> (rows, n); by shapes alone, on meta tensors.

    Args:
        offs: one past the last row of every expert; the name that transformers calls it by.
    """
    product: Tensor = torch.ops.planner.grouped_mm(rows.to(weights.dtype), weights, offs)
    return product


def _product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weights.shape[2]))


def _weight_gradient(rows: Tensor, gradients: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((ends.shape[0], rows.shape[1], gradients.shape[1]))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, ends = ctx.saved_tensors
    wants_rows, wants_weights, _ = ctx.needs_input_grad
    operations = torch.ops.planner
    return (
        operations.grouped_mm(gradient, weights.transpose(1, 2), ends) if wants_rows else None,
        operations.grouped_mm_weight(rows, gradient, ends) if wants_weights else None,
        None,
    )


_library.impl("grouped_mm", _product, "Meta")  # type: ignore[no-untyped-call]
_library.impl("grouped_mm_weight", _weight_gradient, "Meta")  # type: ignore[no-untyped-call]
torch.library.register_autograd("planner::grouped_mm", _backward, setup_context=_keep, lib=_library)


@register_flop_formula(torch.ops.planner.grouped_mm)
def _product_flops(rows: Any, weights: Any, ends: Any, *_: Any, **__: Any) -> int:
    return int(2 * rows[0] * weights[1] * weights[2])


@register_flop_formula(torch.ops.planner.grouped_mm_weight)
def _weight_flops(rows: Any, gradients: Any, ends: Any, *_: Any, **__: Any) -> int:
    return int(2 * rows[0] * rows[1] * gradients[1])
