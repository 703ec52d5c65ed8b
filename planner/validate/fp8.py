"""Which products an fp8 job runs in fp8, and what tensor-parallel ranks exchange for it: equations (C6) and (C9).

Written down again from the equations: linear layers whose weight on a rank has sizes that are multiples of sixteen, in
every layer of the model but the last.
"""

from __future__ import annotations

from planner.spec.fp8 import Fp8Casts
from planner.spec.profile import (
    BYTES_PER_ELEMENT,
    Collective,
    DataType,
    Measurement,
    Operation,
)


def low_precision_row(
    row: Measurement, dtype: DataType, casts: Fp8Casts, *, is_output: bool
) -> Measurement:
    """A layer's row in which every operation says whether it runs in fp8, with the exchanged maxima.

    Args:
        row: as profiled.
        dtype: of the profile.
        casts: of our own executor.
        is_output: the row is one of the model's last layer.
    """
    told = {
        name: tuple(
            one.model_copy(
                update={"is_linear": not is_output and _takes_fp8(one, dtype)}
            )
            for one in getattr(row, name)
        )
        for name in ("operations", "recompute_operations")
    }
    linear = sum(one.count for one in told["operations"] if one.is_linear)
    exchanged = row.collectives
    if linear and row.tensor_parallel_degree > 1 and casts.reduces_maxima:
        exchanged += tuple(
            Collective(
                group="tensor",
                phase=phase,
                operation="all_reduce",
                bytes=8,
                count=linear,
            )
            for phase in ("forward", "backward")
        )
    return row.model_copy(update={**told, "collectives": exchanged})


def _takes_fp8(one: Operation, dtype: DataType) -> bool:
    if (one.n | one.k) & 15:
        return False
    if one.is_linear is not None:
        return one.is_linear
    matrices = (one.m + one.n) * one.k + one.m * one.n
    moved = one.bytes // BYTES_PER_ELEMENT[dtype]
    return (
        one.kind == "matmul"
        and one.batch == 1
        and one.m > 0
        and moved - matrices in (0, one.n)
    )
