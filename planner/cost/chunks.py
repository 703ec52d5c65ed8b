"""Sequence chunks: what they cost besides, and what of a micro-batch's time and bytes belongs to each of them.

(Q1)  attention's part a of a sum x, by its share of the FLOPs: a of the forward's n; of the input gradient 2.5 a of
      (n - a) + 2.5 a (Dao, FlashAttention-2, section 3.1); of the forward that runs again, a of n. Both a and n are
      those of the layer's kernels: with context parallelism the rank that is priced does more than its share of the
      model's FLOPs                                                                           -> attention_part()
(Q2)  chunk c of Q lasts C(c + 1) - C(c), C(c) = c (x - a) / Q + a (c / Q)^2, because under causal attention it sees
      its own keys and all before it                                                          -> per_chunk()
(Q3)  every kernel runs Q times, on 1/Q of the tokens: a product reads all of its weights, and reaches the fraction of
      the peak (K1) of its m / Q rows; attention reads (Q + 1) / (2 Q) of the keys on average. Attention without a
      fused kernel computes as much of the masked scores as the keys that a chunk sees, where whole sequences compute
      all of them                                                                             -> in_chunks()
(Q5)  besides, a chunk copies its keys and values to where later ones read them: twice their bytes in the forward. In
      the backward it adds gradients: those of all keys that it saw, and, but for the first, those of the weights.
      Adding reads two tensors and writes one, in kernels of their own; where gradients are wider than activations
      the product adds them itself (fused accumulation of Megatron-LM), and moves 2 g - a bytes more per weight, g of
      a gradient and a of an activation. Device curves have the weights' part in their products already
                                                                                              -> in_chunks()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import attrgetter
from typing import Literal

from planner.cost.compute import ATTENTION, PRODUCTS, Computation, computations
from planner.cost.curves import has_curves
from planner.spec.calibration import Constants
from planner.spec.cluster import DeviceSpec
from planner.spec.fp8 import Fp8Casts
from planner.spec.profile import BYTES_PER_ELEMENT, DataType, Measurement, Operation

ADDING = 3
"""Accesses of adding a tensor to another one: two reads and one write."""
COPYING = 2
"""Accesses of a copy."""


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Of one layer and micro-batch."""

    forward_ticks: int = 0
    """What grows with the keys that a chunk sees."""
    backward_ticks: int = 0
    """The same of the backward, recomputation included."""
    bytes: int = 0
    """Read and written by the forward's attention: twice its keys and values, or more."""


NO_ATTENTION = AttentionPart()


def in_chunks(
    rows: Sequence[Measurement],
    device: DeviceSpec,
    dtype: DataType,
    constants: Constants,
    chunks: int,
    casts: Fp8Casts | None = None,
    *,
    gradient_bytes: int = 0,
    graphs: bool = False,
    blocking: bool = False,
) -> list[Computation]:
    """Return the seconds of a whole micro-batch in chunks, per row: (Q3) and (Q5).

    Measured seconds grow as the prices of their operations do. Pricing rows together is
    faster than one by one.

    Args:
        rows: of whole micro-batches.
        device: what runs them.
        dtype: of activations.
        constants: fitted constants.
        chunks: of every sequence.
        casts: of the runtime, for precision fp8.
        gradient_bytes: of an accumulated gradient; 0: gradients of weights are not added up.
        graphs: kernels are launched from CUDA graphs.
        blocking: the host waits for every kernel.
    """

    def priced(some: Sequence[Measurement]) -> list[Computation]:
        return computations(
            some, device, dtype, constants, casts, graphs=graphs, blocking=blocking
        )

    wholes = priced(rows)
    types = {dtype, "fp8"} if casts else {dtype}
    is_known = types <= device.peak_flops_per_second.keys()
    if chunks == 1 or not is_known:
        return wholes
    # Products in curves have the additions of their gradients.
    has_additions = casts is None and has_curves(device.curves, dtype)
    cut = Cut(dtype, chunks, 0 if has_additions else gradient_bytes)
    kernels = [cut.kernels(row) for row in rows]
    every = iter(priced([one for each in kernels for one in each.values()]))
    found = []
    for row, whole, each in zip(rows, wholes, kernels, strict=True):
        seconds = {name: next(every) for name in each}
        found.append(cut.grown(row, whole, seconds) if seconds else whole)
    return found


def _grown(seconds: float, before: float, after: float) -> float:
    return seconds * (after / before) if before else seconds


Kernels = Literal[
    "whole", "chunk", "accumulating", "copies", "key additions", "weight additions"
]
"""Groups of kernels that are priced for a row in chunks."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Operations of one chunk on average, from those of the whole sequence: equations (Q3) and (Q5)."""

    dtype: DataType
    chunks: int
    gradient_bytes: int
    """Of an accumulated gradient; 0: gradients of weights are not added up."""
    known: dict[tuple[str, int], Operation] = field(default_factory=dict)
    """Operations made by `_each`, by name and the identity of the original."""

    @property
    def size(self) -> int:
        """Bytes of an activation element."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def is_fused(self) -> bool:
        """Whether the product for a weight's gradient adds it to the ones before."""
        return self.gradient_bytes > self.size

    @property
    def seen(self) -> float:
        """Keys that a chunk sees on average / all keys."""
        return (self.chunks + 1) / (2 * self.chunks)

    def kernels(self, row: Measurement) -> dict[Kernels, Measurement]:
        """Return the groups of kernels of a row; empty if it has no operations."""
        if not row.operations:
            return {}
        # The bytes of the whole backward are not those of a chunk's: neither side has them.
        whole = row.model_copy(update={"forward_seconds": None, "backward_bytes": 0})
        chunk = self.row(whole)
        found: dict[Kernels, Measurement] = {"whole": whole, "chunk": chunk}
        moving: dict[Kernels, tuple[Operation, ...]] = {
            "copies": self.copies(row),
            "key additions": self.key_additions(row),
        }
        if self.is_fused:
            found["accumulating"] = self.with_accumulation(chunk)
        elif self.gradient_bytes:
            moving["weight additions"] = self.weight_additions(row)
        for name, operations in moving.items():
            if operations:
                alone = {"operations": operations, "recompute_operations": ()}
                found[name] = whole.model_copy(update=alone)
        return found

    def grown(
        self,
        row: Measurement,
        whole: Computation,
        seconds: Mapping[Kernels, Computation],
    ) -> Computation:
        """Return the seconds of all chunks.

        Args:
            row: of the whole micro-batch.
            whole: its seconds, measured or priced.
            seconds: of everything in `kernels`.
        """

        def moving(name: Kernels) -> float:
            return seconds[name].forward_seconds if name in seconds else 0.0

        chunks = self.chunks
        before, chunk = seconds["whole"], seconds["chunk"]
        copied = moving("copies")
        added = moving("weight additions")
        if "accumulating" in seconds:
            added = seconds["accumulating"].backward_weight_seconds
            added -= chunk.backward_weight_seconds
        replayed = copied if row.recompute == "full" else 0.0
        after = Computation(
            forward_seconds=chunks * (chunk.forward_seconds + copied),
            backward_input_seconds=chunks
            * (chunk.backward_input_seconds + moving("key additions")),
            backward_weight_seconds=chunks * chunk.backward_weight_seconds
            + (chunks - 1) * added,
            recompute_seconds=chunks * (chunk.recompute_seconds + replayed),
            forward_attention_seconds=chunks * chunk.forward_attention_seconds,
        )
        parts = zip(*map(_seconds_of, (whole, before, after)), strict=True)
        return Computation(*(_grown(*each) for each in parts))

    def row(self, whole: Measurement) -> Measurement:
        """Return the row of a chunk."""
        scores = has_scores(whole)
        name = "over scores" if scores else "operation"

        def of_chunk(one: Operation) -> Operation:
            return self.operation(one, scores=scores)

        parts = {
            "operations": self._each(name, whole.operations, of_chunk),
            "recompute_operations": self._each(
                name, whole.recompute_operations, of_chunk
            ),
        }
        return whole.model_copy(update=parts)

    def _each(
        self,
        name: str,
        operations: Iterable[Operation],
        make: Callable[[Operation], Operation],
    ) -> tuple[Operation, ...]:
        """Return a new operation for each one; rows that share one share the new one.

        Args:
            name: of this kind of new operations.
            operations: must be kept as long as the cut.
            make: returns the new operation.
        """
        found = []
        for one in operations:
            key = (name, id(one))
            if key not in self.known:
                self.known[key] = make(one)
            found.append(self.known[key])
        return tuple(found)

    def operation(self, one: Operation, *, scores: bool = False) -> Operation:
        """Return an operation on a chunk's tokens.

        Args:
            one: on those of the whole sequence.
            scores: attention has no fused kernel, so that batched products are its own.
        """
        flops = one.flops / self.chunks
        of_tokens: float = one.bytes
        of_others = 0.0
        if one.kind in ("matmul", "grouped-matmul") and one.m:
            rows_bytes = self.size * one.batch * one.m * (one.k + one.n)
            of_tokens = min(one.bytes, rows_bytes)
            of_others = one.bytes - of_tokens
        elif one.kind in ATTENTION:
            of_others = self.seen * keys_bytes(one, self.size)
            of_tokens = one.bytes - keys_bytes(one, self.size)
        if scores and is_over_scores(one):
            flops *= self.seen
            of_tokens *= self.seen
            of_others *= self.seen
        moved = of_others + of_tokens / self.chunks
        return one.model_copy(
            update={"flops": flops, "bytes": moved, "m": one.m / self.chunks}
        )

    def copies(self, whole: Measurement) -> tuple[Operation, ...]:
        """Return the copies of a chunk's keys and values."""

        def copy(one: Operation) -> Operation:
            return _moving(one, COPYING * keys_bytes(one, self.size) / self.chunks)

        return self._each("copies", _attention(whole), copy)

    def key_additions(self, whole: Measurement) -> tuple[Operation, ...]:
        """Return the additions to the gradients of the keys and values that a chunk sees."""

        def addition(one: Operation) -> Operation:
            return _moving(one, ADDING * keys_bytes(one, self.size) * self.seen)

        return self._each("key additions", _attention(whole), addition)

    def weight_additions(self, whole: Measurement) -> tuple[Operation, ...]:
        """Return the additions to the gradients of the weights."""

        def addition(one: Operation) -> Operation:
            return _moving(one, ADDING * self.gradient_bytes * weights(one))

        with_weights = filter(weights, whole.operations)
        return self._each("weight additions", with_weights, addition)

    def with_accumulation(self, chunk: Measurement) -> Measurement:
        """Return the row whose products add the gradients of their weights."""
        further = 2 * self.gradient_bytes - self.size

        def adding(one: Operation) -> Operation:
            more = {"bytes": one.bytes + further * weights(one)}
            return one.model_copy(update=more)

        operations = self._each("accumulating", chunk.operations, adding)
        return chunk.model_copy(update={"operations": operations})


def _attention(row: Measurement) -> Iterator[Operation]:
    return (one for one in row.operations if one.kind in ATTENTION)


_seconds_of = attrgetter(*(each.name for each in fields(Computation)))


def _moving(one: Operation, size_bytes: float) -> Operation:
    """Return a kernel that moves bytes, with the count of an operation."""
    return Operation.model_construct(
        kind="memory",
        count=one.count,
        flops=0,
        bytes=round(size_bytes),
        m=0,
        n=0,
        k=0,
        batch=1,
        is_linear=None,
        gradients=None,
    )


def keys_bytes(one: Operation, size: int) -> float:
    """Return the bytes of keys and values among those of fused attention.

    The others are those of queries and output. Without the kernel's shape, both are half.
    """
    if not one.m:
        return one.bytes / 2
    return max(0.0, one.bytes - 2 * size * one.batch * one.m * one.k)


def has_scores(row: Measurement) -> bool:
    """Return whether attention has no fused kernel: its scores are in memory."""
    return any(one.kind == "softmax" for one in row.operations)


def is_over_scores(one: Operation) -> bool:
    """Return whether an operation of unfused attention reads or writes scores."""
    is_product = one.kind == "matmul" and one.is_linear is False
    return one.kind == "softmax" or is_product


def weights(one: Operation) -> int:
    """Return the elements whose gradient a product computes; 0: it has no weight."""
    has_weight = one.batch == 1 if one.is_linear is None else one.is_linear
    is_trained = one.gradients in (None, "weight")
    if one.kind not in PRODUCTS or not has_weight or not is_trained:
        return 0
    return one.batch * one.n * one.k


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
    wholes: Sequence[int],
    attention: Sequence[int],
    chunks: int,
    ends: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Of every stage its chunks in order, which add up to the whole: equation (Q2).

    Args:
        wholes: ticks of every stage.
        attention: attention's part of them.
        chunks: of every sequence.
        ends: fraction of the tokens up to the end of every chunk; None: chunks of equal tokens.
    """
    found: list[int] = []
    for whole, part in zip(wholes, attention, strict=True):
        if ends is None:
            up_to = [_up_to(whole, part, done, chunks) for done in range(chunks + 1)]
        else:
            up_to = [0, *(_up_to_fraction(whole, part, end) for end in ends)]
        found += [end - start for start, end in pairwise(up_to)]
    return tuple(found)


def equal_work_ends(whole: int, attention: int, chunks: int) -> tuple[float, ...]:
    """Return the fraction of the tokens up to the end of every chunk, for chunks that last equally long.

    The root t of (x - a) t + a t^2 = x c / Q, as Seq1F1B cuts a sequence (Sun et al. 2024, section 3.3).

    Args:
        whole: ticks of a forward.
        attention: attention's part of them.
        chunks: of every sequence.
    """
    linear = whole - attention
    ends = []
    for done in range(1, chunks + 1):
        work = whole * done / chunks
        discriminant = linear * linear + 4 * attention * work
        ends.append(2 * work / (linear + math.sqrt(discriminant)))
    return tuple(ends)


def _up_to(whole: int, attention: int, chunk: int, chunks: int) -> int:
    """C of equation (Q2), each term rounded down."""
    return chunk * (whole - attention) // chunks + attention * chunk * chunk // (
        chunks * chunks
    )


def _up_to_fraction(whole: int, attention: int, end: float) -> int:
    """C of equation (Q2) at a fraction of the tokens."""
    return round((whole - attention) * end + attention * end * end)
