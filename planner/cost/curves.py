"""Seconds of operations by the measured curves of a device.

A device document of `planner calibrate --device` has curves (`DeviceCurves`): seconds
of kernels over a grid of shapes. They replace equations (C1) to (C3):

    (V1)  product       log FLOP/s, multilinear in log m, log n, log k and log batch;
                        outside the grid that of its edge. Forward, input gradient and
                        weight gradient have a curve each
    (V2)  attention,    log FLOP/s of the nearest measured ones by FLOPs and FLOPs per
          convolution   byte, weighted by the inverse of the squared distance
    (V3)  memory-bound  seconds, piecewise linear in the bytes: launch, caches, memory
    (V4)  backward of memory-bound operations: bytes = those that the row states for the
          whole backward - those of products, attention and accumulated gradients;
          unknown: `MEMORY_BACKWARD` times the forward's. Gradients of parameters that
          are in no product are set to zero and added to earlier ones: 4 accesses each

All functions take and return NumPy arrays, one element per operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.spec.device_curves import (
    AttentionPoint,
    ConvolutionPoint,
    CurveType,
    DeviceCurves,
    ProductCurve,
    ProductKind,
    ProductPoint,
    TransferPoint,
)
from planner.spec.profile import BYTES_PER_ELEMENT, DataType, Measurement, Operation

Floats = NDArray[np.float64]
Phase = Literal["forward", "input", "weight"]
"""A product, and the products for the gradients of its input and of its weight."""
PHASES: tuple[Phase, ...] = ("forward", "input", "weight")

NEAREST = 4
"""Measured points that the rate of another one is derived from: equation (V2)."""
DECIMALS = 9
"""Of squared distances; of equally near points, the first in the document is used."""
MEMORY_BACKWARD = 2.2
"""Bytes of memory-bound operations in the backward / forward, where a row does not
state them: torch's counts of decoder blocks have 1.7 (GPT-2) to 2.4 (Qwen3)."""
NO_DISTANCE = 1e-6
"""Added to squared distances, so that a measured point has its own rate."""


@dataclass(frozen=True, slots=True)
class CurveSeconds:
    """Seconds of one row, without communication."""

    forward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    recompute_seconds: float
    forward_attention_seconds: float


@dataclass(frozen=True, slots=True)
class Grid:
    """Rates over a grid of sizes: equation (V1)."""

    axes: tuple[Floats, ...]
    """Logarithms of the sizes of every dimension, ascending."""
    log_rates: dict[Phase, Floats]

    @classmethod
    def of(cls, points: Sequence[ProductPoint]) -> Grid:
        """Arrange measured products; a missing shape has the rate of the nearest."""
        sizes = np.log([[one.m, one.n, one.k, one.batch] for one in points])
        axes = tuple(np.unique(column) for column in sizes.T)
        shapes = np.array(list(product(*axes)))
        distances = ((shapes[:, None, :] - sizes[None, :, :]) ** 2).sum(axis=2)
        nearest = np.round(distances, DECIMALS).argmin(axis=1)
        lengths = tuple(len(axis) for axis in axes)
        flops = np.array([2.0 * one.m * one.n * one.k * one.batch for one in points])
        log_rates: dict[Phase, Floats] = {}
        for phase in PHASES:
            seconds = np.array([_phase_seconds(one, phase) for one in points])
            log_rates[phase] = np.log(flops / seconds)[nearest].reshape(lengths)
        return cls(axes, log_rates)

    def rate(self, sizes: Sequence[Floats], phase: Phase) -> Floats:
        """Return FLOP/s at these sizes, one array per dimension."""
        lower, fractions = [], []
        for axis, size in zip(self.axes, sizes, strict=True):
            place, fraction = _locate(axis, np.log(size))
            lower.append(place)
            fractions.append(fraction)
        table = self.log_rates[phase]
        total = np.zeros(len(sizes[0]))
        for corner in product((0, 1), repeat=len(self.axes)):
            weight = np.ones(len(total))
            index = []
            for side, place, fraction, axis in zip(
                corner, lower, fractions, self.axes, strict=True
            ):
                weight = weight * (fraction if side else 1 - fraction)
                index.append(np.minimum(place + side, len(axis) - 1))
            total += weight * table[tuple(index)]
        return np.exp(total)


def _locate(axis: Floats, values: Floats) -> tuple[NDArray[np.intp], Floats]:
    """Return the index of the grid point below each value, and the fraction above it."""
    if len(axis) == 1:
        return np.zeros(len(values), dtype=np.intp), np.zeros(len(values))
    inside = np.clip(values, axis[0], axis[-1])
    place = np.clip(np.searchsorted(axis, inside) - 1, 0, len(axis) - 2)
    fraction = (inside - axis[place]) / (axis[place + 1] - axis[place])
    return place, fraction


@dataclass(frozen=True, slots=True)
class Scatter:
    """Rates of measured points without a grid: equation (V2)."""

    places: Floats
    """Logarithms of FLOPs and of FLOPs per byte, one row per point."""
    log_rates: dict[Phase, Floats]

    @classmethod
    def of(
        cls,
        flops: Sequence[float],
        moved: Sequence[float],
        seconds: dict[Phase, Floats],
    ) -> Scatter:
        """Arrange measured points.

        Args:
            flops: of the forward.
            moved: bytes of the forward.
            seconds: of every phase.
        """
        done = np.asarray(flops, dtype=np.float64)
        rates = {phase: np.log(done / each) for phase, each in seconds.items()}
        return cls(_places(done, np.asarray(moved, dtype=np.float64)), rates)

    def seconds(self, flops: Floats, moved: Floats, phase: Phase) -> Floats:
        """Return the seconds of a phase, by FLOPs and bytes of the forward."""
        wanted = _places(np.maximum(flops, 1.0), np.maximum(moved, 1.0))
        difference = wanted[:, None, :] - self.places[None, :, :]
        distances = np.round((difference**2).sum(axis=2), DECIMALS)
        count = min(NEAREST, len(self.places))
        nearest = np.argsort(distances, axis=1, kind="stable")[:, :count]
        weights = 1 / (np.take_along_axis(distances, nearest, axis=1) + NO_DISTANCE)
        log_rates = self.log_rates[phase][nearest]
        log_rate = (weights * log_rates).sum(axis=1) / weights.sum(axis=1)
        return np.asarray(flops / np.exp(log_rate))


def _places(flops: Floats, moved: Floats) -> Floats:
    return np.column_stack((np.log(flops), np.log(flops / moved)))


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds by bytes: equation (V3)."""

    bytes: Floats
    seconds: Floats

    @classmethod
    def of(cls, points: Sequence[TransferPoint], launch_seconds: float) -> Line:
        """Arrange measured points, with the launch of a kernel that moves nothing."""
        ordered = sorted(points, key=lambda point: point.bytes)
        moved = [0.0, *(float(one.bytes) for one in ordered)]
        return cls(
            np.array(moved),
            np.array([launch_seconds, *(one.seconds for one in ordered)]),
        )

    def at(self, moved_bytes: ArrayLike) -> Floats:
        """Return the seconds to move so many bytes."""
        moved = np.atleast_1d(np.asarray(moved_bytes, dtype=np.float64))
        largest, slowest = self.bytes[-1], self.seconds[-1]
        inside = np.interp(moved, self.bytes, self.seconds)
        return np.where(moved > largest, slowest * moved / largest, inside)


@dataclass(frozen=True, slots=True)
class Tables:
    """Curves of a device, arranged for look-up."""

    products: dict[tuple[CurveType, ProductKind], Grid]
    convolutions: dict[CurveType, Scatter]
    attention: dict[CurveType, Scatter]
    memory: Line
    accumulation: Line
    launch_seconds: float


@lru_cache(maxsize=16)
def tables(curves: DeviceCurves) -> Tables:
    """Return the curves of a device as tables."""
    products = {(one.dtype, one.kind): _grid(one) for one in curves.products}
    convolutions = {one.dtype: _convolutions(one.points) for one in curves.convolutions}
    attention = {
        one.dtype: _attention(one.points, one.dtype) for one in curves.attention
    }
    return Tables(
        products=products,
        convolutions=convolutions,
        attention=attention,
        memory=Line.of(curves.memory, curves.launch_seconds),
        accumulation=Line.of(curves.accumulation, curves.launch_seconds),
        launch_seconds=curves.launch_seconds,
    )


def _grid(curve: ProductCurve) -> Grid:
    return Grid.of(curve.points)


def _convolutions(points: Sequence[ConvolutionPoint]) -> Scatter:
    seconds: dict[Phase, Floats] = {
        phase: np.array([_phase_seconds(one, phase) for one in points])
        for phase in PHASES
    }
    return Scatter.of(
        [one.flops for one in points], [one.bytes for one in points], seconds
    )


def _attention(points: Sequence[AttentionPoint], dtype: CurveType) -> Scatter:
    size = BYTES_PER_ELEMENT[dtype]
    seconds: dict[Phase, Floats] = {
        "forward": np.array([one.forward_seconds for one in points]),
        "input": np.array([one.backward_seconds for one in points]),
    }
    return Scatter.of(
        [one.flops for one in points], [size * one.elements for one in points], seconds
    )


def _phase_seconds(point: ProductPoint | ConvolutionPoint, phase: Phase) -> float:
    if phase == "forward":
        return point.forward_seconds
    return point.input_seconds if phase == "input" else point.weight_seconds


def has_curves(curves: DeviceCurves | None, dtype: DataType) -> bool:
    """Return whether products in this format were measured."""
    return curves is not None and any(one.dtype == dtype for one in curves.products)


def product_seconds(
    curves: DeviceCurves,
    dtype: CurveType,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    batch: ArrayLike = 1,
    phase: Phase = "forward",
) -> Floats:
    """Return the seconds of products (m, k) x (k, n): equation (V1).

    Args:
        curves: with products in this format.
        dtype: number format.
        m: rows of the left operand.
        n: columns of the right operand.
        k: length of the sums.
        batch: products of one call; 1: a linear layer.
        phase: ``forward``, or the product for a gradient: ``input`` or ``weight``.

    Raises:
        KeyError: no product in this format was measured.
    """
    sizes = [
        np.maximum(np.asarray(each, dtype=np.float64), 1.0) for each in (m, n, k, batch)
    ]
    rows, columns, inner, calls = np.broadcast_arrays(*map(np.atleast_1d, sizes))
    found = tables(curves)
    linear = found.products[dtype, "linear"]
    batched = found.products.get((dtype, "batched"), linear)
    flops = 2 * rows * columns * inner * calls
    of_linear = linear.rate((rows, columns, inner, np.ones(len(calls))), phase)
    of_batched = batched.rate((rows, columns, inner, calls), phase)
    seconds = flops / np.where(calls > 1, of_batched, of_linear)
    return np.asarray(np.maximum(seconds, found.launch_seconds))


def attention_seconds(
    curves: DeviceCurves,
    dtype: CurveType,
    flops: ArrayLike,
    moved_bytes: ArrayLike,
    phase: Phase = "forward",
) -> Floats:
    """Return the seconds of fused attention: equation (V2).

    Args:
        curves: of the device.
        dtype: number format.
        flops: of the forward; of causal attention half.
        moved_bytes: of queries, keys, values and output.
        phase: ``forward``, or ``input``: the whole backward.
    """
    done = np.atleast_1d(np.asarray(flops, dtype=np.float64))
    moved = np.atleast_1d(np.asarray(moved_bytes, dtype=np.float64))
    found = tables(curves)
    if dtype not in found.attention:
        side = np.cbrt(np.maximum(done, 2.0) / 2)
        return product_seconds(curves, dtype, side, side, side, 1, phase)
    seconds = found.attention[dtype].seconds(done, moved, phase)
    return np.asarray(np.maximum(seconds, found.launch_seconds))


def convolution_seconds(
    curves: DeviceCurves,
    dtype: CurveType,
    flops: ArrayLike,
    moved_bytes: ArrayLike,
    phase: Phase = "forward",
) -> Floats:
    """Return the seconds of convolutions: equation (V2).

    Args:
        curves: of the device.
        dtype: number format.
        flops: of the forward.
        moved_bytes: of input, weight and output.
        phase: ``forward``, or that of a gradient: ``input`` or ``weight``.
    """
    done = np.atleast_1d(np.asarray(flops, dtype=np.float64))
    moved = np.atleast_1d(np.asarray(moved_bytes, dtype=np.float64))
    found = tables(curves)
    if dtype not in found.convolutions:
        side = np.cbrt(np.maximum(done, 2.0) / 2)
        return product_seconds(curves, dtype, side, side, side, 1, phase)
    seconds = found.convolutions[dtype].seconds(done, moved, phase)
    return np.asarray(np.maximum(seconds, found.launch_seconds))


def memory_seconds(curves: DeviceCurves, moved_bytes: ArrayLike) -> Floats:
    """Return the seconds of memory-bound kernels, with their launch: equation (V3)."""
    return tables(curves).memory.at(moved_bytes)


def accumulation_seconds(curves: DeviceCurves, moved_bytes: ArrayLike) -> Floats:
    """Return the seconds of setting gradients to zero or adding them: equation (V3)."""
    return tables(curves).accumulation.at(moved_bytes)


def launch_seconds(curves: DeviceCurves) -> float:
    """Return the fixed seconds of one kernel."""
    return curves.launch_seconds


def curve_seconds(
    row: Measurement, curves: DeviceCurves, dtype: DataType
) -> CurveSeconds:
    """Return the seconds of a counted row by the curves of a device.

    Args:
        row: with operations.
        curves: with products in this format: see `has_curves`.
        dtype: of activations and products.
    """
    operations = _trained_operations(row)
    forward = _phase(operations, curves, dtype, "forward")
    is_attention = np.array([_is_attention(one) for one in operations], dtype=bool)
    memory = _memory_backward(row, operations, dtype)
    of_input = _phase(operations, curves, dtype, "input", memory.bytes_factor)
    of_weight = _phase(operations, curves, dtype, "weight")
    accumulated = accumulation_seconds(curves, memory.accumulated_bytes / 2)
    backward_input = float(of_input.sum())
    backward_weight = float(of_weight.sum())
    if memory.accumulated_bytes:
        backward_weight += 2 * float(accumulated[0])
    whole = float(forward.sum())
    if row.recompute_operations:
        again = _phase(row.recompute_operations, curves, dtype, "forward")
        recompute = float(again.sum())
    elif row.forward_flops:
        recompute = whole * min(1.0, row.recompute_flops / row.forward_flops)
    else:
        recompute = whole * float(row.recompute == "full")
    kernels = sum(one.count for one in operations)
    again_kernels = sum(one.count for one in row.recompute_operations)
    if row.recompute == "full" and not again_kernels:
        again_kernels = kernels
    backward = backward_input + backward_weight
    with_host = _with_host(curves, backward, 2 * kernels)
    slower = with_host / backward if backward else 1.0
    return CurveSeconds(
        forward_seconds=_with_host(curves, whole, kernels),
        backward_input_seconds=backward_input * slower,
        backward_weight_seconds=backward_weight * slower,
        recompute_seconds=_with_host(curves, recompute, again_kernels),
        forward_attention_seconds=float(forward[is_attention].sum()),
    )


def _with_host(curves: DeviceCurves, device_seconds: float, kernels: int) -> float:
    """Return the seconds with the host's: added on a CPU, else equation (K2)."""
    host_seconds = curves.host_seconds * kernels
    if curves.is_host:
        return device_seconds + host_seconds
    return float((device_seconds**4 + host_seconds**4) ** 0.25)


def _is_attention(operation: Operation) -> bool:
    return operation.kind.startswith("attention")


def _phase(
    operations: Sequence[Operation],
    curves: DeviceCurves,
    dtype: DataType,
    phase: Phase,
    bytes_factor: float = 1.0,
) -> Floats:
    """Return the seconds of all runs of every operation in a phase.

    Args:
        operations: of a layer.
        curves: of the device.
        dtype: number format.
        phase: memory-bound operations and attention have no ``weight`` phase.
        bytes_factor: bytes of memory-bound operations relative to the forward's.
    """
    seconds = np.zeros(len(operations))
    count = np.array([one.count for one in operations], dtype=np.float64)
    flops = np.array([one.flops for one in operations], dtype=np.float64)
    moved = np.array([one.bytes for one in operations], dtype=np.float64)
    is_run = np.array([_is_run(one, phase) for one in operations], dtype=bool)
    kinds = np.array([_curve_of(one) for one in operations])
    for kind in np.unique(kinds[is_run]):
        at = is_run & (kinds == kind)
        if kind == "product":
            chosen = [one for one, here in zip(operations, at, strict=True) if here]
            m, n, k, batch = (
                np.array([getattr(one, name) for one in chosen], dtype=np.float64)
                for name in ("m", "n", "k", "batch")
            )
            seconds[at] = product_seconds(curves, dtype, m, n, k, batch, phase)
        elif kind == "whole":
            side = np.cbrt(np.maximum(flops[at], 2.0) / 2)
            seconds[at] = product_seconds(curves, dtype, side, side, side, 1, phase)
        elif kind == "convolution":
            seconds[at] = convolution_seconds(
                curves, dtype, flops[at], moved[at], phase
            )
        elif kind == "attention":
            seconds[at] = attention_seconds(curves, dtype, flops[at], moved[at], phase)
        elif phase != "weight":
            seconds[at] = memory_seconds(curves, moved[at] * bytes_factor)
    return count * seconds


def _curve_of(operation: Operation) -> str:
    if operation.kind == "matmul":
        return "product" if operation.m else "whole"
    if operation.kind == "convolution":
        return "convolution"
    return "attention" if _is_attention(operation) else "memory"


def _is_run(operation: Operation, phase: Phase) -> bool:
    """Return whether an operation does something in this phase."""
    if phase == "forward":
        return True
    has_two = operation.kind in ("matmul", "convolution")
    if not has_two:
        return phase == "input" and operation.gradients != "none"
    return operation.gradients in (None, phase)


def _has_weight(operation: Operation) -> bool:
    """Return whether a product's right operand is a parameter."""
    if operation.is_linear is None:
        return operation.batch == 1
    return operation.is_linear


def _trained_operations(row: Measurement) -> tuple[Operation, ...]:
    """Return the operations; products on data have no gradient of their input."""
    if row.backward_input_flops or not row.backward_weight_flops:
        return row.operations
    products = ("matmul", "convolution")
    return tuple(
        one.model_copy(update={"gradients": "weight"})
        if one.kind in products and one.gradients is None
        else one
        for one in row.operations
    )


@dataclass(frozen=True, slots=True)
class MemoryBackward:
    """What memory-bound kernels move in the backward: equation (V4)."""

    bytes_factor: float
    """Bytes relative to those of the forward."""
    accumulated_bytes: float
    """Bytes of setting to zero and adding the gradients of parameters that are not in
    products, such as embeddings."""


def _memory_backward(
    row: Measurement, operations: Sequence[Operation], dtype: DataType
) -> MemoryBackward:
    size = BYTES_PER_ELEMENT[dtype]
    forward = products = 0.0
    elements = row.local_parameters or 0
    elements -= row.local_frozen_parameters or 0
    has_convolution = False
    for one in operations:
        kind = _curve_of(one)
        if kind == "memory":
            forward += one.count * one.bytes * (one.gradients != "none")
            continue
        if kind == "attention":
            products += 2 * one.count * one.bytes
            continue
        phases = sum(_is_run(one, phase) for phase in ("input", "weight"))
        products += phases * one.count * one.bytes
        has_convolution = has_convolution or kind == "convolution"
        if kind == "product" and _has_weight(one) and _is_run(one, "weight"):
            weights = one.count * one.batch * one.n * one.k
            products += 3 * size * weights
            elements -= weights
    elements = max(0, elements)
    if has_convolution:
        products += 3 * size * elements
        elements = 0
    accumulated = 4.0 * size * elements
    if not row.backward_bytes:
        return MemoryBackward(MEMORY_BACKWARD, accumulated)
    left = max(0.0, row.backward_bytes - products - accumulated)
    return MemoryBackward(left / forward if forward else 0.0, accumulated)


__all__ = [
    "CurveSeconds",
    "Phase",
    "accumulation_seconds",
    "attention_seconds",
    "convolution_seconds",
    "curve_seconds",
    "has_curves",
    "launch_seconds",
    "memory_seconds",
    "product_seconds",
]
