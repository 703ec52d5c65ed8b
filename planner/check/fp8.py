"""What of a layer an fp8 job runs in fp8.

(C6)  linear layers whose weight has sizes that 16 divides, but not in the last layer
      of the model
(C9)  tensor-parallel ranks all-reduce the maxima of each of them, once in the forward
      and once in the backward
"""

from __future__ import annotations

from planner.spec.fp8 import MULTIPLE, Fp8Casts
from planner.spec.profile import (
    BYTES_PER_ELEMENT,
    Collective,
    DataType,
    Measurement,
    Operation,
)

MAXIMA_BYTES = 8


def in_fp8(
    row: Measurement, dtype: DataType, casts: Fp8Casts, *, is_last: bool
) -> Measurement:
    """Return a row whose operations state whether they run in fp8, with the maxima."""

    def stated(one: Operation) -> Operation:
        runs = not is_last and _runs_in_fp8(one, dtype)
        return one.model_copy(update={"is_linear": runs})

    operations = tuple(stated(one) for one in row.operations)
    again = tuple(stated(one) for one in row.recompute_operations)
    linear = sum(one.count for one in operations if one.is_linear)
    maxima: tuple[Collective, ...] = ()
    if linear and casts.reduces_maxima and row.tensor_parallel_degree > 1:
        forward = Collective(
            phase="forward", operation="all_reduce", bytes=MAXIMA_BYTES, count=linear
        )
        maxima = (forward, forward.model_copy(update={"phase": "backward"}))
    return row.model_copy(
        update={
            "operations": operations,
            "recompute_operations": again,
            "collectives": row.collectives + maxima,
        }
    )


def _runs_in_fp8(one: Operation, dtype: DataType) -> bool:
    """Return whether a product is a linear layer, as stated or by its bytes."""
    if one.n % MULTIPLE or one.k % MULTIPLE:
        return False
    if one.is_linear is not None:
        return one.is_linear
    if one.kind != "matmul" or one.batch > 1 or not one.m:
        return False
    matrices = one.m * one.k + one.n * one.k + one.m * one.n
    return one.bytes // BYTES_PER_ELEMENT[dtype] in (matrices, matrices + one.n)
