"""How frameworks run linear layers in fp8: what they cast, when, and what that moves.

A linear layer's three products take operands in fp8 (e4m3; gradients in e5m2) that were scaled by their absolute
maximum first (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). Finding it and casting are kernels of their
own, bound by the bytes they move; how many there are is the framework's doing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Operand = Literal["input", "weight", "gradient"]
"""Of a linear layer's products: its input, its weight, and the gradient of its output."""
MULTIPLE = 16
"""Sizes of operands that the products take (torch._scaled_mm; cuBLAS wants rows of 16 bytes)."""


@dataclass(frozen=True, slots=True)
class Cast:
    """One operand, cast to fp8 or laid out anew in fp8."""

    operand: Operand
    bytes_per_element: float
    """Read and written, by all of its kernels together."""
    kernels: int


@dataclass(frozen=True, slots=True)
class Fp8Casts:
    """What is cast for the three products of one micro-batch."""

    forward: tuple[Cast, ...]
    backward_input: tuple[Cast, ...]
    backward_weight: tuple[Cast, ...]
    reduces_maxima: bool = False
    """The scale of a tensor that is split over the tensor-parallel ranks is that of the whole one: one all-reduce of a
    number or two in each pass."""
    keeps_inputs: bool = False
    """The backward's input of a linear layer is kept in fp8."""


DYNAMIC = Fp8Casts(
    # One compiled kernel finds the maximum (2 bytes read), one scales and casts (2 read, 1 written). The backward knows
    # the scales of input and weight. Products take their first operand by rows and the second by columns: what lies
    # otherwise is copied (1 read, 1 written).
    forward=(Cast("input", 5, 2), Cast("weight", 5, 2)),
    backward_input=(Cast("gradient", 5, 2), Cast("weight", 5, 2)),
    backward_weight=(Cast("gradient", 2, 1), Cast("input", 5, 2)),
    reduces_maxima=True,
)
"""torchao.float8's dynamic tensorwise scaling, whose casts are compiled, as planner.executor runs it: tensor_to_amax,
_ToFloat8ConstrFunc, preprocess_addmm."""
SHARDED = Fp8Casts(
    # Weights are cast shard by shard before they are gathered, and their maxima found once per step.
    forward=(Cast("input", 5, 2),),
    backward_input=(Cast("gradient", 5, 2), Cast("weight", 2, 1)),
    backward_weight=(Cast("gradient", 2, 1), Cast("input", 5, 2)),
    reduces_maxima=True,
)
"""The same under FSDP2, as torchtitan runs it: docs/float8.md, --float8.enable_fsdp_float8_all_gather
--float8.precompute_float8_dynamic_scale_for_fsdp, compiled."""
DELAYED = Fp8Casts(
    # One kernel casts, transposes and finds the maximum for a later step (2 read, 1 and 1 written); weights are cast
    # once per step, for the first micro-batch.
    forward=(Cast("input", 4, 1),),
    backward_input=(Cast("gradient", 4, 1),),
    backward_weight=(),
    keeps_inputs=True,
)
"""TransformerEngine's delayed scaling: transformer_engine.pytorch.Linear, cast_transpose, is_first_microbatch, and the
transposed input that it saves."""
