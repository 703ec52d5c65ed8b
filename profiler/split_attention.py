"""torch's `nn.MultiheadAttention` with its heads split over tensor-parallel ranks.

It holds queries, keys and values as one matrix, and multiplies in one function with the product behind: so it is split
as a whole, column-wise by heads in front and row-wise behind (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.profiler.local_tensor import local
from planner.profiler.split_products import Hold
from planner.profiler.split_tensor import (
    IndivisibleError,
    NoRuleError,
    Ranks,
    SplitTensor,
)


def can_split(module: nn.Module) -> bool:
    """Is it such a module, with queries, keys and values of one width and nothing added to the keys?"""
    return (
        type(module) is nn.MultiheadAttention
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
    )


def split_attention(module: nn.MultiheadAttention, ranks: Ranks, hold: Hold) -> None:
    """Let a module hold the weights of this rank's heads, and attend by them, in place."""
    if not ranks.divide(module.num_heads):
        raise IndivisibleError(
            f"{module.num_heads} heads are not divided by {ranks.ranks}"
        )
    module.in_proj_weight = hold(module._parameters["in_proj_weight"], 0, 3)  # type: ignore[arg-type]
    if module.in_proj_bias is not None:
        module.in_proj_bias = hold(module._parameters["in_proj_bias"], 0, 3)  # type: ignore[arg-type]
    module.out_proj.weight = hold(module.out_proj._parameters["weight"], 1, 1)  # type: ignore[arg-type]
    module.forward = partial(_attend, module, ranks)  # type: ignore[method-assign]


def _attend(
    module: nn.MultiheadAttention,
    ranks: Ranks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """As the module's own forward, where nobody wants the weights, which are of all heads."""
    if (
        need_weights
        or query.dim() != 3
        or any(isinstance(each, SplitTensor) for each in (query, key, value))
    ):
        raise NoRuleError(
            "attention that returns the weights of all heads, or of split or single samples"
        )
    states = [ranks.read(each) for each in (query, key, value)]
    queries, keys, values = (
        _by_heads(module, ranks, each) for each in _projected(module, states)
    )
    drop = module.dropout if module.training else 0.0
    mask = _mask(module, query, key_padding_mask, attn_mask, is_causal)
    with ranks.drawing(query.device) if drop > 0.0 else nullcontext():
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            dropout_p=drop,
            is_causal=is_causal and mask is None,
        )
    merged = mixed.transpose(1, 2).flatten(2)
    summed = ranks.leave(functional.linear(merged, local(module.out_proj.weight)))
    if module.out_proj.bias is not None:
        summed = summed + ranks.add(local(module.out_proj.bias))
    return (summed if module.batch_first else summed.transpose(0, 1)), None


def _projected(module: nn.MultiheadAttention, states: list[Tensor]) -> list[Tensor]:
    """This rank's columns of queries, keys and values; by one product where they are of the same."""
    weight = local(module.in_proj_weight)
    bias = None if module.in_proj_bias is None else local(module.in_proj_bias)
    if states[0] is states[1] is states[2]:
        return list(functional.linear(states[0], weight, bias).chunk(3, -1))
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [
        functional.linear(*each)
        for each in zip(states, weight.chunk(3), biases, strict=True)
    ]


def _by_heads(module: nn.MultiheadAttention, ranks: Ranks, states: Tensor) -> Tensor:
    """(samples, tokens, width) or (tokens, samples, width) -> (samples, heads of this rank, tokens, width of one)."""
    if not module.batch_first:
        states = states.transpose(0, 1)
    shape = (*states.shape[:2], module.num_heads // ranks.ranks, module.head_dim)
    return states.reshape(shape).transpose(1, 2)


def _mask(
    module: nn.MultiheadAttention,
    query: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor | None:
    """What is added to the scores of all heads, (samples or 1, 1, queries or 1, keys); None: nothing but, as
    `is_causal` says, a causal mask."""
    if is_causal and padding is None:
        return None
    if mask is not None and mask.dim() != 2:
        raise NoRuleError("a mask of every head")
    parts = [] if mask is None else [_added(mask, query)[None, None]]
    parts += [] if padding is None else [_added(padding, query)[:, None, None]]
    return sum(parts[1:], parts[0]) if parts else None


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """A mask that is true where nothing may be read, as numbers that are added."""
    if mask.dtype != torch.bool:
        return mask.to(query.dtype)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, float("-inf"))
