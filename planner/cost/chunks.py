"""Sequence chunks: what they cost besides, and what of a micro-batch's time and bytes belongs to each of them.

(Q1)  attention's part a of a sum x, by its share of the FLOPs: a of the forward's n; of the input gradient 2.5 a of
      (n - a) + 2.5 a (Dao, FlashAttention-2, section 3.1); of the forward that runs again, a of n. Both a and n are
      those of the layer's kernels: with context parallelism the rank that is priced does more than its share of the
      model's FLOPs                                                                           -> attention_part()
(Q2)  chunk c of Q lasts C(c + 1) - C(c), C(c) = c (x - a) / Q + a (c / Q)^2, because under causal attention it sees
      its own keys and all before it                                                          -> per_chunk()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.compute import ATTENTION, Computation, computation
from planner.spec.calibration import Constants
from planner.spec.cluster import DeviceSpec
from planner.spec.fp8 import Fp8Casts
from planner.spec.profile import BYTES_PER_ELEMENT, DataType, Measurement, Operation


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Of one layer and micro-batch."""

    forward_ticks: int = 0
    """What grows with the keys that a chunk sees."""
    backward_ticks: int = 0
    """Likewise; recomputation included."""
    bytes: int = 0
    """Read and written by the forward's attention: twice its keys and values, or more."""


NO_ATTENTION = AttentionPart()


def in_chunks(
    row: Measurement,
    device: DeviceSpec,
    dtype: DataType,
    constants: Constants,
    chunks: int,
    casts: Fp8Casts | None = None,
    *,
    graphs: bool = False,
    blocking: bool = False,
) -> Computation:
    """Return the seconds of a row, all chunks of its micro-batch: equation (Q3)."""

    def priced(one: Measurement) -> Computation:
        return computation(
            one, device, dtype, constants, casts, graphs=graphs, blocking=blocking
        )

    whole = priced(row)
    types = {dtype, "fp8"} if casts else {dtype}
    if (
        chunks == 1
        or not row.operations
        or not types <= device.peak_flops_per_second.keys()
    ):
        return whole
    told = row.model_copy(update={"forward_seconds": None})
    of_chunk = told.model_copy(
        update={
            "operations": tuple(
                _on_chunk(one, dtype, chunks) for one in row.operations
            ),
            "recompute_operations": tuple(
                _on_chunk(one, dtype, chunks) for one in row.recompute_operations
            ),
        }
    )
    before = priced(told)
    after = priced(of_chunk)
    return Computation(
        forward_seconds=_grown(
            whole.forward_seconds,
            before.forward_seconds,
            chunks * after.forward_seconds,
        ),
        backward_input_seconds=_grown(
            whole.backward_input_seconds,
            before.backward_input_seconds,
            chunks * after.backward_input_seconds,
        ),
        backward_weight_seconds=_grown(
            whole.backward_weight_seconds,
            before.backward_weight_seconds,
            chunks * after.backward_weight_seconds,
        ),
        recompute_seconds=_grown(
            whole.recompute_seconds,
            before.recompute_seconds,
            chunks * after.recompute_seconds,
        ),
        forward_attention_seconds=_grown(
            whole.forward_attention_seconds,
            before.forward_attention_seconds,
            chunks * after.forward_attention_seconds,
        ),
    )


def _grown(seconds: float, before: float, after: float) -> float:
    return seconds * (after / before) if before else seconds


def _on_chunk(one: Operation, dtype: DataType, chunks: int) -> Operation:
    """The operation on one chunk's tokens."""
    of_tokens: float = one.bytes
    if one.kind == "matmul" and one.m:
        of_tokens = min(
            one.bytes, BYTES_PER_ELEMENT[dtype] * one.batch * one.m * (one.k + one.n)
        )
    moved = one.bytes - of_tokens + of_tokens / chunks
    return one.model_copy(
        update={"flops": one.flops / chunks, "bytes": moved, "m": one.m / chunks}
    )


def attention_part(
    row: Measurement,
    plain: Measurement,
    forward_ticks: int,
    input_ticks: int,
    recompute_ticks: int,
) -> AttentionPart:
    """Equation (Q1).

    Args:
        row: of the layer in its recompute mode.
        plain: the one that recomputes least.
        input_ticks: of the input gradient.
    """
    attention = [
        operation for operation in plain.operations if operation.kind in ATTENTION
    ]
    flops = sum(each.count * each.flops for each in attention)
    of_kernels = sum(each.count * each.flops for each in plain.operations)
    whole = max(plain.forward_flops, of_kernels)
    moved = sum(each.count * each.bytes for each in attention)
    if not flops:
        return AttentionPart(bytes=moved)
    again = recompute_ticks * flops // whole if row.recompute == "full" else 0
    return AttentionPart(
        forward_ticks=forward_ticks * flops // whole,
        backward_ticks=input_ticks * 5 * flops // (2 * (whole - flops) + 5 * flops)
        + again,
        bytes=moved,
    )


def per_chunk(
    wholes: Sequence[int], attention: Sequence[int], chunks: int
) -> tuple[int, ...]:
    """Of every stage its chunks in order, which add up to the whole: equation (Q2).

    Args:
        wholes: ticks of every stage.
        attention: attention's part of them.
    """
    return tuple(
        _up_to(whole, part, chunk + 1, chunks) - _up_to(whole, part, chunk, chunks)
        for whole, part in zip(wholes, attention, strict=True)
        for chunk in range(chunks)
    )


def _up_to(whole: int, attention: int, chunk: int, chunks: int) -> int:
    """C of equation (Q2), each term rounded down."""
    return chunk * (whole - attention) // chunks + attention * chunk * chunk // (
        chunks * chunks
    )
