"""Seconds of a counted row by the measured curves of its device, one operation at a time.

The same equations (V1) to (V4) as those of `planner.cost.curves`, written as loops over points: a second way to the
same price.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import exp, log
from typing import NamedTuple

from planner.spec.device_curves import (
    AttentionPoint,
    ConvolutionPoint,
    DeviceCurves,
    ProductPoint,
    TransferPoint,
)
from planner.spec.profile import BYTES_PER_ELEMENT, Measurement, Operation

PHASES = ("forward", "input", "weight")
NEAREST = 4
DECIMALS = 9
"""Of squared distances; of equally near points, the first in the document is used."""
UNKNOWN_BACKWARD = 2.2
"""Bytes of memory-bound operations in the backward / forward, where a row does not state them."""


class CurveSeconds(NamedTuple):
    """Forward, gradient of the input, gradient of the weights, recomputation."""

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float


def curve_seconds(
    row: Measurement, curves: DeviceCurves, dtype: str
) -> CurveSeconds | None:
    """Return the seconds of a row; None: its products are not in the curves."""
    if not row.operations or not _points(curves, dtype, "linear"):
        return None
    on_data = not row.backward_input_flops and row.backward_weight_flops > 0
    growth, accumulated = _memory_backward(row, dtype, on_data)
    forward = of_input = of_weight = 0.0
    for one in row.operations:
        forward += one.count * _once(one, curves, dtype, "forward", 1.0)
        if _runs(one, "input", on_data):
            of_input += one.count * _once(one, curves, dtype, "input", growth)
        if _runs(one, "weight", on_data):
            of_weight += one.count * _once(one, curves, dtype, "weight", growth)
    if accumulated:
        of_weight += 2 * _line(curves.accumulation, accumulated / 2, curves)
    again = sum(
        one.count * _once(one, curves, dtype, "forward", 1.0)
        for one in row.recompute_operations
    )
    if not row.recompute_operations:
        share = float(row.recompute == "full")
        if row.forward_flops:
            share = min(1.0, row.recompute_flops / row.forward_flops)
        again = forward * share
    kernels = sum(one.count for one in row.operations)
    rerun = sum(one.count for one in row.recompute_operations)
    if row.recompute == "full" and not rerun:
        rerun = kernels
    backward = of_input + of_weight
    slower = _hosted(backward, 2 * kernels, curves) / backward if backward else 1.0
    return CurveSeconds(
        _hosted(forward, kernels, curves),
        of_input * slower,
        of_weight * slower,
        _hosted(again, rerun, curves),
    )


def _hosted(seconds: float, kernels: int, curves: DeviceCurves) -> float:
    """Return seconds with those of the host: added on a CPU, else a smooth maximum."""
    host = curves.host_seconds * kernels
    if not curves.copies:
        return seconds + host
    return float((seconds**4 + host**4) ** 0.25)


def _runs(one: Operation, phase: str, on_data: bool) -> bool:
    if one.kind not in ("matmul", "convolution"):
        return phase == "input" and one.gradients != "none"
    if on_data and one.gradients is None:
        return phase == "weight"
    return one.gradients in (None, phase)


def _memory_backward(
    row: Measurement, dtype: str, on_data: bool
) -> tuple[float, float]:
    """Return backward / forward bytes of memory-bound operations, and accumulated bytes."""
    size = BYTES_PER_ELEMENT[dtype]
    elements = (row.local_parameters or 0) - (row.local_frozen_parameters or 0)
    others, forward, has_convolution = 0.0, 0, False
    for one in row.operations:
        if one.kind.startswith("attention"):
            others += 2 * one.count * one.bytes
        elif one.kind not in ("matmul", "convolution"):
            forward += 0 if one.gradients == "none" else one.count * one.bytes
        else:
            phases = [phase for phase in PHASES[1:] if _runs(one, phase, on_data)]
            others += len(phases) * one.count * one.bytes
            has_convolution = has_convolution or one.kind == "convolution"
            has_weight = one.batch == 1 if one.is_linear is None else one.is_linear
            if one.kind == "matmul" and one.m and has_weight and "weight" in phases:
                weights = one.count * one.batch * one.n * one.k
                others += 3 * size * weights
                elements -= weights
    elements = max(0, elements)
    if has_convolution:
        others, elements = others + 3 * size * elements, 0
    accumulated = 4.0 * size * elements
    if not row.backward_bytes:
        return UNKNOWN_BACKWARD, accumulated
    left = max(0.0, row.backward_bytes - others - accumulated)
    return (left / forward if forward else 0.0), accumulated


def _once(
    one: Operation, curves: DeviceCurves, dtype: str, phase: str, growth: float
) -> float:
    """Return the seconds of one run of an operation in a phase."""
    if one.kind.startswith("attention"):
        seconds = _attention(one, curves, dtype, phase)
    elif one.kind == "convolution":
        seconds = _convolution(one, curves, dtype, phase)
    elif one.kind == "matmul":
        sizes = (one.m, one.n, one.k, one.batch) if one.m else _cube(one.flops)
        seconds = _product(sizes, curves, dtype, phase)
    else:
        moved = one.bytes * (growth if phase == "input" else 1.0)
        return _line(curves.memory, moved, curves)
    return max(seconds, curves.launch_seconds)


def _cube(flops: float) -> tuple[float, float, float, float]:
    side = float(max(flops, 2.0) / 2) ** (1 / 3)
    return side, side, side, 1.0


def _attention(one: Operation, curves: DeviceCurves, dtype: str, phase: str) -> float:
    for curve in curves.attention:
        if curve.dtype == dtype:
            size = BYTES_PER_ELEMENT[dtype]
            known = [
                (point.flops, size * point.elements, _seconds_of(point, phase))
                for point in curve.points
            ]
            return one.flops / _nearby_rate(one, known)
    return _product(_cube(one.flops), curves, dtype, phase)


def _convolution(one: Operation, curves: DeviceCurves, dtype: str, phase: str) -> float:
    for curve in curves.convolutions:
        if curve.dtype == dtype:
            known = [
                (point.flops, point.bytes, _seconds_of(point, phase))
                for point in curve.points
            ]
            return one.flops / _nearby_rate(one, known)
    return _product(_cube(one.flops), curves, dtype, phase)


def _nearby_rate(one: Operation, known: Sequence[tuple[int, int, float]]) -> float:
    """Return the FLOP/s of the nearest measured points: equation (V2)."""
    flops, moved = max(one.flops, 1), max(one.bytes, 1)
    weighed = []
    for point_flops, point_bytes, seconds in known:
        across = log(point_flops / flops)
        along = log(point_flops / point_bytes) - log(flops / moved)
        distance = round(across**2 + along**2, DECIMALS)
        weighed.append((distance, log(point_flops / seconds)))
    nearest = sorted(weighed, key=lambda one: one[0])[:NEAREST]
    weights = [1 / (distance + 1e-6) for distance, _ in nearest]
    logs = [weight * rate for weight, (_, rate) in zip(weights, nearest, strict=True)]
    return exp(sum(logs) / sum(weights))


def _product(
    sizes: tuple[float, float, float, float],
    curves: DeviceCurves,
    dtype: str,
    phase: str,
) -> float:
    """Return the seconds of a product between the measured shapes around it: equation (V1)."""
    points = _points(curves, dtype, "linear")
    if sizes[3] > 1:
        points = _points(curves, dtype, "batched") or points
    shapes = {(one.m, one.n, one.k, one.batch): one for one in points}
    sides = [
        _around(sorted({shape[axis] for shape in shapes}), sizes[axis])
        for axis in range(4)
    ]
    log_rate = 0.0
    for corner in product(*sides):
        weight = 1.0
        for _, share in corner:
            weight *= share
        if weight:
            shape = tuple(size for size, _ in corner)
            point = min(shapes, key=lambda each: _distance(each, shape))
            flops = 2.0 * point[0] * point[1] * point[2] * point[3]
            log_rate += weight * log(flops / _seconds_of(shapes[point], phase))
    return 2 * sizes[0] * sizes[1] * sizes[2] * sizes[3] / exp(log_rate)


def _points(curves: DeviceCurves, dtype: str, kind: str) -> tuple[ProductPoint, ...]:
    for curve in curves.products:
        if (curve.dtype, curve.kind) == (dtype, kind):
            return curve.points
    return ()


def _around(axis: Sequence[int], value: float) -> list[tuple[int, float]]:
    """Return the measured sizes below and above a size, and the share of each."""
    inside = min(max(value, axis[0]), axis[-1])
    below = max(size for size in axis if size <= inside * (1 + 1e-12))
    above = min((size for size in axis if size > below), default=below)
    if above == below:
        return [(below, 1.0)]
    share = log(inside / below) / log(above / below)
    return [(below, 1 - share), (above, share)]


def _distance(left: Sequence[int], right: Sequence[int]) -> float:
    squares = [log(a / b) ** 2 for a, b in zip(left, right, strict=True)]
    return round(sum(squares), DECIMALS)


def _seconds_of(
    point: ProductPoint | ConvolutionPoint | AttentionPoint, phase: str
) -> float:
    if phase == "forward":
        return point.forward_seconds
    if isinstance(point, AttentionPoint):
        return point.backward_seconds
    return point.input_seconds if phase == "input" else point.weight_seconds


def _line(points: Sequence[TransferPoint], moved: float, curves: DeviceCurves) -> float:
    """Return the seconds to move so many bytes: equation (V3)."""
    ordered = sorted(points, key=lambda point: point.bytes)
    last = ordered[-1]
    if moved > last.bytes:
        return last.seconds * moved / last.bytes
    below, seconds = 0.0, curves.launch_seconds
    for point in ordered:
        if moved <= point.bytes:
            share = (moved - below) / (point.bytes - below)
            return seconds + share * (point.seconds - seconds)
        below, seconds = point.bytes, point.seconds
    return seconds
