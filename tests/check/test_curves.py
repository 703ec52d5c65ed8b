"""The check's own prices by measured curves agree with those of the cost model."""

from __future__ import annotations

import random

import pytest

from planner.check.curves import curve_seconds
from planner.cost import curves as cost
from planner.spec import DeviceCurves
from planner.spec.device_curves import ProductCurve, ProductPoint
from planner.spec.profile import Operation
from tests.cost.test_curves import curves, row


def irregular() -> DeviceCurves:
    """Curves with random rates, over a grid in which every third shape is missing."""
    numbers = random.Random(7)
    points = []
    for m in (8, 64, 512):
        for n in (16, 256):
            for k in (32, 128):
                seconds = [numbers.uniform(1e-5, 1e-3) for _ in range(3)]
                points.append(
                    ProductPoint(
                        m=m,
                        n=n,
                        k=k,
                        forward_seconds=seconds[0],
                        input_seconds=seconds[1],
                        weight_seconds=seconds[2],
                    )
                )
    kept = [point for place, point in enumerate(points) if place % 3 != 1]
    linear = ProductCurve(dtype="fp32", kind="linear", points=tuple(kept))
    known = curves()
    return curves(products=(linear, known.products[1]), host_seconds=3e-6)


def operation(numbers: random.Random) -> Operation:
    """An operation of any kind and size."""
    kind = numbers.choice(("matmul", "matmul", "attention", "convolution", "memory"))
    sizes = [numbers.randint(1, 2000) for _ in range(3)]
    m, n, k = sizes if kind == "matmul" else (0, 0, 0)
    batch = numbers.choice((1, 1, 12)) if kind == "matmul" else 1
    flops = 2 * m * n * k * batch if kind == "matmul" else numbers.randint(1, 10**9)
    return Operation(
        kind=kind,
        count=numbers.randint(1, 4),
        flops=0 if kind == "memory" else flops,
        bytes=numbers.randint(1, 10**7),
        m=m,
        n=n,
        k=k,
        batch=batch,
        gradients=numbers.choice((None, None, "input", "weight", "none")),
        is_linear=numbers.choice((None, True, False)) if kind == "matmul" else None,
    )


@pytest.mark.parametrize("seed", range(40))
def test_both_prices_agree(seed: int) -> None:
    """Random rows have the same seconds by arrays and by loops."""
    numbers = random.Random(seed)
    operations = tuple(operation(numbers) for _ in range(numbers.randint(1, 8)))
    again = operations[: numbers.randint(0, len(operations))]
    one = row(
        *operations,
        recompute=numbers.choice(("none", "full")),
        recompute_flops=numbers.choice((0, 10**8)),
        recompute_operations=again,
        backward_bytes=numbers.choice((0, 10**8)),
        backward_input_flops=numbers.choice((0, 10**9)),
        local_parameters=numbers.choice((None, 10**6)),
    )
    known = irregular()
    expected = cost.curve_seconds(one, known, "fp32")
    found = curve_seconds(one, known, "fp32")
    assert found == pytest.approx(
        (
            expected.forward_seconds,
            expected.backward_input_seconds,
            expected.backward_weight_seconds,
            expected.recompute_seconds,
        )
    )


def test_formats_without_curves_have_no_price() -> None:
    """The roofline prices them."""
    one = row(Operation(kind="memory", count=1, flops=0, bytes=1))
    assert curve_seconds(one, curves(), "bf16") is None
