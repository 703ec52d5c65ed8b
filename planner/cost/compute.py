"""Seconds of one layer's computation: measured where the profile has them, else a roofline per operation.

Williams, Waterman, Patterson, "Roofline" (CACM 2009), with a floor per kernel:

    (C1)  t(op) = max(flops / (peak * e), bytes / (bandwidth * memory fraction)) + launch   -> operation_seconds()
          e = matmul fraction by shape (K1), x attention fraction for fused attention, x its version's speed
    (C2)  forward = sum over operations of count * t(op)                                     -> forward_seconds()
    (C3)  a matrix product's backward is two products of the same size: one for the input, one for the weight;
          fused attention's backward does 2.5 times the forward's FLOPs (Dao, FlashAttention-2, section 3.1) and counts
          as input gradient; a memory-bound operation reads the saved tensor besides the gradient -> backward_seconds()
    (C4)  recompute = the operations that run again; else the forward again, by its share of FLOPs -> computation()
    (C5)  no layer is faster than the host launches its kernels: equation (K2)              -> with_host()
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import MismatchError
from planner.spec.calibration import DEFAULT, Constants
from planner.spec.cluster import DeviceSpec
from planner.spec.profile import DataType, LayerProfile, Measurement, ModelProfile, Operation

ATTENTION: dict[str, float] = {"attention": 1.0, "attention-1": 0.5, "attention-3": 1.75}
"""Kinds of fused attention, and their speed against FlashAttention-2: "around 2x" the first's (Dao 2023, abstract); the
third is "1.5-2.0x" as fast on Hopper (Shah et al. 2024, abstract)."""


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
    launch = device.launch_seconds if constants.kernel_seconds is None else constants.kernel_seconds
    bandwidth = (device.memory_bandwidth_bytes_per_second or float("inf")) * constants.memory_fraction
    moving = operation.bytes * bytes_factor / bandwidth
    if operation.kind == "memory":
        return moving + launch
    if operation.kind == "softmax":
        return moving / constants.softmax_fraction + launch
    reached = device.peak_flops_per_second[dtype] * matmul_fraction(operation, device, constants)
    if operation.kind in ATTENTION:
        reached *= constants.attention_fraction * ATTENTION[operation.kind]
    return max(operation.flops * flops_factor / reached, moving) + launch


def matmul_fraction(operation: Operation, device: DeviceSpec, constants: Constants) -> float:
    """What a product of this shape reaches of the peak: equation (K1)."""
    largest = device.achievable_fraction * constants.matmul_fraction
    if not operation.m or operation.kind in ATTENTION:
        return largest
    if operation.n % 2 or operation.k % 2:
        largest *= constants.unaligned_fraction
    return largest / (1 + constants.matmul_edge * (1 / operation.m + 1 / operation.n + 1 / operation.k))


def forward_seconds(
    operations: tuple[Operation, ...], device: DeviceSpec, dtype: DataType, constants: Constants = DEFAULT
) -> float:
    """Equation (C2)."""
    return sum(operation.count * operation_seconds(operation, device, dtype, constants) for operation in operations)


def backward_seconds(
    operations: tuple[Operation, ...], device: DeviceSpec, dtype: DataType, constants: Constants = DEFAULT
) -> tuple[float, float]:
    """Input-gradient and weight-gradient seconds: equation (C3)."""
    of_input = of_weight = 0.0
    for operation in operations:
        if operation.kind in ("matmul", "convolution"):
            once = operation.count * operation_seconds(operation, device, dtype, constants)
            of_input += once
            of_weight += once
        elif operation.kind in ATTENTION:
            of_input += operation.count * operation_seconds(
                operation, device, dtype, constants, flops_factor=constants.attention_backward, bytes_factor=2.0
            )
        else:
            of_input += operation.count * operation_seconds(
                operation, device, dtype, constants, bytes_factor=constants.memory_backward
            )
    return of_input, of_weight


def computation(row: Measurement, device: DeviceSpec, dtype: DataType, constants: Constants = DEFAULT) -> Computation:
    """Seconds of a measurement row on a device; measured or already priced seconds stand as they are."""
    if row.forward_seconds is not None:
        return Computation(
            row.forward_seconds,
            row.backward_input_seconds or 0.0,
            row.backward_weight_seconds or 0.0,
            row.recompute_seconds or 0.0,
        )
    operations = row.operations or (_whole_layer(row),)
    forward = forward_seconds(operations, device, dtype, constants)
    of_input, of_weight = backward_seconds(operations, device, dtype, constants)
    if not row.operations:
        of_input *= row.backward_input_flops / row.forward_flops if row.forward_flops else 1.0
        of_weight *= row.backward_weight_flops / row.forward_flops if row.forward_flops else 1.0
    if row.recompute_operations:
        again = forward_seconds(row.recompute_operations, device, dtype, constants)
    else:
        share = row.recompute_flops / row.forward_flops if row.forward_flops else float(row.recompute == "full")
        again = forward * min(1.0, share)
    return with_host(row, Computation(forward, of_input, of_weight, again), constants)


def with_host(row: Measurement, device: Computation, constants: Constants) -> Computation:
    """The host's floor under the device's seconds: equations (C5) and (K2)."""
    if constants.host_forward_seconds == constants.host_backward_seconds == 0:
        return device
    forward = constants.host_forward_seconds * sum(operation.count for operation in row.operations)
    again = constants.host_forward_seconds * sum(operation.count for operation in row.recompute_operations)
    products = sum(operation.count for operation in row.operations if operation.kind in ("matmul", "convolution"))
    backward = constants.host_backward_seconds * (sum(operation.count for operation in row.operations) + products)
    of_device = device.backward_input_seconds + device.backward_weight_seconds
    slower = _higher(of_device, backward) / of_device if of_device else 1.0
    return Computation(
        forward_seconds=_higher(device.forward_seconds, forward),
        backward_input_seconds=device.backward_input_seconds * slower,
        backward_weight_seconds=device.backward_weight_seconds * slower,
        recompute_seconds=_higher(device.recompute_seconds, again),
    )


def _higher(device_seconds: float, host_seconds: float) -> float:
    """A smooth maximum: near the crossing both wait for each other now and then."""
    return float((device_seconds**4 + host_seconds**4) ** 0.25)


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
