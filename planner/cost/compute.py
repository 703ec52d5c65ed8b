"""Seconds of computation: measured where a profile has them, else a roofline.

The operations of any number of layers are priced at once, as arrays; a fit prices those
of all measured runs in one call, a plan those of one layer.

    (C1)  seconds of a kernel = max(flops / (peak e), bytes / (bandwidth x memory
          fraction)) + launch (Williams et al. 2009, "Roofline"), with e the matmul
          fraction of its shape (K1), times the attention fraction for fused attention
    (C2)  forward = sum over operations of count x (C1)
    (C3)  a product's backward is two of the same size, for the gradients of input and
          weight; attention's does `attention_backward` times the FLOPs and is part of
          the input gradient; a memory-bound one moves `memory_backward` times the bytes
    (C4)  recomputation = the operations that run again; if unknown, the forward's share
    (C5)  no layer is faster than the host launches its kernels: equation (K2)

Products in fp8: equations (C6) to (C9) of `planner.cost.fp8`. Constants (K1) and (K2):
`planner.spec.calibration`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from planner import runtimes
from planner.cost.curves import curve_seconds, has_curves
from planner.cost.fp8 import check_fp8, mark_fp8
from planner.errors import MismatchError
from planner.spec.calibration import DEFAULT, Constants
from planner.spec.cluster import DeviceSpec
from planner.spec.fp8 import Fp8Casts
from planner.spec.job import OURS
from planner.spec.profile import (
    DataType,
    LayerProfile,
    Measurement,
    ModelProfile,
    Operation,
)

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

ATTENTION: dict[str, float] = {
    "attention": 1.0,
    "attention-1": 0.5,
    "attention-3": 1.75,
}
"""Kinds of fused attention, and their speed relative to FlashAttention-2: "around 2x"
the first version's (Dao 2023, abstract); the third is "1.5-2.0x" as fast on Hopper
(Shah et al. 2024, abstract), and on older devices, known by the lack of fp8 products,
the second."""
HOPPER_FLASH_2 = 0.85
"""Speed of FlashAttention-2 on Hopper and later, as a fraction of the peak relative to
that on Ampere: 35 % against 50 to 73 % (Shah et al. 2024, abstract; Dao 2023)."""
PRODUCTS = ("matmul", "grouped-matmul", "convolution")
"""Kinds of operations with two gradients."""
_KINDS: dict[str, int] = {
    kind: place
    for place, kind in enumerate(get_args(Operation.model_fields["kind"].annotation))
}
"""Places in the arrays that say something of every kind of operation."""
_SPEEDS = np.array([ATTENTION.get(kind, 1.0) for kind in _KINDS])
NEVER = math.inf
"""Rate of what a device has no figure for, so that it takes no time."""


@dataclass(frozen=True, slots=True)
class Computation:
    """Seconds of one layer and micro-batch on one rank, without communication."""

    forward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    recompute_seconds: float
    forward_attention_seconds: float = 0.0
    """The part of the forward in fused attention."""


@dataclass(frozen=True, slots=True)
class OperationArrays:
    """Operations of many layers: one element per operation."""

    layer: NDArray[np.intp]
    """Index of the layer that an operation belongs to."""
    layers: int
    count: Floats
    flops: Floats
    bytes: Floats
    m: Floats
    n: Floats
    k: Floats
    batch: Floats
    is_product: Mask
    is_attention: Mask
    is_softmax: Mask
    is_grouped: Mask
    is_linear: Mask
    is_unaligned: Mask
    speed: Floats
    """Of the attention kernel, relative to FlashAttention-2."""
    has_input_gradient: Mask
    has_weight_gradient: Mask

    @classmethod
    def of(cls, layers: Sequence[Sequence[Operation]]) -> OperationArrays:
        """Collect the operations of every layer, each one once if layers share it."""
        sizes = [len(each) for each in layers]
        flat = [one for each in layers for one in each]
        distinct = {id(one): one for one in flat}
        place = dict(zip(distinct, range(len(distinct)), strict=True))
        places = np.array([place[id(one)] for one in flat], dtype=np.intp)
        every = distinct.values()
        numbers = np.array([_numbers(one) for one in every], dtype=np.float64)
        count, flops, bytes_, m, n, k, batch = numbers.reshape(-1, 7)[places].T
        kinds = np.array([_KINDS[one.kind] for one in every], dtype=np.intp)[places]
        is_product = _of_kinds(PRODUCTS)[kinds]
        gradients = np.array(list(map(computed_gradients, every)), dtype=np.bool_)
        of_input, of_weight = gradients.reshape(-1, 2)[places].T
        is_linear = np.array([bool(one.is_linear) for one in every], dtype=np.bool_)
        return cls(
            layer=np.repeat(np.arange(len(layers), dtype=np.intp), sizes),
            layers=len(layers),
            count=count,
            flops=flops,
            bytes=bytes_,
            m=m,
            n=n,
            k=k,
            batch=batch,
            is_product=is_product,
            is_attention=_of_kinds(tuple(ATTENTION))[kinds],
            is_softmax=_of_kinds(("softmax",))[kinds],
            is_grouped=_of_kinds(("grouped-matmul",))[kinds],
            is_linear=is_linear[places],
            is_unaligned=(n % 2 > 0) | (k % 2 > 0),
            speed=_SPEEDS[kinds],
            has_input_gradient=of_input,
            has_weight_gradient=of_weight & is_product,
        )

    def per_layer(self, values: Floats) -> Floats:
        """Sum values over the operations of every layer."""
        sums = np.bincount(self.layer, values, self.layers)
        return np.asarray(sums, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of device and constants, one element per layer (or one for all)."""

    peak: Floats
    """FLOP/s of products that are not in fp8, by the data sheet."""
    peak_fp8: Floats
    bandwidth: Floats
    """Bytes/s of the memory, by the data sheet."""
    matmul: Floats
    """Largest fraction of the peak: `achievable_fraction` x `matmul_fraction`."""
    matmul_edge: Floats
    unaligned_fraction: Floats
    grouped_fraction: Floats
    fp8_fraction: Floats
    memory_fraction: Floats
    softmax_fraction: Floats
    attention_fraction: Floats
    attention_backward: Floats
    memory_backward: Floats
    launch: Floats
    """Seconds per kernel, on the device."""
    host_forward: Floats
    """Seconds per kernel, on the host."""
    host_backward: Floats
    is_blocking: Floats
    """1 where the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1)."""
    is_fp8: Floats
    """1 where linear layers run in fp8."""
    casts: Floats
    """Shape (layers, 3, 4): for forward, input and weight gradient the bytes moved per
    element of input, weight and gradient, and the kernels."""

    @classmethod
    def of(
        cls,
        device: DeviceSpec,
        dtype: DataType,
        constants: Constants,
        casts: Fp8Casts | None = None,
        *,
        graphs: bool = False,
        blocking: bool = False,
    ) -> Figures:
        """Return the figures of one device.

        Args:
            device: what runs the operations.
            dtype: of activations, and of products that are not in fp8.
            constants: fitted constants.
            casts: of the runtime, for precision fp8; None: no fp8.
            graphs: kernels are launched from CUDA graphs, without the host.
            blocking: the host waits for every kernel.
        """
        launch = constants.kernel_seconds
        hosted = 0.0 if graphs else 1.0
        peaks = device.peak_flops_per_second

        def one(value: float) -> Floats:
            return np.array([value])

        return cls(
            peak=one(peaks.get(dtype, NEVER)),
            peak_fp8=one(peaks.get("fp8", NEVER)),
            bandwidth=one(device.memory_bandwidth_bytes_per_second or NEVER),
            matmul=one(
                device.achievable_fraction
                * constants.matmul_fraction
                * constants.kernel_fraction
            ),
            matmul_edge=one(constants.matmul_edge),
            unaligned_fraction=one(constants.unaligned_fraction),
            grouped_fraction=one(constants.grouped_fraction),
            fp8_fraction=one(constants.fp8_fraction),
            memory_fraction=one(constants.memory_fraction * constants.kernel_fraction),
            softmax_fraction=one(constants.softmax_fraction),
            attention_fraction=one(constants.attention_fraction),
            attention_backward=one(constants.attention_backward),
            memory_backward=one(constants.memory_backward),
            launch=one(device.launch_seconds if launch is None else launch),
            host_forward=one(hosted * constants.host_forward_seconds),
            host_backward=one(hosted * constants.host_backward_seconds),
            is_blocking=one(float(blocking)),
            is_fp8=one(float(casts is not None)),
            casts=_cast_table(casts),
        )

    @classmethod
    def stack(cls, figures: Sequence[Figures]) -> Figures:
        """Join the figures of several layers."""
        names = [each.name for each in fields(cls)]
        joined = {
            name: np.concatenate([getattr(one, name) for one in figures])
            for name in names
        }
        return cls(**joined)

    def at(self, layer: NDArray[np.intp]) -> Figures:
        """Return the figures of every operation, by the index of its layer."""
        if len(self.peak) == 1:
            return self
        names = [each.name for each in fields(self)]
        return Figures(**{name: getattr(self, name)[layer] for name in names})


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of every layer on the device, and kernels that the host launches."""

    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    forward_attention: Floats
    forward_kernels: Floats
    backward_kernels: Floats


def _of_kinds(names: Sequence[str]) -> Mask:
    """Return whether a kind of operation is one of some, by its place."""
    return np.array([kind in names for kind in _KINDS])


def _numbers(one: Operation) -> tuple[int, ...]:
    """Return the number of runs of an operation, and its sizes."""
    return one.count, one.flops, one.bytes, one.m, one.n, one.k, one.batch


def computed_gradients(operation: Operation) -> tuple[bool, bool]:
    """Return whether the backward computes the gradients of input and of weight."""
    has_input = operation.gradients in (None, "input")
    has_weight = operation.gradients in (None, "weight")
    return has_input, has_weight


def layer_seconds(operations: OperationArrays, figures: Figures) -> LayerSeconds:
    """Return the seconds of every layer: equations (C1) to (C3), (C7) and (C8)."""
    one = figures.at(operations.layer)
    ops = operations
    forward = kernel_seconds(ops, one)
    attention = kernel_seconds(
        ops, one, flops_factor=one.attention_backward, bytes_factor=2.0
    )
    memory = kernel_seconds(ops, one, bytes_factor=one.memory_backward)
    of_input = np.where(ops.is_attention, attention, memory)
    of_input = np.where(ops.is_product, forward, of_input)
    of_weight = np.where(ops.is_product, forward, 0.0)
    casted = 0.0 * forward
    of_phase: Sequence[Floats] = (casted, casted, casted)
    is_linear = ops.is_linear & (one.is_fp8 > 0)
    if is_linear.any():
        forward = np.where(is_linear, _fp8_seconds(ops, one, 0), forward)
        of_input = np.where(is_linear, _fp8_seconds(ops, one, 1), of_input)
        of_weight = np.where(is_linear, _fp8_seconds(ops, one, 2), of_weight)
        kernels = [one.casts[..., phase, 3] for phase in range(3)]
        of_phase = [np.where(is_linear, each, 0.0) for each in kernels]
    of_input = np.where(ops.has_input_gradient, of_input, 0.0)
    of_weight = np.where(ops.has_weight_gradient, of_weight, 0.0)
    launched = np.where(ops.has_input_gradient, 1 + of_phase[1], 0.0)
    launched += np.where(ops.has_weight_gradient, 1 + of_phase[2], 0.0)
    of_attention = np.where(ops.is_attention, forward, 0.0)
    return LayerSeconds(
        forward=ops.per_layer(ops.count * forward),
        backward_input=ops.per_layer(ops.count * of_input),
        backward_weight=ops.per_layer(ops.count * of_weight),
        forward_attention=ops.per_layer(ops.count * of_attention),
        forward_kernels=ops.per_layer(ops.count * (1 + of_phase[0])),
        backward_kernels=ops.per_layer(ops.count * launched),
    )


def kernel_seconds(
    ops: OperationArrays,
    figures: Figures,
    *,
    flops_factor: float | Floats = 1.0,
    bytes_factor: float | Floats = 1.0,
) -> Floats:
    """Return the seconds of one run of every operation: equation (C1).

    Args:
        ops: the operations.
        figures: one element per operation, or one for all.
        flops_factor: FLOPs relative to the forward's.
        bytes_factor: bytes relative to the forward's.
    """
    moving = ops.bytes * bytes_factor / (figures.bandwidth * figures.memory_fraction)
    rate = figures.peak * _matmul_fractions(ops, figures)
    rate = rate * np.where(
        ops.is_attention, figures.attention_fraction * _speeds(ops, figures), 1.0
    )
    computing = np.maximum(ops.flops * flops_factor / rate, moving)
    moving = np.where(ops.is_softmax, moving / figures.softmax_fraction, moving)
    is_computing = ops.is_product | ops.is_attention
    return np.where(is_computing, computing, moving) + figures.launch


def _speeds(ops: OperationArrays, figures: Figures) -> Floats:
    """Return the speed of attention kernels relative to FlashAttention-2."""
    is_hopper = figures.peak_fp8 < NEVER
    on_hopper = np.where(ops.speed <= 1, HOPPER_FLASH_2 * ops.speed, ops.speed)
    return np.where(is_hopper, on_hopper, np.minimum(ops.speed, 1.0))


def _matmul_fractions(ops: OperationArrays, figures: Figures) -> Floats:
    """Return the fraction of the peak that products reach: equation (K1)."""
    has_shape = (ops.m > 0) & ~ops.is_attention
    sizes = [np.maximum(size, 1.0) for size in (ops.m, ops.n, ops.k)]
    edge = figures.matmul_edge * sum(1 / size for size in sizes)
    fraction = figures.matmul / (1 + np.where(has_shape, edge, 0.0))
    fraction = np.where(ops.is_grouped, fraction * figures.grouped_fraction, fraction)
    is_slow = has_shape & ops.is_unaligned
    slow = np.where(is_slow, fraction * figures.unaligned_fraction, fraction)
    return np.asarray(slow)


def _fp8_seconds(ops: OperationArrays, figures: Figures, phase: int) -> Floats:
    """Return the seconds of linear layers in fp8: equations (C7) and (C8).

    Args:
        ops: the operations.
        figures: one element per operation, or one for all.
        phase: 0: forward, 1: gradient of the input, 2: gradient of the weight.
    """
    operands = (ops.m * ops.k, ops.n * ops.k, ops.m * ops.n)
    results = (operands[2], operands[0], operands[1])
    reached = figures.bandwidth * figures.memory_fraction
    rate = figures.peak_fp8 * _matmul_fractions(ops, figures) * figures.fp8_fraction
    moved = sum(operands) + results[phase]
    product = np.maximum(ops.flops / rate, moved * ops.batch / reached)
    casts = figures.casts[..., phase, :]
    cast_bytes = sum(casts[..., place] * each for place, each in enumerate(operands))
    casting = cast_bytes * ops.batch / reached + casts[..., 3] * figures.launch
    return np.asarray(product + figures.launch + casting)


def _cast_table(casts: Fp8Casts | None) -> Floats:
    """Return bytes per element and kernels of all casts, of shape (1, 3, 4)."""
    table = np.zeros((1, 3, 4))
    if casts is None:
        return table
    phases = (casts.forward, casts.backward_input, casts.backward_weight)
    operands = {"input": 0, "weight": 1, "gradient": 2}
    for phase, each in enumerate(phases):
        for cast in each:
            table[0, phase, operands[cast.operand]] += cast.bytes_per_element
            table[0, phase, 3] += cast.kernels
    return table


def smooth_maximum(device_seconds: Floats, host_seconds: Floats) -> Floats:
    """Return equation (K2): near the crossing, device and host wait for each other."""
    return np.asarray((device_seconds**4 + host_seconds**4) ** 0.25)


def _joined(device: Floats, host: Floats, figures: Figures) -> Floats:
    """Return the seconds of device and host together."""
    together = smooth_maximum(device, host)
    return np.where(figures.is_blocking > 0, device + host, together)


def with_host(device: LayerSeconds, figures: Figures) -> LayerSeconds:
    """Return the seconds with the host's floor: equations (C5) and (K2)."""
    forward = _joined(
        device.forward, figures.host_forward * device.forward_kernels, figures
    )
    backward = device.backward_input + device.backward_weight
    bounded = _joined(
        backward, figures.host_backward * device.backward_kernels, figures
    )
    slower = bounded / np.where(backward > 0, backward, 1.0)
    return LayerSeconds(
        forward=forward,
        backward_input=device.backward_input * slower,
        backward_weight=device.backward_weight * slower,
        forward_attention=device.forward_attention,
        forward_kernels=device.forward_kernels,
        backward_kernels=device.backward_kernels,
    )


def computation(
    row: Measurement,
    device: DeviceSpec,
    dtype: DataType,
    constants: Constants = DEFAULT,
    casts: Fp8Casts | None = None,
    *,
    graphs: bool = False,
    blocking: bool = False,
) -> Computation:
    """Return the seconds of a row on a device; measured seconds are used unchanged.

    Args:
        row: its operations name those in fp8 if `casts` are given.
        device: what runs it.
        dtype: of activations, and of products that are not in fp8.
        constants: fitted constants.
        casts: of the runtime, for precision fp8; None: no fp8.
        graphs: kernels are launched from CUDA graphs.
        blocking: the host waits for every kernel.
    """
    return computations(
        [row], device, dtype, constants, casts, graphs=graphs, blocking=blocking
    )[0]


def computations(
    rows: Sequence[Measurement],
    device: DeviceSpec,
    dtype: DataType,
    constants: Constants = DEFAULT,
    casts: Fp8Casts | None = None,
    *,
    graphs: bool = False,
    blocking: bool = False,
) -> list[Computation]:
    """Return the seconds of several rows on a device, as `computation` does of one."""
    by_curves = casts is None and has_curves(device.curves, dtype)
    found: dict[int, Computation] = {}
    counted: list[int] = []
    for place, row in enumerate(rows):
        if row.forward_seconds is not None and not is_priced(row):
            found[place] = _measured(row)
        elif row.operations and by_curves:
            found[place] = _by_curves(row, device, dtype)
        else:
            counted.append(place)
    if counted:
        figures = Figures.of(
            device, dtype, constants, casts, graphs=graphs, blocking=blocking
        )
        of_counted = _by_operations([rows[place] for place in counted], figures)
        found.update(zip(counted, of_counted, strict=True))
    return [found[place] for place in range(len(rows))]


def _measured(row: Measurement) -> Computation:
    """Return the measured seconds of a row."""
    return Computation(
        row.forward_seconds or 0.0,
        row.backward_input_seconds or 0.0,
        row.backward_weight_seconds or 0.0,
        row.recompute_seconds or 0.0,
    )


def _by_operations(rows: Sequence[Measurement], figures: Figures) -> list[Computation]:
    """Return the seconds of rows by their operations, or else by their FLOPs."""
    layers: list[Sequence[Operation]] = []
    for row in rows:
        layers.append(row.operations or (_whole_layer(row),))
        layers.append(row.recompute_operations)
    of_layers = layer_seconds(OperationArrays.of(layers), figures)
    seconds = with_host(of_layers, figures)
    found = []
    for place, row in enumerate(rows):
        forward = float(seconds.forward[2 * place])
        again = float(seconds.forward[2 * place + 1])
        of_input = float(seconds.backward_input[2 * place])
        of_weight = float(seconds.backward_weight[2 * place])
        if not row.operations:
            whole = row.forward_flops
            of_input *= row.backward_input_flops / whole if whole else 1.0
            of_weight *= row.backward_weight_flops / whole if whole else 1.0
        if not row.recompute_operations:
            share = float(row.recompute == "full")
            if row.forward_flops:
                share = row.recompute_flops / row.forward_flops
            again = forward * min(1.0, share)
        attention = float(seconds.forward_attention[2 * place])
        found.append(Computation(forward, of_input, of_weight, again, attention))
    return found


def _by_curves(row: Measurement, device: DeviceSpec, dtype: DataType) -> Computation:
    """Return the seconds of a row by the measured curves of its device."""
    assert device.curves is not None
    found = curve_seconds(row, device.curves, dtype)
    return Computation(
        forward_seconds=found.forward_seconds,
        backward_input_seconds=found.backward_input_seconds,
        backward_weight_seconds=found.backward_weight_seconds,
        recompute_seconds=found.recompute_seconds,
        forward_attention_seconds=found.forward_attention_seconds,
    )


def is_priced(row: Measurement) -> bool:
    """Return whether a row's seconds are prices of its counted operations."""
    return row.source == "counted" and bool(row.operations)


def _whole_layer(row: Measurement) -> Operation:
    """Return one product with the FLOPs and bytes of a row without operations."""
    return Operation(
        kind="matmul", count=1, flops=row.forward_flops, bytes=row.forward_bytes
    )


def price(profile: ModelProfile, device: DeviceSpec) -> ModelProfile:
    """Return the profile with this device's seconds in every counted row.

    Plans price the operations of such rows again, with the constants of their runtime.

    Raises:
        MismatchError: the device has no peak for the profile's data type, or for its
            precision.
    """
    if profile.dtype not in device.peak_flops_per_second:
        known = ", ".join(device.peak_flops_per_second)
        raise MismatchError(
            f"device {device.id!r} has no peak for {profile.dtype}.",
            field="device",
            hint=f"use one of its data types: {known}.",
        )
    if profile.precision == "fp8":
        check_fp8(device, field="device")
    priced: dict[tuple[int, bool], tuple[Measurement, ...]] = {}
    layers = []
    for layer in profile.layers:
        is_last = layer is profile.layers[-1]
        key = (id(layer.measurements), is_last)
        if key not in priced:
            priced[key] = tuple(
                _priced_row(row, device, profile, is_last=is_last)
                for row in layer.measurements
            )
        layers.append(
            LayerProfile.model_copy(layer, update={"measurements": priced[key]})
        )
    return profile.model_copy(update={"device": device.id, "layers": tuple(layers)})


def _priced_row(
    row: Measurement, device: DeviceSpec, profile: ModelProfile, *, is_last: bool
) -> Measurement:
    casts = runtimes.get(OURS).fp8 if profile.precision == "fp8" else None
    counted = row
    if casts is not None:
        counted = mark_fp8(row, profile.dtype, casts, is_last=is_last)
    seconds = computation(counted, device, profile.dtype, casts=casts)
    return row.model_copy(
        update={
            "forward_seconds": seconds.forward_seconds,
            "backward_input_seconds": seconds.backward_input_seconds,
            "backward_weight_seconds": seconds.backward_weight_seconds,
            "recompute_seconds": seconds.recompute_seconds,
        }
    )


def matmul_fraction(
    m: int, n: int, k: int, device: DeviceSpec, constants: Constants
) -> float:
    """Return the fraction of the peak that a product of this shape reaches: (K1)."""
    product = Operation(
        kind="matmul", count=1, flops=2 * m * n * k, bytes=0, m=m, n=n, k=k
    )
    arrays = OperationArrays.of([[product]])
    return float(_matmul_fractions(arrays, Figures.of(device, "bf16", constants))[0])


__all__ = [
    "ATTENTION",
    "PRODUCTS",
    "Computation",
    "Figures",
    "LayerSeconds",
    "OperationArrays",
    "computation",
    "computed_gradients",
    "is_priced",
    "kernel_seconds",
    "layer_seconds",
    "matmul_fraction",
    "price",
    "smooth_maximum",
    "with_host",
]
