"""Seconds of kernels and collectives, written down again from the documented equations.

Kernels: the roofline (Williams, Waterman, Patterson 2009), equations (C1) to (C4) of the cost model's documentation,
(C7) and (C8) for linear layers in fp8, and (Q3) for sequences that are cut into chunks.
Collectives: the ring in the latency-bandwidth model (Patarasuk, Yuan 2009), equations (L1) to (L5); over nodes,
first inside each node and then between them.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.spec.calibration import Constants
from planner.spec.cluster import DeviceSpec, Link
from planner.spec.fp8 import Cast, Fp8Casts
from planner.spec.profile import BYTES_PER_ELEMENT, DataType, Measurement, Operation
from planner.validate.communicators import Spread
from planner.validate.curves import curve_seconds

ATTENTION_BACKWARD_BYTES = 2.0
FUSED_ATTENTION = {"attention-1": 1 / 2, "attention": 1.0, "attention-3": 7 / 4}
"""Speed of each version of FlashAttention against the second."""
SMOOTHNESS = 4
"""Exponent of equation (K2)."""


class LayerSeconds(NamedTuple):
    """Computation of one layer and micro-batch."""

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float


class Machine(NamedTuple):
    """What prices kernels."""

    device: DeviceSpec
    dtype: DataType
    constants: Constants
    casts: Fp8Casts | None = None
    """Of an fp8 job."""

    @property
    def launch(self) -> float:
        """Seconds of starting a kernel."""
        fitted = self.constants.kernel_seconds
        return self.device.launch_seconds if fitted is None else fitted

    def moving(self, size_bytes: float) -> float:
        """Seconds of reading and writing so many bytes."""
        bandwidth = self.device.memory_bandwidth_bytes_per_second
        return (
            size_bytes / (bandwidth * self.constants.memory_fraction)
            if bandwidth
            else 0.0
        )


def layer_seconds(row: Measurement, machine: Machine) -> LayerSeconds:
    """Measured seconds as they stand, else the roofline of every operation over the host's floor."""
    if row.forward_seconds is not None:
        rest = (
            row.backward_input_seconds,
            row.backward_weight_seconds,
            row.recompute_seconds,
        )
        return LayerSeconds(row.forward_seconds, *(seconds or 0.0 for seconds in rest))
    if machine.casts is None and machine.device.curves is not None:
        by_curves = curve_seconds(row, machine.device.curves, machine.dtype)
        if by_curves is not None:
            return LayerSeconds(*by_curves)
    if row.operations:
        parts = [_operation_seconds(operation, machine) for operation in row.operations]
        forward, of_input, of_weight = (
            sum(column) for column in zip(*parts, strict=True)
        )
    else:
        forward, of_input, of_weight = _as_one_product(row, machine)
    if row.recompute_operations:
        again = sum(
            _operation_seconds(one, machine)[0] for one in row.recompute_operations
        )
    elif row.forward_flops:
        again = forward * min(1.0, row.recompute_flops / row.forward_flops)
    else:
        again = forward if row.recompute == "full" else 0.0
    return _over_host(row, LayerSeconds(forward, of_input, of_weight, again), machine)


def chunked_seconds(row: Measurement, machine: Machine, chunks: int) -> LayerSeconds:
    """Of a micro-batch that goes through in sequence chunks: equation (Q3). Every kernel runs once for each, with all
    of a product's weights; what was measured grows as the roofline says."""
    whole = layer_seconds(row, machine)
    peaks = machine.device.peak_flops_per_second
    is_priced = machine.dtype in peaks and (machine.casts is None or "fp8" in peaks)
    if chunks == 1 or not row.operations or not is_priced:
        return whole
    unmeasured = row.model_copy(update={"forward_seconds": None})
    shorter = {
        name: tuple(
            _shortened(one, chunks, BYTES_PER_ELEMENT[machine.dtype])
            for one in getattr(row, name)
        )
        for name in ("operations", "recompute_operations")
    }
    roofs = (
        layer_seconds(unmeasured, machine),
        layer_seconds(unmeasured.model_copy(update=shorter), machine),
    )
    grown = zip(whole, *roofs, strict=True)
    return LayerSeconds(
        *(
            told * (chunks * piece / roof) if roof else told
            for told, roof, piece in grown
        )
    )


def _shortened(one: Operation, chunks: int, element_bytes: int) -> Operation:
    weights = 0
    if one.kind == "matmul" and one.m:
        rows_bytes = one.batch * (one.m * one.k + one.m * one.n) * element_bytes
        weights = max(0, one.bytes - rows_bytes)
    return one.model_copy(
        update={
            "m": one.m / chunks,
            "flops": one.flops / chunks,
            "bytes": weights + (one.bytes - weights) / chunks,
        }
    )


def _over_host(
    row: Measurement, device: LayerSeconds, machine: Machine
) -> LayerSeconds:
    """Equation (K2): kernels that the host launches, by its seconds for each; casts are kernels too."""
    constants = machine.constants
    if not constants.host_forward_seconds and not constants.host_backward_seconds:
        return device
    launched = sum(one.count for one in row.operations)
    again = sum(one.count for one in row.recompute_operations)
    if machine.casts is not None:
        first = sum(cast.kernels for cast in machine.casts.forward)
        again += first * sum(
            one.count for one in row.recompute_operations if one.is_linear
        )
        launched += first * sum(one.count for one in row.operations if one.is_linear)
    backward, back = device.backward_input + device.backward_weight, 0
    for one in row.operations:
        back += one.count * len(_gradients_of(one))
        if machine.casts is not None and one.is_linear:
            casts = dict(
                zip(("input", "weight"), _passes(machine.casts)[1:], strict=True)
            )
            back += one.count * sum(
                cast.kernels for each in _gradients_of(one) for cast in casts[each]
            )
    floor = _norm(backward, back * constants.host_backward_seconds)
    slower = floor / backward if backward else 1.0
    return LayerSeconds(
        _norm(device.forward, launched * constants.host_forward_seconds),
        device.backward_input * slower,
        device.backward_weight * slower,
        _norm(device.recompute, again * constants.host_forward_seconds),
    )


def _gradients_of(one: Operation) -> tuple[str, ...]:
    """What the backward computes of an operation: a product's input and weight gradient, or those that are left of
    them; one of any other."""
    if one.gradients is not None:
        return () if one.gradients == "none" else (one.gradients,)
    return ("input", "weight") if one.kind in ("matmul", "convolution") else ("input",)


def _norm(first: float, second: float) -> float:
    return float((first**SMOOTHNESS + second**SMOOTHNESS) ** (1 / SMOOTHNESS))


def _operation_seconds(one: Operation, machine: Machine) -> tuple[float, float, float]:
    """(forward, input gradient, weight gradient) of all runs of an operation: equations (C1) to (C3). Gradients that
    nobody trained asks for take no time."""
    forward, of_input, of_weight = _trained_seconds(one, machine)
    if one.gradients is None:
        return forward, of_input, of_weight
    return (
        forward,
        of_input if one.gradients == "input" else 0.0,
        of_weight if one.gradients == "weight" else 0.0,
    )


def _trained_seconds(one: Operation, machine: Machine) -> tuple[float, float, float]:
    """Where all is trained."""
    constants = machine.constants
    if machine.casts is not None and one.is_linear:
        return _low_precision_seconds(one, machine, machine.casts)
    forward = one.count * _kernel(one, machine, 1.0, 1.0)
    if one.kind in ("matmul", "convolution"):
        return forward, forward, forward
    if one.kind in FUSED_ATTENTION:
        backward = _kernel(
            one, machine, constants.attention_backward, ATTENTION_BACKWARD_BYTES
        )
        return forward, one.count * backward, 0.0
    return (
        forward,
        one.count * _kernel(one, machine, 0.0, constants.memory_backward),
        0.0,
    )


def _kernel(one: Operation, machine: Machine, flops: float, size: float) -> float:
    """The slower of computing and moving, and the launch: equation (C1)."""
    moving, constants = machine.moving(one.bytes * size), machine.constants
    if one.kind in ("memory", "softmax"):
        return (
            moving / (constants.softmax_fraction if one.kind == "softmax" else 1.0)
            + machine.launch
        )
    peak = machine.device.peak_flops_per_second[machine.dtype]
    return (
        max(one.flops * flops / (peak * _efficiency(one, machine)), moving)
        + machine.launch
    )


def _efficiency(one: Operation, machine: Machine) -> float:
    """Of the peak: equation (K1)."""
    constants = machine.constants
    efficiency = machine.device.achievable_fraction * constants.matmul_fraction
    if one.kind in FUSED_ATTENTION:
        efficiency *= constants.attention_fraction * FUSED_ATTENTION[one.kind]
    elif one.m:
        efficiency *= constants.unaligned_fraction if one.n % 2 or one.k % 2 else 1.0
        efficiency /= 1 + constants.matmul_edge * (1 / one.m + 1 / one.n + 1 / one.k)
    return efficiency


def _passes(casts: Fp8Casts) -> tuple[tuple[Cast, ...], ...]:
    return casts.forward, casts.backward_input, casts.backward_weight


def _low_precision_seconds(
    one: Operation, machine: Machine, casts: Fp8Casts
) -> tuple[float, float, float]:
    """A linear layer in fp8, pass by pass: each product writes another of the three tensors, in two bytes, and reads
    the others in one, (C7); what is cast for it moves its bytes, (C8)."""
    size = {"input": one.m * one.k, "weight": one.k * one.n, "gradient": one.m * one.n}
    rate = (
        machine.device.peak_flops_per_second["fp8"]
        * machine.constants.fp8_fraction
        * _efficiency(one, machine)
    )
    passes = []
    for written, cast in zip(
        ("gradient", "input", "weight"), _passes(casts), strict=True
    ):
        product = max(
            one.flops / rate, machine.moving(sum(size.values()) + size[written])
        )
        moved = sum(size[each.operand] * each.bytes_per_element for each in cast)
        kernels = 1 + sum(each.kernels for each in cast)
        passes.append(
            one.count * (product + machine.moving(moved) + kernels * machine.launch)
        )
    forward, of_input, of_weight = passes
    return forward, of_input, of_weight


def _as_one_product(row: Measurement, machine: Machine) -> tuple[float, float, float]:
    """A row without operations counts as one matrix product; its backward scales with its FLOPs."""
    whole = Operation(
        kind="matmul", count=1, flops=row.forward_flops, bytes=row.forward_bytes
    )
    forward = _kernel(whole, machine, 1.0, 1.0)
    if not row.forward_flops:
        return forward, forward, forward
    of_input = forward * (row.backward_input_flops / row.forward_flops)
    return forward, of_input, forward * (row.backward_weight_flops / row.forward_flops)


def send_seconds(size_bytes: float, link: Link) -> float:
    """One message: equation (L4)."""
    return link.latency_seconds + size_bytes / link.bandwidth_bytes_per_second


def collective_seconds(
    operation: str,
    size_bytes: float,
    spread: Spread,
    intra: Link,
    inter: Link,
    *,
    copies: float = 0.0,
    rails: float = 1.0,
    latency: bool = True,
) -> float:
    """One collective on a tensor of this full size; `copies` are a ring's steps inside a node that no link sees,
    `rails` the part of a node's further network adapters that a group drives; `latency` False leaves the hops' fixed
    costs out."""
    if spread.ranks == 1 or size_bytes == 0:
        return 0.0
    if operation == "broadcast":
        return send_seconds(size_bytes, intra if spread.nodes == 1 else inter)
    if operation == "all_to_all":
        return _all_to_all(size_bytes, spread, intra, inter, latency)
    rounds = 2 if operation == "all_reduce" else 1
    if spread.nodes == 1:
        ring = _ring(size_bytes, spread.ranks, intra, rounds, copies, latency)
        fraction = intra.switch_reduction
        if operation != "all_reduce" or fraction is None or spread.ranks <= 2:
            return ring
        sent = size_bytes + size_bytes / spread.ranks
        fixed = 25e-6 if latency else 0.0
        return min(ring, fixed + sent / fraction / intra.bandwidth_bytes_per_second)
    inside = _ring(size_bytes, spread.fullest, intra, rounds, rounds * copies, latency)
    adapters = (1 - rails) + rails * spread.fewest
    return inside + _ring(
        size_bytes / adapters, spread.nodes, inter, rounds, 0.0, latency
    )


def _all_to_all(
    size_bytes: float, spread: Spread, intra: Link, inter: Link, latency: bool
) -> float:
    """The slower of messages inside a node and messages between nodes, in flight at the same time: equation (L5)."""
    each = size_bytes / spread.ranks
    inside = _moved(each * (spread.fullest - 1), intra, latency)
    if spread.nodes == 1:
        return inside
    between = _moved(each * (spread.ranks - spread.fewest), inter, latency)
    return max(inside, between)


def _moved(size_bytes: float, link: Link, latency: bool) -> float:
    """Bytes of one device over a link, after one fixed time."""
    fixed = link.latency_seconds if latency else 0.0
    return fixed + size_bytes / link.bandwidth_bytes_per_second


def _ring(
    size_bytes: float, ranks: int, link: Link, rounds: int, copies: float, latency: bool
) -> float:
    """(n - 1) hops of every round and some copies, each with the n-th part: equation (L1)."""
    if ranks == 1:
        return 0.0
    hops = rounds * (ranks - 1)
    waiting = hops * link.latency_seconds if latency else 0.0
    return (
        waiting + (hops + copies) / ranks * size_bytes / link.bandwidth_bytes_per_second
    )
