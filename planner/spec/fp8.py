"""How frameworks run linear layers in fp8: casts, their number and their bytes.

The three products of a linear layer take operands in fp8 (e4m3; gradients in e5m2) that
are first scaled by their absolute maximum (Micikevicius et al. 2022, "FP8 Formats for
Deep Learning"). Finding the maximum and casting are kernels bound by the bytes they
move; their number depends on the framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Operand = Literal["input", "weight", "gradient"]
"""Operand of a linear layer's products: its input, its weight, or the gradient of its
output."""
MULTIPLE = 16
"""Operand sizes are multiples of this (torch._scaled_mm; cuBLAS needs 16-byte rows)."""


@dataclass(frozen=True, slots=True)
class Cast:
    """One operand that is cast to fp8, or copied to another layout in fp8."""

    operand: Operand
    bytes_per_element: float
    """Bytes read and written by all kernels of the cast."""
    kernels: int


@dataclass(frozen=True, slots=True)
class Fp8Casts:
    """Casts for the three products of one micro-batch."""

    forward: tuple[Cast, ...]
    backward_input: tuple[Cast, ...]
    backward_weight: tuple[Cast, ...]
    reduces_maxima: bool = False
    """A tensor split over tensor-parallel ranks has one scale: an all-reduce of one or
    two numbers per pass."""
    keeps_inputs: bool = False
    """The input of a linear layer is saved for the backward in fp8."""


DYNAMIC = Fp8Casts(
    # One compiled kernel finds the maximum (2 bytes read), one scales and casts (2
    # read, 1 written). The backward reuses the scales of input and weight. Products
    # read their first operand by rows and the second by columns; an operand in the
    # other order is copied (1 read, 1 written).
    forward=(Cast("input", 5, 2), Cast("weight", 5, 2)),
    backward_input=(Cast("gradient", 5, 2), Cast("weight", 5, 2)),
    backward_weight=(Cast("gradient", 2, 1), Cast("input", 5, 2)),
    reduces_maxima=True,
)
"""Dynamic tensorwise scaling of torchao.float8 with compiled casts, as in
planner.executor: tensor_to_amax, _ToFloat8ConstrFunc, preprocess_addmm."""
SHARDED = Fp8Casts(
    # Weights are cast in shards before they are gathered; their maxima are computed
    # once per step.
    forward=(Cast("input", 5, 2),),
    backward_input=(Cast("gradient", 5, 2), Cast("weight", 2, 1)),
    backward_weight=(Cast("gradient", 2, 1), Cast("input", 5, 2)),
    reduces_maxima=True,
)
"""Dynamic scaling under FSDP2, compiled, as in torchtitan: docs/float8.md,
--float8.enable_fsdp_float8_all_gather,
--float8.precompute_float8_dynamic_scale_for_fsdp."""
DELAYED = Fp8Casts(
    # One kernel casts, transposes and finds the maximum for a later step (2 read, 1 and
    # 1 written). Weights are cast once per step, for the first micro-batch.
    forward=(Cast("input", 4, 1),),
    backward_input=(Cast("gradient", 4, 1),),
    backward_weight=(),
    keeps_inputs=True,
)
"""Delayed scaling of TransformerEngine: transformer_engine.pytorch.Linear,
cast_transpose, is_first_microbatch, and the transposed input that it saves."""
