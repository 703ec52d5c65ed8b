"""Recompute modes of a layer: which results of its forward are saved.

``none`` saves what autograd saves, ``full`` the layer's input alone (Chen et al. 2016).
Three modes between them save the input and the results of some operations, and run all
other operations again:

    selective  saves products, attention and collectives; norms, activation functions
               and other elementwise operations run again (torch's selective activation
               checkpointing; runtimes may have modules of their own instead, see
               `planner.runtimes.Runtime.selective`)
    attention  saves linear layers and collectives: attention, its scores, softmax and
               dropout run again too (Korthikanti et al. 2022, section 5; JAX's
               dots_with_no_batch_dims_saveable)
    linear     saves attention and collectives: linear layers run again, attention does
               not (Gu et al. 2024, "LoongTrain", selective checkpoint++; Li et al.
               2023, "DistFlashAttn")

Three more run modules again whole, and save of the others what ``none`` saves
(Megatron-Core's --recompute-modules, release 0.12 and later):

    norms      models with experts: norms that are modules of their own, and activation
               functions of routed experts, whose outputs are discarded once they are
               used (modules layernorm and moe_act)
    latent     as norms; latent attention also expands its compressed queries, keys and
               values again (module mla_up_proj; DeepSeek-AI 2024, DeepSeek-V3, section
               3.2.3)
    mlp        the feed-forward part of a block: module mlp of dense blocks, and moe of
               blocks with experts, whose tokens go to their experts and back once more

None of them is better than another for every layer: which one saves more bytes per
second depends on the length of sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from planner.spec.profile import RecomputeMode
from planner.spec.transformer import Transformer

Origin = Literal["linear", "attention", "collective"]
"""Operations whose results a mode may save.

linear: products with a weight, and convolutions; attention: fused attention, and
products of two activations.
"""

MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
"""From least to most recomputation."""

SAVED: Mapping[RecomputeMode, frozenset[Origin]] = MappingProxyType(
    {
        "selective": frozenset({"linear", "attention", "collective"}),
        "attention": frozenset({"linear", "collective"}),
        "linear": frozenset({"attention", "collective"}),
    }
)
"""Results that some modes between ``none`` and ``full`` save."""
MODULES: Mapping[RecomputeMode, tuple[str, ...]] = MappingProxyType(
    {
        "norms": ("layernorm", "moe_act"),
        "latent": ("layernorm", "moe_act", "mla_up_proj"),
        "mlp": ("mlp", "moe"),
    }
)
"""Modules that some modes run again, by Megatron-Core's names."""
EXECUTED: tuple[RecomputeMode, ...] = ("none", *SAVED, "full")
"""Modes of our own executor."""


def has_modules(mode: RecomputeMode, model: Transformer) -> bool:
    """Return whether a decoder has the modules that a mode of `MODULES` names.

    Megatron-Core refuses moe_act without experts, and mla_up_proj without latent
    attention (megatron/core/transformer/transformer_config.py).
    """
    modules = MODULES.get(mode, ())
    has_experts = model.experts is not None
    has_latent_attention = model.latent_attention is not None
    return (has_experts or "moe_act" not in modules) and (
        has_latent_attention or "mla_up_proj" not in modules
    )


def is_partial(mode: RecomputeMode) -> bool:
    """Return whether a layer in this mode runs a part of its forward again."""
    return mode not in ("none", "full")
