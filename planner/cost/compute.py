"""Seconds of one layer's computation: measured where the profile has them, else a roofline per operation.

Williams, Waterman, Patterson, "Roofline" (CACM 2009), with a floor per kernel:

    (C1)  t(op) = max(flops / (peak * e), bytes / (bandwidth * memory fraction)) + launch   -> operation_seconds()
          e = matmul fraction by shape (K1), x attention fraction for fused attention, x its version's speed
    (C2)  forward = sum over operations of count * t(op)                                     -> forward_seconds()
    (C3)  a matrix product's backward is two products of the same size: one for the input, one for the weight;
          fused attention's backward does 2.5 times the forward's FLOPs (Dao, FlashAttention-2, section 3.1) and counts
          as input gradient; a memory-bound operation reads the saved tensor besides the gradient -> backward_seconds()
    (C4)  recompute = the operations that run again; else the forward again, by its share of FLOPs -> computation()
          where parameters are frozen, `Operation.gradients` tells which of the two products there are, or that a kernel
          has no backward at all: autograd goes only where something trained is
    (C5)  no layer is faster than the host launches its kernels: equation (K2)              -> with_host()

Precision fp8 prices the products of linear layers as `planner.cost.fp8` says, equations (C6) to (C9).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost.fp8 import (
    cast_seconds,
    check_fp8,
    kernels_of,
    product_seconds,
    reached_fp8,
    told_fp8,
)
from planner.errors import MismatchError
from planner.spec.calibration import DEFAULT, OURS, Constants
from planner.spec.cluster import DeviceSpec
from planner.spec.fp8 import Cast, Fp8Casts, Operand
from planner.spec.frameworks import find_framework
from planner.spec.profile import (
    DataType,
    LayerProfile,
    Measurement,
    ModelProfile,
    Operation,
)

ATTENTION: dict[str, float] = {
    "attention": 1.0,
    "attention-1": 0.5,
    "attention-3": 1.75,
}
"""Kinds of fused attention, and their speed against FlashAttention-2: "around 2x" the first's (Dao 2023, abstract); the
third is "1.5-2.0x" as fast on Hopper (Shah et al. 2024, abstract)."""


PRODUCTS = ("matmul", "convolution")
"""Kinds of operations with two gradients."""


@dataclass(frozen=True, slots=True)
class Computation:
    """Seconds of one layer and micro-batch on one rank, communication apart."""

    forward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    recompute_seconds: float


def operation_seconds(
    operation: Operation,
    device: DeviceSpec,
    dtype: DataType,
    constants: Constants = DEFAULT,
    *,
    flops_factor: float = 1.0,
    bytes_factor: float = 1.0,
) -> float:
    """Seconds of one run of the operation: equation (C1)."""
    launch, bandwidth = (
        launch_seconds(device, constants),
        reached_bandwidth(device, constants),
    )
    moving = operation.bytes * bytes_factor / bandwidth
    if operation.kind == "memory":
        return moving + launch
    if operation.kind == "softmax":
        return moving / constants.softmax_fraction + launch
    reached = device.peak_flops_per_second[dtype] * matmul_fraction(
        operation, device, constants
    )
    if operation.kind in ATTENTION:
        reached *= constants.attention_fraction * ATTENTION[operation.kind]
    return max(operation.flops * flops_factor / reached, moving) + launch


def launch_seconds(device: DeviceSpec, constants: Constants) -> float:
    """Fixed time of one kernel."""
    return (
        device.launch_seconds
        if constants.kernel_seconds is None
        else constants.kernel_seconds
    )


def reached_bandwidth(device: DeviceSpec, constants: Constants) -> float:
    """Bytes per second that streaming kernels reach; without end where nobody tells the device's."""
    return (
        device.memory_bandwidth_bytes_per_second or float("inf")
    ) * constants.memory_fraction


def linear_seconds(
    operation: Operation, device: DeviceSpec, constants: Constants, casts: Fp8Casts
) -> tuple[float, float, float]:
    """Seconds of one linear layer in fp8: forward, input gradient, weight gradient; equations (C7) and (C8)."""
    launch, bandwidth = (
        launch_seconds(device, constants),
        reached_bandwidth(device, constants),
    )
    reached = reached_fp8(
        device, constants, matmul_fraction(operation, device, constants)
    )

    def once(result: Operand, cast: tuple[Cast, ...]) -> float:
        product = product_seconds(operation, result, reached, bandwidth)
        return product + launch + cast_seconds(operation, cast, bandwidth, launch)

    forward = once("gradient", casts.forward)
    return (
        forward,
        once("input", casts.backward_input),
        once("weight", casts.backward_weight),
    )


def matmul_fraction(
    operation: Operation, device: DeviceSpec, constants: Constants
) -> float:
    """What a product of this shape reaches of the peak: equation (K1)."""
    largest = device.achievable_fraction * constants.matmul_fraction
    if not operation.m or operation.kind in ATTENTION:
        return largest
    if operation.n % 2 or operation.k % 2:
        largest *= constants.unaligned_fraction
    return largest / (
        1
        + constants.matmul_edge * (1 / operation.m + 1 / operation.n + 1 / operation.k)
    )


def forward_seconds(
    operations: tuple[Operation, ...],
    device: DeviceSpec,
    dtype: DataType,
    constants: Constants = DEFAULT,
    casts: Fp8Casts | None = None,
) -> float:
    """Equation (C2). With `casts`, linear layers are in fp8."""
    return sum(
        operation.count
        * (
            linear_seconds(operation, device, constants, casts)[0]
            if casts and operation.is_linear
            else operation_seconds(operation, device, dtype, constants)
        )
        for operation in operations
    )


def backward_seconds(
    operations: tuple[Operation, ...],
    device: DeviceSpec,
    dtype: DataType,
    constants: Constants = DEFAULT,
    casts: Fp8Casts | None = None,
) -> tuple[float, float]:
    """Input-gradient and weight-gradient seconds: equation (C3). With `casts`, linear layers are in fp8."""
    of_input = of_weight = 0.0
    for operation in operations:
        has_input, has_weight = computed_gradients(operation)
        if operation.gradients == "none":
            continue
        if casts and operation.is_linear:
            _, input_once, weight_once = linear_seconds(
                operation, device, constants, casts
            )
            of_input += has_input * operation.count * input_once
            of_weight += has_weight * operation.count * weight_once
        elif operation.kind in PRODUCTS:
            once = operation.count * operation_seconds(
                operation, device, dtype, constants
            )
            of_input += has_input * once
            of_weight += has_weight * once
        elif operation.kind in ATTENTION:
            of_input += operation.count * operation_seconds(
                operation,
                device,
                dtype,
                constants,
                flops_factor=constants.attention_backward,
                bytes_factor=2.0,
            )
        else:
            of_input += operation.count * operation_seconds(
                operation,
                device,
                dtype,
                constants,
                bytes_factor=constants.memory_backward,
            )
    return of_input, of_weight


def computed_gradients(operation: Operation) -> tuple[bool, bool]:
    """Does the backward compute the gradient of a product's input, and of its weight?"""
    return operation.gradients in (None, "input"), operation.gradients in (
        None,
        "weight",
    )


def computation(
    row: Measurement,
    device: DeviceSpec,
    dtype: DataType,
    constants: Constants = DEFAULT,
    casts: Fp8Casts | None = None,
) -> Computation:
    """Seconds of a measurement row on a device; measured or already priced seconds stand as they are.

    Args:
        row: its operations tell which are in fp8, where `casts` are given (`planner.cost.fp8.in_fp8`).
        device: what runs it.
        dtype: of activations, and of products but for those in fp8.
        constants: fitted ones.
        casts: of the framework, for precision fp8; None: no fp8.
    """
    if row.forward_seconds is not None:
        return Computation(
            row.forward_seconds,
            row.backward_input_seconds or 0.0,
            row.backward_weight_seconds or 0.0,
            row.recompute_seconds or 0.0,
        )
    operations = row.operations or (_whole_layer(row),)
    forward = forward_seconds(operations, device, dtype, constants, casts)
    of_input, of_weight = backward_seconds(operations, device, dtype, constants, casts)
    if not row.operations:
        of_input *= (
            row.backward_input_flops / row.forward_flops if row.forward_flops else 1.0
        )
        of_weight *= (
            row.backward_weight_flops / row.forward_flops if row.forward_flops else 1.0
        )
    if row.recompute_operations:
        again = forward_seconds(
            row.recompute_operations, device, dtype, constants, casts
        )
    else:
        share = (
            row.recompute_flops / row.forward_flops
            if row.forward_flops
            else float(row.recompute == "full")
        )
        again = forward * min(1.0, share)
    return with_host(
        row, Computation(forward, of_input, of_weight, again), constants, casts
    )


def with_host(
    row: Measurement,
    device: Computation,
    constants: Constants,
    casts: Fp8Casts | None = None,
) -> Computation:
    """The host's floor under the device's seconds: equations (C5) and (K2)."""
    if constants.host_forward_seconds == constants.host_backward_seconds == 0:
        return device
    cast_forward = kernels_of(casts)[0] if casts else 0
    forward = constants.host_forward_seconds * _launched(row.operations, cast_forward)
    again = constants.host_forward_seconds * _launched(
        row.recompute_operations, cast_forward
    )
    backward = constants.host_backward_seconds * sum(
        _launched_backward(one, casts) for one in row.operations
    )
    of_device = device.backward_input_seconds + device.backward_weight_seconds
    slower = _higher(of_device, backward) / of_device if of_device else 1.0
    return Computation(
        forward_seconds=_higher(device.forward_seconds, forward),
        backward_input_seconds=device.backward_input_seconds * slower,
        backward_weight_seconds=device.backward_weight_seconds * slower,
        recompute_seconds=_higher(device.recompute_seconds, again),
    )


def _launched(operations: tuple[Operation, ...], casting: int) -> int:
    """Kernels of these operations, with `casting` more for each linear layer in fp8."""
    casted = (
        sum(operation.count for operation in operations if operation.is_linear)
        if casting
        else 0
    )
    return sum(operation.count for operation in operations) + casting * casted


def _launched_backward(one: Operation, casts: Fp8Casts | None) -> int:
    """Kernels of an operation's backward, with those that cast for a linear layer in fp8."""
    has_input, has_weight = computed_gradients(one)
    if one.kind not in PRODUCTS:
        has_input, has_weight = has_input or has_weight, False
    kernels = has_input + has_weight
    if casts and one.is_linear:
        _, of_input, of_weight = kernels_of(casts)
        kernels += has_input * of_input + has_weight * of_weight
    return one.count * kernels


def _higher(device_seconds: float, host_seconds: float) -> float:
    """A smooth maximum: near the crossing both wait for each other now and then."""
    return float((device_seconds**4 + host_seconds**4) ** 0.25)


def _whole_layer(row: Measurement) -> Operation:
    """A row without operations is priced as one matrix product of its FLOPs and bytes."""
    return Operation(
        kind="matmul", count=1, flops=row.forward_flops, bytes=row.forward_bytes
    )


def price(profile: ModelProfile, device: DeviceSpec) -> ModelProfile:
    """The same profile with this device's roofline seconds in every counted row (``source`` stays ``counted``).

    Raises:
        MismatchError: the device has no peak for the profile's data type, or for its precision.
    """
    if profile.dtype not in device.peak_flops_per_second:
        raise MismatchError(
            f"device {device.id!r} has no peak for {profile.dtype}.",
            field="device",
            hint=f"use one of its data types: {', '.join(device.peak_flops_per_second)}.",
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
    casts = find_framework(OURS).fp8 if profile.precision == "fp8" else None
    told = told_fp8(row, profile.dtype, casts, is_last=is_last) if casts else row
    seconds = computation(told, device, profile.dtype, casts=casts)
    return row.model_copy(
        update={
            "forward_seconds": seconds.forward_seconds,
            "backward_input_seconds": seconds.backward_input_seconds,
            "backward_weight_seconds": seconds.backward_weight_seconds,
            "recompute_seconds": seconds.recompute_seconds,
        }
    )
