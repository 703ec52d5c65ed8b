"""Seconds of one layer's computation: measured where the profile has them, else a roofline per operation.

Williams, Waterman, Patterson, "Roofline" (CACM 2009), with a floor per kernel:

    (C1)  t(op) = max(flops / (peak * e), bytes / (bandwidth * E_MEMORY)) + launch           -> operation_seconds()
          e = achievable fraction of the device (x E_ATTENTION for fused attention)
    (C2)  forward = sum over operations of count * t(op)                                     -> forward_seconds()
    (C3)  a matrix product's backward is two products of the same size: one for the input, one for the weight;
          fused attention's backward does 2.5 times the forward's FLOPs (Dao, FlashAttention-2, section 3.1) and counts
          as input gradient; a memory-bound operation reads the saved tensor besides the gradient -> backward_seconds()
    (C4)  recompute = the forward again, by its share of FLOPs                               -> computation()
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import MismatchError
from planner.spec.cluster import DeviceSpec
from planner.spec.profile import DataType, LayerProfile, Measurement, ModelProfile, Operation

E_MEMORY = 0.85
"""Fraction of the data-sheet memory bandwidth that streaming kernels reach."""
E_ATTENTION = 0.6
"""Fused attention against a large matrix product."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of fused attention's backward / forward."""
MEMORY_BACKWARD = 1.5
"""Bytes of a memory-bound operation's backward / forward: gradient in and out, saved tensor in."""


@dataclass(frozen=True, slots=True)
class Computation:
    """Seconds of one layer and micro-batch on one rank, communication apart."""

    forward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    recompute_seconds: float


def operation_seconds(
    operation: Operation, device: DeviceSpec, dtype: DataType, *, flops_factor: float = 1.0, bytes_factor: float = 1.0
) -> float:
    """Seconds of one run of the operation: equation (C1)."""
    bandwidth = (device.memory_bandwidth_bytes_per_second or float("inf")) * E_MEMORY
    moving = operation.bytes * bytes_factor / bandwidth
    if operation.kind == "memory":
        return moving + device.launch_seconds
    efficiency = device.achievable_fraction * (E_ATTENTION if operation.kind == "attention" else 1.0)
    computing = operation.flops * flops_factor / (device.peak_flops_per_second[dtype] * efficiency)
    return max(computing, moving) + device.launch_seconds


def forward_seconds(operations: tuple[Operation, ...], device: DeviceSpec, dtype: DataType) -> float:
    """Equation (C2)."""
    return sum(operation.count * operation_seconds(operation, device, dtype) for operation in operations)


def backward_seconds(operations: tuple[Operation, ...], device: DeviceSpec, dtype: DataType) -> tuple[float, float]:
    """Input-gradient and weight-gradient seconds: equation (C3)."""
    of_input = of_weight = 0.0
    for operation in operations:
        if operation.kind in ("matmul", "convolution"):
            once = operation.count * operation_seconds(operation, device, dtype)
            of_input += once
            of_weight += once
        elif operation.kind == "attention":
            of_input += operation.count * operation_seconds(
                operation, device, dtype, flops_factor=ATTENTION_BACKWARD, bytes_factor=2.0
            )
        else:
            of_input += operation.count * operation_seconds(operation, device, dtype, bytes_factor=MEMORY_BACKWARD)
    return of_input, of_weight


def computation(row: Measurement, device: DeviceSpec, dtype: DataType) -> Computation:
    """Seconds of a measurement row on a device; measured or already priced seconds stand as they are."""
    if row.forward_seconds is not None:
        return Computation(
            row.forward_seconds,
            row.backward_input_seconds or 0.0,
            row.backward_weight_seconds or 0.0,
            row.recompute_seconds or 0.0,
        )
    operations = row.operations or (_whole_layer(row),)
    forward = forward_seconds(operations, device, dtype)
    of_input, of_weight = backward_seconds(operations, device, dtype)
    share = row.recompute_flops / row.forward_flops if row.forward_flops else float(row.recompute == "full")
    if not row.operations:
        of_input *= row.backward_input_flops / row.forward_flops if row.forward_flops else 1.0
        of_weight *= row.backward_weight_flops / row.forward_flops if row.forward_flops else 1.0
    return Computation(forward, of_input, of_weight, forward * min(1.0, share))


def _whole_layer(row: Measurement) -> Operation:
    """A row without operations is priced as one matrix product of its FLOPs and bytes."""
    return Operation(kind="matmul", count=1, flops=row.forward_flops, bytes=row.forward_bytes)


def price(profile: ModelProfile, device: DeviceSpec) -> ModelProfile:
    """The same profile with this device's roofline seconds in every counted row (``source`` stays ``counted``).

    Raises:
        MismatchError: the device has no peak for the profile's data type.
    """
    if profile.dtype not in device.peak_flops_per_second:
        raise MismatchError(
            f"device {device.id!r} has no peak for {profile.dtype}.",
            field="device",
            mend=f"use one of its data types: {', '.join(device.peak_flops_per_second)}.",
        )
    priced: dict[int, tuple[Measurement, ...]] = {}
    layers = []
    for layer in profile.layers:
        key = id(layer.measurements)
        if key not in priced:
            priced[key] = tuple(_priced_row(row, device, profile.dtype) for row in layer.measurements)
        layers.append(LayerProfile.model_copy(layer, update={"measurements": priced[key]}))
    return profile.model_copy(update={"device": device.id, "layers": tuple(layers)})


def _priced_row(row: Measurement, device: DeviceSpec, dtype: DataType) -> Measurement:
    seconds = computation(row, device, dtype)
    return row.model_copy(
        update={
            "forward_seconds": seconds.forward_seconds,
            "backward_input_seconds": seconds.backward_input_seconds,
            "backward_weight_seconds": seconds.backward_weight_seconds,
            "recompute_seconds": seconds.recompute_seconds,
        }
    )
