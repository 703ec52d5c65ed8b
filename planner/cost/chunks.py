"""Sequence chunks: what of a micro-batch's time and bytes belongs to each of them.

(Q1)  attention's part a of a sum x, by its share of the FLOPs: a of the forward's n; of the input gradient 2.5 a of
      (n - a) + 2.5 a (Dao, FlashAttention-2, section 3.1); of the forward that runs again, a of n
                                                                                              -> attention_part()
(Q2)  chunk c of Q lasts C(c + 1) - C(c), C(c) = c (x - a) / Q + a (c / Q)^2, because under causal attention it sees
      its own keys and all before it                                                          -> per_chunk()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.spec.profile import Measurement


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


def attention_part(
    row: Measurement, plain: Measurement, forward_ticks: int, input_ticks: int, recompute_ticks: int
) -> AttentionPart:
    """Equation (Q1).

    Args:
        row: of the layer in its recompute mode.
        plain: the one that recomputes least.
        input_ticks: of the input gradient.
    """
    attention = [operation for operation in plain.operations if operation.kind == "attention"]
    flops, whole = sum(each.count * each.flops for each in attention), plain.forward_flops
    if not flops:
        return NO_ATTENTION
    again = recompute_ticks * flops // whole if row.recompute == "full" else 0
    return AttentionPart(
        forward_ticks=forward_ticks * flops // whole,
        backward_ticks=input_ticks * 5 * flops // (2 * (whole - flops) + 5 * flops) + again,
        bytes=sum(each.count * each.bytes for each in attention),
    )


def per_chunk(wholes: Sequence[int], attention: Sequence[int], chunks: int) -> tuple[int, ...]:
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
    return chunk * (whole - attention) // chunks + attention * chunk * chunk // (chunks * chunks)
