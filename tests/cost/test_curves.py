"""Counted rows priced by the measured curves of a device."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from planner.cost.compute import computation
from planner.cost.curves import (
    accumulation_seconds,
    attention_seconds,
    convolution_seconds,
    curve_seconds,
    has_curves,
    memory_seconds,
    product_seconds,
)
from planner.spec import DeviceCurves, DeviceSpec, Measurement
from planner.spec.device_curves import (
    AttentionCurve,
    AttentionPoint,
    ConvolutionCurve,
    ConvolutionPoint,
    ProductCurve,
    ProductPoint,
    TransferPoint,
)
from planner.spec.profile import Operation

RATE = 1e11
"""FLOP/s of large products."""
LAUNCH = 2e-6


def point(m: int, n: int, k: int, batch: int = 1, rate: float = RATE) -> ProductPoint:
    """A product whose gradients take 1.5 and 2 times as long."""
    seconds = 2 * m * n * k * batch / rate
    return ProductPoint(
        m=m,
        n=n,
        k=k,
        batch=batch,
        forward_seconds=seconds,
        input_seconds=1.5 * seconds,
        weight_seconds=2 * seconds,
    )


def curves(**changes: object) -> DeviceCurves:
    """Curves whose rate is proportional to m, of two sizes per dimension."""
    grid = [
        point(m, n, k, rate=RATE * m / 1024)
        for m, n, k in product((64, 1024), repeat=3)
    ]
    batched = [point(64, 64, 64, 8), point(64, 64, 64, 32)]
    attention = AttentionPoint(
        batch=1,
        heads=8,
        tokens=512,
        head_dim=64,
        causal=False,
        forward_seconds=2e-3,
        backward_seconds=5e-3,
    )
    convolution = ConvolutionPoint(
        flops=10**9,
        bytes=10**6,
        forward_seconds=1e-2,
        input_seconds=2e-2,
        weight_seconds=3e-2,
    )
    memory = (
        TransferPoint(bytes=1_000, seconds=4e-6),
        TransferPoint(bytes=1_000_000, seconds=1e-4),
    )
    accumulation = (
        TransferPoint(bytes=1_000, seconds=3e-6),
        TransferPoint(bytes=1_000_000, seconds=5e-5),
    )
    fields: dict[str, object] = {
        "device": "test",
        "products": (
            ProductCurve(dtype="fp32", kind="linear", points=tuple(grid)),
            ProductCurve(dtype="fp32", kind="batched", points=tuple(batched)),
        ),
        "attention": (AttentionCurve(dtype="fp32", points=(attention,)),),
        "convolutions": (ConvolutionCurve(dtype="fp32", points=(convolution,)),),
        "memory": memory,
        "accumulation": accumulation,
        "launch_seconds": LAUNCH,
        **changes,
    }
    return DeviceCurves.model_validate(fields)


def row(*operations: Operation, **changes: object) -> Measurement:
    """A counted row."""
    fields: dict[str, object] = {
        "micro_batch_size": 1,
        "sequence_length": 64,
        "forward_flops": 10**9,
        "backward_input_flops": 10**9,
        "backward_weight_flops": 10**9,
        "activation_bytes": 0,
        "output_bytes": 0,
        "temporary_bytes": 0,
        "operations": operations,
        "source": "counted",
        **changes,
    }
    return Measurement.model_validate(fields)


def matmul(m: int, n: int, k: int, **changes: object) -> Operation:
    """A matrix product in fp32."""
    fields: dict[str, object] = {
        "kind": "matmul",
        "count": 1,
        "flops": 2 * m * n * k,
        "bytes": 4 * (m * k + k * n + m * n),
        "m": m,
        "n": n,
        "k": k,
        **changes,
    }
    return Operation.model_validate(fields)


def test_measured_shapes_have_their_seconds() -> None:
    """Every point of the grid is reproduced, in every phase."""
    known = curves()
    for one in known.products[0].points:
        for phase in ("forward", "input", "weight"):
            found = product_seconds(known, "fp32", one.m, one.n, one.k, phase=phase)
            assert found[0] == pytest.approx(getattr(one, f"{phase}_seconds"))


def test_rates_between_shapes_are_interpolated_in_logarithms() -> None:
    """Halfway between two sizes, the rate is the geometric mean of theirs."""
    found = product_seconds(curves(), "fp32", 256, 1024, 1024)
    rate = 2 * 256 * 1024 * 1024 / found[0]
    assert rate == pytest.approx(RATE * 256 / 1024)


def test_rates_beyond_the_grid_are_those_of_its_edge() -> None:
    """A product twice as wide as the widest measured one takes twice as long."""
    once, twice = product_seconds(curves(), "fp32", 1024, [1024, 2048], 1024)
    assert twice == pytest.approx(2 * once)


def test_shapes_that_were_left_out_have_the_rate_of_the_nearest() -> None:
    """A grid with a missing corner has no gap."""
    points = [point(m, n, 64) for m, n in product((64, 1024), repeat=2) if m + n < 2048]
    curve = ProductCurve(dtype="fp32", kind="linear", points=tuple(points))
    found = product_seconds(curves(products=(curve,)), "fp32", 1024, 1024, 64)
    assert found[0] == pytest.approx(2 * 1024 * 1024 * 64 / RATE)


def test_batched_products_have_a_curve_of_their_own() -> None:
    """The rate of several products in one call is not that of a linear layer."""
    alone, together = product_seconds(curves(), "fp32", 64, 64, 64, [1, 8])
    assert together == pytest.approx(8 * 2 * 64**3 / RATE)
    assert alone > together / 8


def test_no_kernel_is_faster_than_its_launch() -> None:
    """A product of single numbers takes the time of a launch."""
    assert product_seconds(curves(), "fp32", 1, 1, 1)[0] == LAUNCH


def test_attention_and_convolutions_take_the_rate_of_their_points() -> None:
    """Twice the FLOPs at the same intensity take twice as long, in every phase."""
    known = curves()
    measured = known.attention[0].points[0]
    flops, moved = measured.flops, 4 * measured.elements
    once, twice = attention_seconds(known, "fp32", [flops, 2 * flops], [moved] * 2)
    assert (once, twice) == pytest.approx((2e-3, 4e-3))
    backward = attention_seconds(known, "fp32", flops, moved, "input")
    assert backward[0] == pytest.approx(5e-3)
    weight = convolution_seconds(known, "fp32", 2 * 10**9, 10**6, "weight")
    assert weight[0] == pytest.approx(6e-2)


def test_memory_is_piecewise_linear_in_bytes() -> None:
    """Launch, measured points, the line between them, and the last bandwidth."""
    known = curves()
    found = memory_seconds(known, [0, 1_000, 500_500, 1_000_000, 3_000_000])
    assert found == pytest.approx([LAUNCH, 4e-6, 5.2e-5, 1e-4, 3e-4])
    assert accumulation_seconds(known, 1_000_000)[0] == pytest.approx(5e-5)


def test_a_product_has_two_gradients() -> None:
    """The backward of a linear layer is both of its products."""
    once = product_seconds(curves(), "fp32", 64, 64, 1024)[0]
    found = curve_seconds(row(matmul(64, 64, 1024)), curves(), "fp32")
    assert found.forward_seconds == pytest.approx(once)
    assert found.backward_input_seconds == pytest.approx(1.5 * once)
    assert found.backward_weight_seconds == pytest.approx(2 * once)


@pytest.mark.parametrize(
    ("changes", "gradients"),
    [
        ({"gradients": "input"}, (True, False)),
        ({"gradients": "weight"}, (False, True)),
        ({"gradients": "none"}, (False, False)),
    ],
)
def test_frozen_parameters_have_no_gradient(
    changes: dict[str, object], gradients: tuple[bool, bool]
) -> None:
    """Only the products that the backward runs are priced."""
    found = curve_seconds(row(matmul(64, 64, 1024, **changes)), curves(), "fp32")
    assert found.forward_seconds > 0
    backward = (found.backward_input_seconds, found.backward_weight_seconds)
    assert tuple(value > 0 for value in backward) == gradients


def test_products_on_data_have_no_input_gradient() -> None:
    """The first layer's input is no activation of another layer."""
    found = curve_seconds(
        row(matmul(64, 64, 1024), backward_input_flops=0), curves(), "fp32"
    )
    assert found.backward_input_seconds == 0
    assert found.backward_weight_seconds > 0


def test_stated_backward_bytes_price_the_backward() -> None:
    """Bytes beyond those of products and accumulated gradients are memory-bound."""
    memory = Operation(kind="memory", count=2, flops=0, bytes=10_000)
    known = curves()
    found = curve_seconds(row(memory, backward_bytes=60_000), known, "fp32")
    assert found.forward_seconds == pytest.approx(2 * memory_seconds(known, 10_000)[0])
    expected = 2 * memory_seconds(known, 30_000)[0]
    assert found.backward_input_seconds == pytest.approx(expected)


def test_weights_of_products_are_not_accumulated_twice() -> None:
    """The weight gradient's curve has the addition, also for experts in one call."""
    known = curves()
    experts = matmul(64, 64, 64, batch=8, flops=16 * 64**3, is_linear=True)
    product_only = product_seconds(known, "fp32", 64, 64, 64, 8, "weight")[0]
    for elements, extra in ((8 * 64 * 64, 0), (8 * 64 * 64 + 10**6, 10**6)):
        found = curve_seconds(row(experts, local_parameters=elements), known, "fp32")
        added = 2 * accumulation_seconds(known, 8 * extra)[0] if extra else 0.0
        assert found.backward_weight_seconds == pytest.approx(product_only + added)


def test_gradients_outside_products_are_accumulated() -> None:
    """An embedding's gradient is set to zero and added, wherever its table is large."""
    memory = Operation(kind="memory", count=1, flops=0, bytes=1_000)
    known, elements = curves(), 10**6
    found = curve_seconds(row(memory, local_parameters=elements), known, "fp32")
    expected = 2 * accumulation_seconds(known, 8 * elements)[0]
    assert found.backward_weight_seconds == pytest.approx(expected)


def test_recomputation_is_the_operations_that_run_again() -> None:
    """A row names them; without names, it is the share of the FLOPs."""
    product_of, memory = matmul(64, 64, 1024), matmul(64, 64, 64)
    again = row(product_of, memory, recompute="full", recompute_operations=(memory,))
    share = row(product_of, recompute="full", recompute_flops=5 * 10**8)
    whole = product_seconds(curves(), "fp32", 64, 64, [64, 1024])
    assert curve_seconds(again, curves(), "fp32").recompute_seconds == pytest.approx(
        whole[0]
    )
    assert curve_seconds(share, curves(), "fp32").recompute_seconds == pytest.approx(
        whole[1] / 2
    )


def test_the_host_is_added_on_a_cpu_and_bounds_a_gpu() -> None:
    """Launches of a CPU take time of their own; those of a GPU run ahead of it."""
    one = row(matmul(1024, 1024, 1024))
    alone = curve_seconds(one, curves(), "fp32").forward_seconds
    on_cpu = curve_seconds(one, curves(host_seconds=1e-3), "fp32")
    assert on_cpu.forward_seconds == pytest.approx(alone + 1e-3)
    point_of = {"bytes": 1, "seconds": 1e-6}
    copies = ({"direction": "host_to_device", "points": (point_of,)},)
    on_gpu = curve_seconds(one, curves(host_seconds=1e-3, copies=copies), "fp32")
    assert alone < on_gpu.forward_seconds < alone * 1.01


def test_rows_are_priced_by_the_curves_of_their_device() -> None:
    """A device's own curves replace its peak, in the formats that were measured."""
    known = curves()
    device = DeviceSpec(
        id="test",
        memory_bytes=10**9,
        peak_flops_per_second={"fp32": 1e12, "bf16": 1e12},
        memory_bandwidth_bytes_per_second=1e12,
    )
    measured = device.model_copy(update={"curves": known})
    one = row(matmul(64, 64, 1024))
    expected = curve_seconds(one, known, "fp32").forward_seconds
    assert computation(one, measured, "fp32").forward_seconds == expected
    assert has_curves(known, "fp32")
    assert not has_curves(known, "bf16")
    by_peak = computation(one, device, "bf16")
    assert computation(one, measured, "bf16") == by_peak


def test_a_device_without_curves_keeps_its_id() -> None:
    """The field is left out of JSON, so that older documents have the same digest."""
    device = DeviceSpec(id="test", memory_bytes=1)
    assert "curves" not in device.model_dump(mode="json")
    again = DeviceSpec.model_validate(
        device.model_copy(update={"curves": curves()}).model_dump(mode="json")
    )
    assert again.curves == curves()
    assert hash(again.curves) == hash(curves())


def test_arrays_are_priced_at_once() -> None:
    """One call prices many products, each as if alone."""
    sizes = np.array([64.0, 100.0, 1024.0])
    together = product_seconds(curves(), "fp32", sizes, 64, sizes)
    alone = [product_seconds(curves(), "fp32", m, 64, m)[0] for m in sizes]
    assert together == pytest.approx(alone)
