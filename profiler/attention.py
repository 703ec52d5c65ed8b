"""Attention on meta tensors where torch would not take flash attention: with a mask, or values narrower than queries.

torch's choice on CUDA is then the memory-efficient kernel (Rabe and Staats 2021, "Self-attention Does Not Need O(n^2)
Memory"). It keeps query, key, value, bias, output and one number per row and head, as `planner::attention` does here
by shapes alone; torch's own meta kernel rounds the rows up to 32, which no polynomial in the length can follow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import (
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

_library = torch.library.Library("planner", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "attention(Tensor query, Tensor key, Tensor value, Tensor? bias, bool causal) -> (Tensor, Tensor)"
)
_library.define(  # type: ignore[no-untyped-call]
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor output, "
    "Tensor logsumexp, bool wants_bias, bool causal) -> (Tensor, Tensor, Tensor, Tensor)"
)


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Query (batch, heads, queries, k), key (batch, heads, keys, k), value (batch, heads, keys, v), and a mask that
    broadcasts to (batch, heads, queries, keys) -> (batch, heads, queries, v); by shapes alone, on meta tensors."""
    bias = None if mask is None else _bias(mask, query, key)
    output: Tensor = torch.ops.planner.attention(query, key, value, bias, is_causal)[0]
    return output


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as what is added to the scores."""
    bias = (
        torch.zeros_like(mask, dtype=query.dtype) if mask.dtype is torch.bool else mask
    )
    return bias.expand(*query.shape[:3], key.shape[2])


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    rows = query.new_empty(query.shape[:3], dtype=torch.float32)
    return _beside_heads(query, value.shape[3]), rows


def _beside_heads(like: Tensor, width: int) -> Tensor:
    """(batch, heads, rows, width), in memory a token's heads beside each other, as the kernel writes them."""
    batch, heads, rows, _ = like.shape
    return like.new_empty((batch, rows, heads, width)).transpose(1, 2)


def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    logsumexp: Tensor,
    wants_bias: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_bias = query.new_empty((*query.shape[:3], key.shape[2]) if wants_bias else (0,))
    return *(
        _beside_heads(each, each.shape[3]) for each in (query, key, value)
    ), of_bias  # type: ignore[return-value]


def _keep(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, bool],
    output: tuple[Tensor, Tensor],
) -> None:
    *tensors, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(
    ctx: Any, gradient: Tensor, _: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
    wants_bias = ctx.needs_input_grad[3]
    *of_inputs, of_bias = torch.ops.planner.attention_backward(
        gradient, *ctx.saved_tensors, wants_bias, ctx.is_causal
    )
    return *of_inputs, of_bias if wants_bias else None, None


_library.impl("attention", _attention, "Meta")  # type: ignore[no-untyped-call]
_library.impl("attention_backward", _attention_backward, "Meta")  # type: ignore[no-untyped-call]
torch.library.register_autograd(
    "planner::attention", _backward, setup_context=_keep, lib=_library
)


def causal_flops(flops: int, *, queries: int, keys: int) -> int:
    """Return the FLOPs of the scores that causal attention does not skip.

    Half of a square of scores; the queries of a part of a sequence are the last ones of
    its keys, and attend to queries x (keys - queries / 2) scores.
    """
    return flops * (2 * keys - queries) // (2 * keys)


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def _cpu_forward_flops(
    query: Any,
    key: Any,
    value: Any,
    dropout: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> int:
    return _forward_flops(query, key, value, None, is_causal)


@register_flop_formula(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)
def _cpu_backward_flops(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    logsumexp: Any,
    dropout: float,
    is_causal: bool,
    **_: Any,
) -> int:
    return _backward_flops(gradient, query, key, value, is_causal)


@register_flop_formula(torch.ops.planner.attention)
def _forward_flops(
    query: Any, key: Any, value: Any, bias: Any, causal: bool, **__: Any
) -> int:
    flops = int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
    if not causal:
        return flops
    return causal_flops(flops, queries=query[2], keys=key[2])


@register_flop_formula(torch.ops.planner.attention_backward)
def _backward_flops(
    gradient: Any, query: Any, key: Any, value: Any, *further: Any, **__: Any
) -> int:
    flops = int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]
    is_causal = further[-1]
    if not is_causal:
        return flops
    return causal_flops(flops, queries=query[2], keys=key[2])
