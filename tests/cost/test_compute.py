"""The roofline, operation by operation, on a device of 100 TFLOP/s and 1 TB/s whose kernels start for free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from planner.cost.compute import (
    Figures,
    OperationArrays,
    computation,
    layer_seconds,
    price,
)
from planner.errors import MismatchError
from planner.spec.calibration import DEFAULT, Constants
from planner.spec.cluster import DeviceSpec
from planner.spec.profile import (
    DataType,
    LayerProfile,
    Measurement,
    ModelProfile,
    Operation,
)
from tests.builders import device, four_equal_layers

DEVICE = device()
MEMORY = 0.85 * 1e12
"""Bytes per second that streaming kernels reach."""


def operation(kind: str, *, flops: int = 0, size: int = 0, count: int = 1) -> Operation:
    """A kernel."""
    return Operation(kind=kind, count=count, flops=flops, bytes=size)


def forward_seconds(
    operations: Sequence[Operation],
    machine: DeviceSpec,
    dtype: DataType,
    constants: Constants = DEFAULT,
) -> float:
    """Forward of one layer."""
    figures = Figures.of(machine, dtype, constants)
    return float(layer_seconds(OperationArrays.of([operations]), figures).forward[0])


def backward_seconds(
    operations: Sequence[Operation], machine: DeviceSpec, dtype: DataType
) -> tuple[float, float]:
    """Gradients of input and weight of one layer."""
    figures = Figures.of(machine, dtype, DEFAULT)
    found = layer_seconds(OperationArrays.of([operations]), figures)
    return float(found.backward_input[0]), float(found.backward_weight[0])


def operation_seconds(
    one: Operation,
    machine: DeviceSpec,
    dtype: DataType,
    constants: Constants = DEFAULT,
) -> float:
    """One run of an operation."""
    return forward_seconds((one,), machine, dtype, constants)


def row(**fields: Any) -> Measurement:
    """A counted row: 10^11 FLOPs forward, twice as many backward."""
    return Measurement(
        **{
            "micro_batch_size": 1,
            "sequence_length": 128,
            "forward_flops": 10**11,
            "backward_input_flops": 10**11,
            "backward_weight_flops": 10**11,
            "activation_bytes": 0,
            "output_bytes": 0,
            "temporary_bytes": 0,
            "source": "counted",
            **fields,
        }
    )


def test_compute_bound_product() -> None:
    """(C1): 10^11 FLOPs at 100 TFLOP/s take a millisecond when few bytes move."""
    assert operation_seconds(
        operation("matmul", flops=10**11, size=8), DEVICE, "bf16"
    ) == pytest.approx(1e-3)


def test_memory_bound_product() -> None:
    """(C1): 8.5 GB at 0.85 TB/s take 10 ms, whatever the FLOPs below that."""
    assert operation_seconds(
        operation("matmul", flops=10**11, size=85 * 10**8), DEVICE, "bf16"
    ) == pytest.approx(1e-2)


def test_achievable_fraction_slows_products() -> None:
    """(C1): a device that reaches half its peak takes twice as long."""
    slow = device(achievable_fraction=0.5)
    assert operation_seconds(
        operation("matmul", flops=10**11), slow, "bf16"
    ) == pytest.approx(2e-3)


@pytest.mark.parametrize(("n", "k"), [(50_257, 64), (64, 50_257)])
def test_odd_rows_are_slow(n: int, k: int) -> None:
    """(K1): where rows have an odd number of elements, a product reaches a part only of what it does beside it."""
    constants = replace(DEFAULT, unaligned_fraction=0.25)
    odd, even = (
        Operation(
            kind="matmul", count=1, flops=10**11, bytes=0, m=128, n=each_n, k=each_k
        )
        for each_n, each_k in ((n, k), (n + n % 2, k + k % 2))
    )
    slow, fast = (
        operation_seconds(each, DEVICE, "bf16", constants) for each in (odd, even)
    )
    assert (slow, fast) == (pytest.approx(4e-3), pytest.approx(1e-3))


def test_versions_of_fused_attention() -> None:
    """(C1): the first FlashAttention takes twice the second's time, the third 4/7 of it where there are fp8 products."""
    hopper = device(peak_flops_per_second={"bf16": 1e14, "fp8": 2e14})

    def on(machine: DeviceSpec, kind: str) -> float:
        return operation_seconds(operation(kind, flops=6 * 10**10), machine, "bf16")

    second = on(DEVICE, "attention")
    assert on(DEVICE, "attention-1") == pytest.approx(2 * second)
    assert on(DEVICE, "attention-3") == pytest.approx(second)
    assert on(hopper, "attention-3") == pytest.approx(second / 1.75)


def test_layers_are_priced_together() -> None:
    """Several layers in one call have the seconds of each alone, also on figures of their own."""
    layers = [
        (operation("matmul", flops=10**11), operation("memory", size=10**9)),
        (operation("attention", flops=10**11),),
    ]
    machines = [DEVICE, device(achievable_fraction=0.5)]
    figures = Figures.stack([Figures.of(each, "bf16", DEFAULT) for each in machines])
    found = layer_seconds(OperationArrays.of(layers), figures).forward
    alone = [
        forward_seconds(layer, machine, "bf16")
        for layer, machine in zip(layers, machines, strict=True)
    ]
    assert list(found) == pytest.approx(alone)


def test_attention_is_less_efficient() -> None:
    """(C1): fused attention reaches 0.6 of a product's rate."""
    assert operation_seconds(
        operation("attention", flops=6 * 10**10), DEVICE, "bf16"
    ) == pytest.approx(1e-3)


def test_memory_operation_has_no_flops() -> None:
    """(C1): only the bytes of a memory-bound operation count."""
    found = operation_seconds(
        operation("memory", flops=10**15, size=85 * 10**7), DEVICE, "bf16"
    )
    assert found == pytest.approx(1e-3)


@pytest.mark.parametrize("kind", ["matmul", "attention", "memory", "convolution"])
def test_every_kernel_is_launched(kind: str) -> None:
    """(C1): the launch comes on top, also of a kernel that does nothing."""
    assert operation_seconds(
        operation(kind), device(launch_seconds=5e-6), "bf16"
    ) == pytest.approx(5e-6)


def test_data_types_have_their_own_peak() -> None:
    """(C1): the peak is the data type's."""
    both = device(peak_flops_per_second={"bf16": 1e14, "fp32": 1e13})
    one = operation("matmul", flops=10**11)
    assert operation_seconds(one, both, "fp32") == pytest.approx(
        10 * operation_seconds(one, both, "bf16")
    )


def test_unknown_bandwidth_moves_for_free() -> None:
    """A device without a stated bandwidth is bound by its FLOPs only."""
    found = operation_seconds(
        operation("matmul", flops=10**11, size=10**15),
        device(memory_bandwidth_bytes_per_second=None),
        "bf16",
    )
    assert found == pytest.approx(1e-3)


def test_forward_counts_every_run() -> None:
    """(C2): three products of a millisecond and two passes over 0.85 GB."""
    operations = (
        operation("matmul", flops=10**11, count=3),
        operation("memory", size=85 * 10**7, count=2),
    )
    assert forward_seconds(operations, DEVICE, "bf16") == pytest.approx(5e-3)


@pytest.mark.parametrize("kind", ["matmul", "convolution"])
def test_products_have_two_gradients(kind: str) -> None:
    """(C3): one product of the same size for the input, one for the weight."""
    found = backward_seconds((operation(kind, flops=10**11, count=2),), DEVICE, "bf16")
    assert found == pytest.approx((2e-3, 2e-3))


def test_attention_has_no_weight() -> None:
    """(C3): 2.5 times the forward's FLOPs, all for the input."""
    found = backward_seconds(
        (operation("attention", flops=6 * 10**10),), DEVICE, "bf16"
    )
    assert found == pytest.approx((2.5e-3, 0))


def test_memory_bound_attention_moves_twice() -> None:
    """(C3): where bytes bound it, the backward moves twice the forward's."""
    found = backward_seconds((operation("attention", size=85 * 10**7),), DEVICE, "bf16")
    assert found == pytest.approx((2e-3, 0))


def test_memory_operation_moves_half_as_much_again() -> None:
    """(C3): gradient in and out, and the saved tensor in."""
    found = backward_seconds((operation("memory", size=85 * 10**7),), DEVICE, "bf16")
    assert found == pytest.approx((1.5e-3, 0))


def test_measured_seconds_stand() -> None:
    """What was measured is not priced again, whatever the FLOPs say."""
    seconds = dict(
        zip(
            ("forward", "backward_input", "backward_weight", "recompute"),
            (1.0, 2.0, 3.0, 4.0),
            strict=True,
        )
    )
    measured = row(
        source="measured",
        **{f"{name}_seconds": value for name, value in seconds.items()},
    )
    found = computation(measured, DEVICE, "bf16")
    assert [getattr(found, f"{name}_seconds") for name in seconds] == [1, 2, 3, 4]


def test_row_without_operations_is_one_product() -> None:
    """Counted FLOPs alone are priced as one product, its gradients by their share of FLOPs."""
    found = computation(row(backward_weight_flops=5 * 10**10), DEVICE, "bf16")
    assert (
        found.forward_seconds,
        found.backward_input_seconds,
        found.backward_weight_seconds,
    ) == pytest.approx((1e-3, 1e-3, 0.5e-3))


@pytest.mark.parametrize(
    ("again", "share"), [(0, 0.0), (25 * 10**9, 0.25), (10**11, 1.0), (10**12, 1.0)]
)
def test_recompute_is_a_share_of_the_forward(again: int, share: float) -> None:
    """(C4): by FLOPs, and never more than the whole forward."""
    assert computation(
        row(recompute_flops=again), DEVICE, "bf16"
    ).recompute_seconds == pytest.approx(share * 1e-3)


@pytest.mark.parametrize(("mode", "seconds"), [("none", 0.0), ("full", 1e-3)])
def test_layers_without_flops_recompute_all_or_nothing(
    mode: str, seconds: float
) -> None:
    """(C4): a full recomputation of memory-bound operations costs the forward."""
    flops = dict.fromkeys(
        ("forward_flops", "backward_input_flops", "backward_weight_flops"), 0
    )
    only_bytes = row(
        operations=(operation("memory", size=85 * 10**7),), recompute=mode, **flops
    )
    assert computation(only_bytes, DEVICE, "bf16").recompute_seconds == pytest.approx(
        seconds
    )


def counted_model() -> ModelProfile:
    """Three layers of which two share one row."""
    shared = LayerProfile(name="a", kind="block", parameters=0, measurements=(row(),))
    other = LayerProfile(
        name="c",
        kind="head",
        parameters=0,
        measurements=(row(forward_flops=2 * 10**11),),
    )
    layers = (shared, shared.model_copy(update={"name": "b"}), other)
    return ModelProfile(model="toy", device="counted", dtype="bf16", layers=layers)


def test_price_writes_the_device_into_the_profile() -> None:
    """A priced profile carries the seconds that the cost model would have used, and still says that it was counted."""
    priced = price(counted_model(), DEVICE)
    assert priced.device == DEVICE.id
    assert [one.name for one in priced.layers] == ["a", "b", "c"]
    for before, after in zip(counted_model().layers, priced.layers, strict=True):
        expected = computation(before.measurements[0], DEVICE, "bf16")
        assert computation(after.measurements[0], DEVICE, "bf16") == expected
        assert after.measurements[0].forward_seconds == expected.forward_seconds
        assert after.measurements[0].source == "counted"


def test_price_refuses_a_device_without_the_data_type() -> None:
    """A device without a peak for the profile's type cannot price it; the message lists what it has."""
    with pytest.raises(
        MismatchError, match=r"no peak for bf16.*use one of its data types: fp32"
    ):
        price(four_equal_layers(), device(peak_flops_per_second={"fp32": 1e13}))
