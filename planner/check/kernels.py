"""Seconds of a layer's kernels, from the documented equations, one kernel at a time.

(C1)  kernel = max(FLOPs / (peak x fraction), bytes / reached bandwidth) + launch
(C2)  forward = sum over the operations of count x (C1)
(C3)  the backward of a product is two products of the same size; that of attention
      does `attention_backward` times the FLOPs and twice the bytes; that of any other
      operation moves `memory_backward` times the bytes
(C4)  recomputation = its operations; if unknown, the forward's share of FLOPs
(C5)  no layer is faster than the host launches its kernels:
      seconds = (device^4 + host^4)^(1/4)
(C7)  a linear layer in fp8 writes one of input, weight and output in two bytes and
      reads the other two in one
(C8)  its casts move their bytes per element, and are kernels of their own
(K1)  fraction of the peak, by the shape of the product
(Q3)  sequence chunks: every kernel runs once per chunk, with all of its weights and,
      on average, (Q + 1) / (2 Q) of the keys
(Q5)  a chunk copies its keys and values, and adds gradients of keys and weights
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from planner.check.curves import curve_seconds
from planner.spec.calibration import Constants
from planner.spec.cluster import DeviceSpec
from planner.spec.fp8 import Cast, Fp8Casts
from planner.spec.profile import (
    BYTES_PER_ELEMENT,
    DataType,
    Measurement,
    Operation,
)

ATTENTION = {"attention-1": 0.5, "attention": 1.0, "attention-3": 1.0}
"""Speed of each version of FlashAttention relative to the second, on older devices."""
HOPPER_ATTENTION = {"attention-1": 0.425, "attention": 0.85, "attention-3": 1.75}
"""The same on devices with fp8 products, where the second uses less of the peak."""
PRODUCTS = ("matmul", "grouped-matmul", "convolution")


class LayerSeconds(NamedTuple):
    """Computation of one layer and micro-batch."""

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    attention: float = 0.0
    """The part of the forward in fused attention."""


class Pass(NamedTuple):
    """Forward, or one of the two gradients."""

    seconds: float = 0.0
    kernels: int = 0

    def times(self, count: int) -> Pass:
        """Return so many runs."""
        return Pass(count * self.seconds, count * self.kernels)


NOTHING = Pass()


def _total(passes: Sequence[Pass]) -> Pass:
    return Pass(sum(one.seconds for one in passes), sum(one.kernels for one in passes))


@dataclass(frozen=True, slots=True)
class Machine:
    """A device with the fitted constants of the runtime on it."""

    device: DeviceSpec
    dtype: DataType
    constants: Constants
    casts: Fp8Casts | None = None
    """Of a job in fp8."""

    @property
    def launch_seconds(self) -> float:
        """Seconds of starting a kernel."""
        fitted = self.constants.kernel_seconds
        return self.device.launch_seconds if fitted is None else fitted

    def moving(self, size_bytes: float) -> float:
        """Return the seconds of reading and writing so many bytes."""
        constants = self.constants
        fraction = constants.memory_fraction * constants.kernel_fraction
        bandwidth = self.device.memory_bandwidth_bytes_per_second or inf
        return size_bytes / (bandwidth * fraction)

    def fraction(self, one: Operation) -> float:
        """Return the fraction of the peak that a product reaches: equation (K1)."""
        constants = self.constants
        fraction = constants.matmul_fraction * constants.kernel_fraction
        fraction *= self.device.achievable_fraction
        if one.kind in ATTENTION:
            has_fp8 = "fp8" in self.device.peak_flops_per_second
            speed = ATTENTION[one.kind]
            if has_fp8:
                speed = HOPPER_ATTENTION[one.kind]
            return fraction * constants.attention_fraction * speed
        if one.kind == "grouped-matmul":
            fraction *= constants.grouped_fraction
        if one.m > 0:
            if one.n % 2 or one.k % 2:
                fraction *= constants.unaligned_fraction
            sizes = (one.m, max(1, one.n), max(1, one.k))
            edges = sum(constants.matmul_edge / size for size in sizes)
            fraction /= 1 + edges
        return fraction

    def kernel(self, one: Operation, flops: float = 1.0, size: float = 1.0) -> Pass:
        """Return one run with so many times its FLOPs and bytes: equation (C1)."""
        seconds = self.moving(one.bytes * size)
        if one.kind in PRODUCTS or one.kind in ATTENTION:
            peak = self.device.peak_flops_per_second.get(self.dtype, inf)
            seconds = max(seconds, one.flops * flops / (peak * self.fraction(one)))
        elif one.kind == "softmax":
            seconds /= self.constants.softmax_fraction
        return Pass(seconds + self.launch_seconds, 1)

    def passes(self, one: Operation) -> tuple[Pass, Pass, Pass]:
        """Return all runs of an operation: forward, and both gradients: (C3).

        Gradients of frozen parameters, and of inputs that need none, take no time.
        """
        forward = of_input = of_weight = self.kernel(one)
        if self.casts is not None and one.is_linear:
            forward = self._in_fp8(one, "gradient", self.casts.forward)
            of_input = self._in_fp8(one, "input", self.casts.backward_input)
            of_weight = self._in_fp8(one, "weight", self.casts.backward_weight)
        elif one.kind in ATTENTION:
            of_input = self.kernel(one, self.constants.attention_backward, 2.0)
        elif one.kind not in PRODUCTS:
            of_input = self.kernel(one, 1.0, self.constants.memory_backward)
        if one.gradients not in (None, "input"):
            of_input = NOTHING
        if one.gradients not in (None, "weight") or one.kind not in PRODUCTS:
            of_weight = NOTHING
        count = one.count
        return forward.times(count), of_input.times(count), of_weight.times(count)

    def _in_fp8(self, one: Operation, result: str, casts: Sequence[Cast]) -> Pass:
        """Return one product of a linear layer: equations (C7) and (C8)."""
        elements = {
            "input": one.batch * one.m * one.k,
            "weight": one.batch * one.n * one.k,
            "gradient": one.batch * one.m * one.n,
        }
        peak = self.device.peak_flops_per_second.get("fp8", inf)
        rate = peak * self.fraction(one) * self.constants.fp8_fraction
        moved = sum(elements.values()) + elements[result]
        seconds = max(one.flops / rate, self.moving(moved))
        kernels = 1
        for cast in casts:
            seconds += self.moving(elements[cast.operand] * cast.bytes_per_element)
            kernels += cast.kernels
        return Pass(seconds + kernels * self.launch_seconds, kernels)


def layer_seconds(row: Measurement, machine: Machine) -> LayerSeconds:
    """Return measured seconds unchanged, else the roofline of every operation."""
    is_priced = row.source == "counted" and row.operations
    if row.forward_seconds is not None and not is_priced:
        return LayerSeconds(
            row.forward_seconds,
            row.backward_input_seconds or 0.0,
            row.backward_weight_seconds or 0.0,
            row.recompute_seconds or 0.0,
        )
    curves = machine.device.curves
    if curves is not None and machine.casts is None:
        measured = curve_seconds(row, curves, machine.dtype)
        if measured is not None:
            return LayerSeconds(*measured)
    operations = row.operations or (_whole_layer(row),)
    every = [machine.passes(one) for one in operations]
    forward = _total([passes[0] for passes in every])
    of_input = _total([passes[1] for passes in every])
    of_weight = _total([passes[2] for passes in every])
    again = _total([machine.passes(one)[0] for one in row.recompute_operations])
    attention = [
        passes[0].seconds
        for one, passes in zip(operations, every, strict=True)
        if one.kind in ATTENTION
    ]
    host = machine.constants
    backward = _total([of_input, of_weight])
    bounded = _with_host(backward, host.host_backward_seconds)
    slower = bounded / backward.seconds if backward.seconds else 0.0
    seconds = LayerSeconds(
        forward=_with_host(forward, host.host_forward_seconds),
        backward_input=of_input.seconds * slower,
        backward_weight=of_weight.seconds * slower,
        recompute=_with_host(again, host.host_forward_seconds),
        attention=sum(attention),
    )
    return _by_flops(row, seconds)


def _with_host(one: Pass, host_seconds: float) -> float:
    """Return the seconds with the host's floor: equation (C5)."""
    host = one.kernels * host_seconds
    return float((one.seconds**4 + host**4) ** 0.25)


def _whole_layer(row: Measurement) -> Operation:
    """Return one product, for a row without operations."""
    return Operation(
        kind="matmul", count=1, flops=row.forward_flops, bytes=row.forward_bytes
    )


def _by_flops(row: Measurement, seconds: LayerSeconds) -> LayerSeconds:
    """Scale what a row has no operations for by its FLOPs: equation (C4)."""
    whole = row.forward_flops
    if whole and not row.operations:
        of_input = seconds.backward_input * row.backward_input_flops / whole
        of_weight = seconds.backward_weight * row.backward_weight_flops / whole
        seconds = seconds._replace(backward_input=of_input, backward_weight=of_weight)
    if not row.recompute_operations:
        share = 1.0 if row.recompute == "full" else 0.0
        if whole:
            share = min(1.0, row.recompute_flops / whole)
        seconds = seconds._replace(recompute=share * seconds.forward)
    return seconds


def chunked_seconds(
    row: Measurement, machine: Machine, chunks: int, gradient_bytes: int = 0
) -> LayerSeconds:
    """Return the seconds of all sequence chunks of a micro-batch: equations (Q3) and (Q5).

    Measured seconds grow as the roofline does.

    Args:
        row: of the whole micro-batch.
        machine: what runs it.
        chunks: of every sequence.
        gradient_bytes: of an accumulated gradient.
    """
    whole = layer_seconds(row, machine)
    peaks = machine.device.peak_flops_per_second
    is_known = machine.dtype in peaks and (machine.casts is None or "fp8" in peaks)
    if chunks == 1 or not row.operations or not is_known:
        return whole
    counted = row.model_copy(update={"forward_seconds": None, "backward_bytes": 0})
    dtype = machine.dtype
    operations = _on_chunks(row, row.operations, chunks, dtype)
    again = _on_chunks(row, row.recompute_operations, chunks, dtype)
    before = layer_seconds(counted, machine)
    part = counted.model_copy(
        update={"operations": operations, "recompute_operations": again}
    )
    after = layer_seconds(part, machine)
    copied, added = _keys_seconds(counted, machine, chunks)
    summed = _summing_seconds(counted, part, after, machine, gradient_bytes)
    again_copied = copied if row.recompute == "full" else 0.0
    total = LayerSeconds(
        forward=chunks * (after.forward + copied),
        backward_input=chunks * (after.backward_input + added),
        backward_weight=chunks * after.backward_weight + (chunks - 1) * summed,
        recompute=chunks * (after.recompute + again_copied),
        attention=chunks * after.attention,
    )
    grown = [
        seconds * (now / roof) if roof else seconds
        for seconds, now, roof in zip(whole, total, before, strict=True)
    ]
    return LayerSeconds(*grown)


def _on_chunks(
    row: Measurement, operations: Sequence[Operation], chunks: int, dtype: DataType
) -> list[Operation]:
    """Return operations on an average chunk."""
    is_unfused = any(one.kind == "softmax" for one in row.operations)
    found = []
    for one in operations:
        flops, size_bytes = _on_chunk(one, chunks, dtype)
        is_score = one.kind == "softmax" or (
            one.kind == "matmul" and one.is_linear is False
        )
        if is_unfused and is_score:
            flops *= (chunks + 1) / (2 * chunks)
            size_bytes *= (chunks + 1) / (2 * chunks)
        part = {"m": one.m / chunks, "flops": flops, "bytes": size_bytes}
        found.append(one.model_copy(update=part))
    return found


def _on_chunk(one: Operation, chunks: int, dtype: DataType) -> tuple[float, float]:
    """Return FLOPs and bytes on a chunk, which reads all of a product's weights."""
    flops = one.flops / chunks
    size = BYTES_PER_ELEMENT[dtype]
    if one.kind in ATTENTION:
        keys = _keys_bytes(one, size)
        read = keys * (chunks + 1) / (2 * chunks)
        return flops, read + (one.bytes - keys) / chunks
    if one.kind in ("matmul", "grouped-matmul") and one.m:
        rows_bytes = one.m * (one.k + one.n) * size * one.batch
        of_tokens = min(one.bytes, rows_bytes)
        return flops, one.bytes - of_tokens + of_tokens / chunks
    return flops, one.bytes / chunks


def _keys_bytes(one: Operation, size: int) -> float:
    """Return the bytes of keys and values: half, if the kernel's shape is unknown."""
    if one.m == 0:
        return one.bytes / 2
    return max(0.0, one.bytes - 2 * size * one.batch * one.m * one.k)


def _moved(
    row: Measurement, machine: Machine, each: Sequence[tuple[int, float]]
) -> float:
    """Return the seconds of (count, bytes) of kernels that only move bytes."""
    kernels = [
        Operation(kind="memory", count=count, flops=0, bytes=round(size_bytes))
        for count, size_bytes in each
    ]
    if not kernels:
        return 0.0
    return layer_seconds(
        row.model_copy(update={"operations": kernels}), machine
    ).forward


def _keys_seconds(
    row: Measurement, machine: Machine, chunks: int
) -> tuple[float, float]:
    """Return the seconds of copying a chunk's keys, and of adding their gradients."""
    size = BYTES_PER_ELEMENT[machine.dtype]
    keys = [
        (one.count, _keys_bytes(one, size))
        for one in row.operations
        if one.kind in ATTENTION
    ]
    seen = (chunks + 1) / (2 * chunks)
    copied = [(count, 2 * each / chunks) for count, each in keys]
    added = [(count, 3 * each * seen) for count, each in keys]
    return _moved(row, machine, copied), _moved(row, machine, added)


def _summing_seconds(
    row: Measurement,
    part: Measurement,
    after: LayerSeconds,
    machine: Machine,
    gradient_bytes: int,
) -> float:
    """Return the seconds of adding a chunk's gradients of the weights to the others."""
    curves = machine.device.curves
    is_in_curves = False
    if curves is not None and machine.casts is None:
        is_in_curves = curve_seconds(row, curves, machine.dtype) is not None
    if is_in_curves:
        return 0.0
    size = BYTES_PER_ELEMENT[machine.dtype]
    if gradient_bytes > size:
        wide = 2 * gradient_bytes - size
        heavier = [
            one.model_copy(update={"bytes": one.bytes + wide * _weights(one)})
            for one in part.operations
        ]
        wider = layer_seconds(part.model_copy(update={"operations": heavier}), machine)
        return wider.backward_weight - after.backward_weight
    added = [
        (one.count, 3.0 * gradient_bytes * _weights(one))
        for one in row.operations
        if _weights(one) and gradient_bytes
    ]
    return _moved(row, machine, added)


def _weights(one: Operation) -> int:
    """Return the elements of a product's weight whose gradient is computed."""
    has_weight = one.batch == 1 if one.is_linear is None else one.is_linear
    if one.kind not in PRODUCTS or not has_weight:
        return 0
    if one.gradients not in (None, "weight"):
        return 0
    return one.batch * one.n * one.k
