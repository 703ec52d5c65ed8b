"""Causal attention of a transformer from fewer queries than keys, without a mask.

Queries of a piece of a sequence are the last ones of its keys (`planner.profiler.sequence`), so attention is causal from the
lower right corner: no mask is made where the kernel knows that. It is a module of its own since it imports
transformers, which takes seconds and which other models do without.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import (
    repeat_kv,
    sdpa_attention_forward,
    use_gqa_in_sdpa,
)
from transformers.masking_utils import causal_mask_function, sdpa_mask

LOWER_RIGHT = "planner-lower-right"
"""Our attention's name in transformers."""


def use_lower_right(model: Any) -> None:
    """Let a model of transformers, in place, attend causally from fewer queries than keys without a mask, where it
    lets others choose its attention and would take torch's scaled dot product."""
    if (
        not model._supports_attention_backend
        or model.config._attn_implementation != "sdpa"
    ):
        return
    AttentionInterface.register(LOWER_RIGHT, _attention)
    AttentionMaskInterface.register(LOWER_RIGHT, _mask)
    model.config._attn_implementation = LOWER_RIGHT


def _mask(
    *, q_length: int, kv_length: int, q_offset: int, mask_function: Any, **others: Any
) -> Tensor | None:
    """None where attention is causal and nothing else."""
    plain = (
        mask_function is causal_mask_function and others.get("attention_mask") is None
    )
    if (
        plain
        and others.get("allow_is_causal_skip", True)
        and kv_length == q_offset + q_length
    ):
        return None
    mask: Tensor | None = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        mask_function=mask_function,
        **others,
    )
    return mask


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Query (batch, heads, queries, width), key and value (batch, key heads, keys, width) -> (batch, queries, heads,
    width), as transformers' own."""
    wish = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if wish is None else wish
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and is_causal and queries < keys:
        corner = _corner(queries, keys)
        if options.get("position_bias") is None:
            return _flash(module, query, key, value, corner, **options), None
        attention_mask = corner._materialize(query.device)[None, None]
    attended: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, **options
    )
    return attended


@cache
def _corner(queries: int, keys: int) -> CausalBias:
    """Return torch's word for a causal mask from the lower right corner, without memory of its own.

    `causal_lower_right` passes its arguments on to `Tensor`, which takes them for a shape: (2, queries, keys) of fp32.
    """
    with _disable_current_modes():  # they would take it for a tensor
        corner = CausalBias.__new__(CausalBias)
        CausalBias.__init__(corner, CausalVariant.LOWER_RIGHT, queries, keys)
        return corner


def _flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    corner: CausalBias,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    grouped = groups > 1 and use_gqa_in_sdpa(None, key, value)
    if not grouped:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    attended = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=corner,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=grouped,
    )
    return attended.transpose(1, 2).contiguous()
