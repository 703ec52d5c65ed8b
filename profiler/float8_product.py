"""A matrix product in fp8, forward and backward, by torchao's casts and products.

    forward    output            = input x weight               e4m3 x e4m3
    backward   input's gradient  = output's gradient x weight   e5m2 x e4m3
               weight's gradient = input x output's gradient    e4m3 x e5m2

What is multiplied is cast on its way into the product, by one scale per tensor: the largest number of the type / the
largest absolute value in the tensor (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3). Input and
weight are kept as they came for the backward, with their two scales; the output's gradient is cast once for its two
products. Results are in the input's type.

The numbers are those of torchao's `Float8Linear`, dynamic and tensorwise. It is not used itself, for it gives both
gradients at once, where a schedule may split the backward; and where ranks hold parts of a tensor, the scale must be
that of the whole one: they exchange their largest values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from planner.profiler.low_bit import torchao
from planner.spec.fp8 import MULTIPLE, Operand

CAPABILITY = (8, 9)
"""Of the first CUDA devices that multiply fp8: Ada, then Hopper."""

Largest = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Parts:
    """Which tensors of a product this rank has parts of only."""

    operands: frozenset[Operand] = frozenset()
    largest: Largest | None = None
    """Numbers of this rank -> for each the largest one of all ranks; None: nothing is split."""


WHOLE = Parts()


def float8_product(input: Tensor, weight: Tensor, parts: Parts = WHOLE) -> Tensor:
    """(..., k) x (k, n) -> (..., n), in fp8 forward and backward.

    Args:
        parts: of split tensors.
    """
    # Views, so that neither is a leaf of the graph: autograd does not tell of leaves whether it wants their gradients.
    made: Tensor = _Float8Product.apply(
        input.view_as(input), weight.view_as(weight), parts
    )  # type: ignore[no-untyped-call]
    return made


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, input: Tensor, weight: Tensor, parts: Parts) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        scales = _scales({"input": rows, "weight": weight}, parts)
        cast = partial(_cast, scales, _settings(rows.device))
        of_input, of_weight = context.needs_input_grad[:2]
        # A frozen weight has no gradient that the input would be kept for; nor does what nothing trained leads to.
        context.save_for_backward(
            input if of_weight else None, weight if of_input else None
        )
        context.scales, context.parts = scales, parts
        made = torch.mm(cast(rows, "input"), cast(weight, "weight"))
        return made.reshape(*input.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(
        context: Any, *gradients: Any
    ) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight = context.saved_tensors
        incoming = gradients[0].reshape(-1, gradients[0].shape[-1])
        scales = context.scales | _scales({"gradient": incoming}, context.parts)
        cast = partial(
            _cast,
            scales,
            _settings(incoming.device, pads=incoming.shape[0] % MULTIPLE > 0),
        )
        gradient = cast(incoming, "gradient")
        of_input = of_weight = None
        if _is_wanted(context, 0):
            made = torch.mm(gradient, cast(weight, "weight").t())
            of_input = made.reshape(*gradients[0].shape[:-1], made.shape[-1])
        if _is_wanted(context, 1):
            rows = input.reshape(-1, input.shape[-1])
            of_weight = torch.mm(gradient.t(), cast(rows, "input")).t()
        return of_input, of_weight, None


def _is_wanted(context: Any, place: int) -> bool:
    """Does the backward at hand lead to this argument?

    In one that is split (`planner.executor.pipeline.split_backward`) I leads to the input alone, W to the weight.
    """
    if not context.needs_input_grad[place]:
        return False
    return bool(torch._C._will_engine_execute_node(context.next_functions[place][0]))


def _scales(tensors: dict[Operand, Tensor], parts: Parts) -> dict[Operand, Tensor]:
    """By what tensors are multiplied before they are cast, numbers in fp32; one exchange for all that are split."""
    found: dict[Operand, Tensor] = {
        operand: _largest_of(tensor) for operand, tensor in tensors.items()
    }
    split = [operand for operand in tensors if operand in parts.operands]
    if split and parts.largest is not None:
        whole = parts.largest(torch.stack([found[operand] for operand in split]))
        found.update(zip(split, whole.unbind(), strict=True))
    to_scale = torchao("float8.float8_utils").amax_to_scale
    return {
        operand: to_scale(value, _types()[operand]) for operand, value in found.items()
    }


@cache
def _types() -> dict[Operand, torch.dtype]:
    config = torchao("float8.config")
    return {
        "input": config.e4m3_dtype,
        "weight": config.e4m3_dtype,
        "gradient": config.e5m2_dtype,
    }


def _largest_of(matrix: Tensor) -> Tensor:
    """An expert may get no tokens."""
    if matrix.numel() == 0:
        return matrix.new_zeros(())
    lines = matrix.t() if _is_turned(matrix) else matrix.contiguous()
    return _kernels(matrix.device).largest(lines.view(-1))


def _cast(
    scales: dict[Operand, Tensor], settings: Any, matrix: Tensor, operand: Operand
) -> Tensor:
    """A matrix in fp8 with its scale, laid out as it was, as torchao's products take it."""
    turned, dtype = _is_turned(matrix), _types()[operand]
    lines = matrix.t() if turned else matrix.contiguous()
    bits = (
        _kernels(matrix.device)
        .cast(lines.view(-1), scales[operand], dtype)
        .view(lines.shape)
    )
    tensors = torchao("float8.float8_training_tensor")
    place = tensors.GemmInputRole[
        "GRAD_OUTPUT" if operand == "gradient" else operand.upper()
    ]
    made: Tensor = tensors.Float8TrainingTensor(
        bits.t() if turned else bits, scales[operand], matrix.dtype, settings, place
    )
    return made


def _is_turned(matrix: Tensor) -> bool:
    """Does it lie in memory by columns?"""
    return not matrix.is_contiguous() and matrix.t().is_contiguous()


@dataclass(frozen=True, slots=True)
class Kernels:
    """What runs over whole tensors before they are multiplied."""

    largest: Callable[[Tensor], Tensor]
    """Numbers -> the largest absolute value, in their type."""
    cast: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    """Numbers, what each is multiplied by, type in fp8 -> the same many in fp8."""


def _largest_value(numbers: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(numbers, torch.inf)
    return found


def _scaled(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As torchao's cast, bit by bit, which also clamps; but no finite number times its scale rounds beyond the type."""
    return (numbers * scale.view(1)).to(
        dtype
    )  # in fp32: a scale without a dimension would leave bf16 as it is


PLAIN = Kernels(_largest_value, _scaled)


@cache
def compiled(backend: str = "inductor") -> Kernels:
    """One kernel each, which read the numbers once: what fp8 gains would go otherwise."""
    return Kernels(
        *(
            torch.compile(each, dynamic=True, backend=backend)
            for each in (_largest_value, _scaled)
        )
    )


@cache
def _kernels(device: torch.device) -> Kernels:
    """Compiled on devices that gain by fp8, where a compiler is at hand."""
    if not multiplies_float8(device):
        return PLAIN
    some, one = (
        torch.ones(MULTIPLE, device=device, dtype=torch.bfloat16),
        torch.ones((), device=device),
    )
    try:
        compiled().largest(some), compiled().cast(some, one, _types()["input"])
    except RuntimeError:  # of inductor and triton, such as that there is no C compiler
        return PLAIN
    return compiled()


@cache
def _settings(device: torch.device, *, pads: bool = False) -> Any:
    """torchao's settings of the three products. As under torchao and TransformerEngine, the forward alone adds up fast,
    with fewer bits.

    Args:
        pads: the weight's gradient, which is a sum over tokens, whose number `MULTIPLE` may not divide.
    """
    tensors, emulates = (
        torchao("float8.float8_training_tensor"),
        not multiplies_float8(device),
    )
    return tensors.LinearMMConfig(
        output=tensors.ScaledMMConfig(emulates, use_fast_accum=True),
        grad_input=tensors.ScaledMMConfig(emulates),
        grad_weight=tensors.ScaledMMConfig(emulates, pad_inner_dim=pads),
    )


def multiplies_float8(device: torch.device) -> bool:
    """Has the device products in fp8? On others the same numbers are multiplied in fp32: as exact, and no faster."""
    return (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY
    )


def remark(precision: str | None, device: torch.device) -> str:
    """What is to be said of a run or measurement in this precision on this device: why it gains no time; else empty."""
    if precision != "fp8":
        return ""
    if not multiplies_float8(device):
        return f"{device.type} multiplies nothing in fp8: the same numbers were multiplied in fp32, at no gain."
    if _kernels(device) is PLAIN:
        return "no compiler was found for the casts to fp8, which took more time than need be: install gcc."
    return ""
