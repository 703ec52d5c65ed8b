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

A fourth runs one module again, and saves of the others what ``none`` saves:

    mlp        the feed-forward network of a dense block runs again whole (Megatron-Core's
               --recompute-modules mlp)

None of them is better than another for every layer: which one saves more bytes per
second depends on the length of sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from planner.spec.profile import RecomputeMode

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
EXECUTED: tuple[RecomputeMode, ...] = ("none", *SAVED, "full")
"""Modes of our own executor."""


def is_partial(mode: RecomputeMode) -> bool:
    """Return whether a layer in this mode runs a part of its forward again."""
    return mode not in ("none", "full")
