"""Linear layers' products in fp8, and the casts that they need.

    (C6)  which      products of linear layers whose weight on a rank has sizes that divide by 16, but for those of the
                     model's last layer: its output layer stays in bf16, as embeddings and attention do    -> mark_fp8()
    (C7)  product    flops / (fp8 peak * e * fp8 fraction), with e of (K1), or the bytes that it moves: operands of one
                     byte, a result of two                                                       -> product_seconds()
    (C8)  casts      by the framework's traits: elements of an operand * bytes per element / (bandwidth * memory
                     fraction) + its kernels' launches                                              -> cast_seconds()
    (C9)  maxima     of a tensor that tensor-parallel ranks share: one all-reduce per product in the forward and one in
                     the backward, of no more than its latency                                          -> in_fp8()

Sources: the rule and the casts, torchao.float8 and TransformerEngine (planner.spec.fp8); the roofline as in
`planner.cost.compute`.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.errors import MismatchError
from planner.spec.cluster import DeviceSpec
from planner.spec.fp8 import MULTIPLE, Cast, Fp8Casts, Operand
from planner.spec.profile import (
    BYTES_PER_ELEMENT,
    Collective,
    DataType,
    Measurement,
    Operation,
)

MAXIMA_BYTES = 8
"""Of the all-reduce of (C9): the maxima of input and weight, in fp32."""


def in_fp8(row: Measurement, dtype: DataType, casts: Fp8Casts) -> Measurement:
    """Return the row with `is_linear` set on every operation: equations (C6) and (C9)."""
    operations = tuple(_marked(one, dtype) for one in row.operations)
    products = sum(one.count for one in operations if one.is_linear)
    maxima: tuple[Collective, ...] = ()
    if casts.reduces_maxima and products and row.tensor_parallel_degree > 1:
        maxima = (
            Collective(
                phase="forward",
                operation="all_reduce",
                bytes=MAXIMA_BYTES,
                count=products,
            ),
            Collective(
                phase="backward",
                operation="all_reduce",
                bytes=MAXIMA_BYTES,
                count=products,
            ),
        )
    return row.model_copy(
        update={
            "operations": operations,
            "recompute_operations": tuple(
                _marked(one, dtype) for one in row.recompute_operations
            ),
            "collectives": row.collectives + maxima,
        }
    )


def mark_fp8(
    row: Measurement, dtype: DataType, casts: Fp8Casts, *, is_last: bool
) -> Measurement:
    """Return the row with `is_linear` set on every operation.

    It is false in the model's last layer.
    """
    if not is_last:
        return in_fp8(row, dtype, casts)
    return row.model_copy(
        update={
            name: tuple(
                one.model_copy(update={"is_linear": False})
                for one in getattr(row, name)
            )
            for name in ("operations", "recompute_operations")
        }
    )


def _marked(one: Operation, dtype: DataType) -> Operation:
    fits = one.n % MULTIPLE == 0 and one.k % MULTIPLE == 0
    return one.model_copy(update={"is_linear": fits and _is_linear(one, dtype)})


def _is_linear(one: Operation, dtype: DataType) -> bool:
    """Return the operation's mark; without one, whether it moves three matrices.

    It may move a bias too. Grouped products of experts move more.
    """
    if one.is_linear is not None:
        return one.is_linear
    if one.kind != "matmul" or not one.m or one.batch > 1:
        return False
    elements = one.m * one.n + one.n * one.k + one.m * one.k
    return one.bytes // BYTES_PER_ELEMENT[dtype] in (elements, elements + one.n)


def product_seconds(
    one: Operation,
    result: Operand,
    reached_flops_per_second: float,
    reached_bytes_per_second: float,
) -> float:
    """Seconds of a product in fp8, its launch apart: equation (C7).

    Args:
        one: a linear layer's forward.
        result: which of the layer's tensors the product has the shape of: ``gradient``, the output's; ``input``, that
            of the input's gradient; ``weight``, that of the weight's.
        reached_flops_per_second: by products in fp8.
        reached_bytes_per_second: of the memory.
    """
    moved = sum(
        _elements(one, operand) * (2 if operand == result else 1)
        for operand in _OPERANDS
    )
    return max(one.flops / reached_flops_per_second, moved / reached_bytes_per_second)


_OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")


def _elements(one: Operation, operand: Operand) -> int:
    """Of a linear layer's tensor; the output's gradient has the output's shape."""
    return {"input": one.m * one.k, "weight": one.n * one.k, "gradient": one.m * one.n}[
        operand
    ]


def cast_seconds(
    one: Operation,
    casts: Iterable[Cast],
    reached_bytes_per_second: float,
    launch_seconds: float,
) -> float:
    """Seconds of casting a product's operands: equation (C8)."""
    return sum(
        _elements(one, cast.operand) * cast.bytes_per_element / reached_bytes_per_second
        + cast.kernels * launch_seconds
        for cast in casts
    )


def check_fp8(device: DeviceSpec, *, field: str) -> None:
    """Raise `MismatchError` unless the device's data sheet has a peak in fp8."""
    if "fp8" not in device.peak_flops_per_second:
        known = ", ".join(device.peak_flops_per_second) or "none"
        raise MismatchError(
            f"device {device.id!r} has no peak for fp8 (known: {known}), which precision 'fp8' computes in.",
            field=field,
            hint="use bf16-mixed, a device with fp8 products (planner devices), or give its fp8 peak inline.",
        )
