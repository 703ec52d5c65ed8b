"""Curves of this machine's device: what is measured, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from planner.cost.curves import product_seconds
from planner.errors import SpecError
from planner.profiler import device_curves as module
from planner.profiler.device_curves import (
    Accumulation,
    Attention,
    Convolution,
    ImageShape,
    Linear,
    Streaming,
    device_curves,
)
from planner.profiler.measure_device import DeviceSheet
from planner.spec import DeviceSpec

CPU = torch.device("cpu")
PEAK = 1e13
"""Beyond every CPU, so that the achievable fraction is below 1."""


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Little memory that kernels take turns in."""
    monkeypatch.setattr(module, "COLD_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(module, "MOST_WEIGHTS", {"cpu": 1 << 16})
    for cached in (module.pool, module.pool_elements):
        cached.cache_clear()
    yield
    for cached in (module.pool, module.pool_elements):
        cached.cache_clear()


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small shapes, of a device whose peaks are known."""
    spec = DeviceSpec(
        id="cpu", memory_bytes=1 << 30, peak_flops_per_second={"fp32": PEAK}
    )
    sheet = DeviceSheet(CPU, "test", 1 << 30, None, None)
    monkeypatch.setattr(module, "look_up_device", lambda place, _: sheet)
    monkeypatch.setattr(module, "measure_peaks", lambda *arguments: spec)
    monkeypatch.setattr(module, "multiplies", lambda place, dtype: dtype == "fp32")
    sizes = {
        "ROWS": (8, 64),
        "WIDTHS": (16, 64),
        "BATCHED_ROWS": (8,),
        "BATCHED_WIDTHS": (16,),
        "TOKENS": (16,),
        "ELEMENTS": (1024, 4096),
    }
    for name, values in sizes.items():
        monkeypatch.setattr(module, name, {"cpu": values})
    monkeypatch.setattr(module, "CHANNELS", ((8, 8),))
    monkeypatch.setattr(module, "POINT_SECONDS", 0.001)


@pytest.mark.usefixtures("small_shapes")
def test_every_kind_of_kernel_is_measured() -> None:
    """Products over the whole grid, attention, convolutions, streams and launches."""
    seen: list[tuple[int, int]] = []
    spec = device_curves(
        "cpu", progress=lambda done, all_, what: seen.append((done, all_))
    )
    curves = spec.curves
    assert curves is not None
    linear, batched = sorted(curves.products, key=lambda one: one.kind, reverse=True)
    assert len(linear.points) == 2 * 2 * 2
    assert len(batched.points) == len(module.BATCHES)
    assert len(curves.attention[0].points) == 2 * 2 * 2
    assert len(curves.convolutions[0].points) == 2 * 5
    assert len(curves.memory) == len(curves.accumulation) == 2
    assert 0 < curves.launch_seconds < 1e-3
    assert curves.copies == ()
    assert curves.is_host
    assert curves.environment["torch"] == torch.__version__
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.usefixtures("small_shapes")
def test_the_data_sheet_has_the_measured_figures() -> None:
    """Achievable fraction, launch and bandwidth are those of the curves."""
    spec = device_curves("cpu")
    assert spec.curves is not None
    assert 0 < spec.achievable_fraction < 1
    best = max(
        2 * one.m * one.n * one.k / one.forward_seconds
        for curve in spec.curves.products
        if curve.kind == "linear"
        for one in curve.points
    )
    assert spec.achievable_fraction == pytest.approx(best / PEAK)
    assert spec.launch_seconds == spec.curves.launch_seconds
    last = spec.curves.accumulation[-1]
    expected = last.bytes / last.seconds
    assert spec.memory_bandwidth_bytes_per_second == pytest.approx(expected)


@pytest.mark.usefixtures("small_shapes")
def test_the_largest_shapes_are_left_out_when_time_is_short() -> None:
    """Every curve has a point all the same, so that every shape has a price."""
    spec = device_curves("cpu", time_budget_seconds=1e-6)
    assert spec.curves is not None
    linear = next(one for one in spec.curves.products if one.kind == "linear")
    assert [(one.m, one.n, one.k) for one in linear.points] == [(8, 16, 16)]
    assert product_seconds(spec.curves, "fp32", 512, 512, 512)[0] > 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_no_time_is_refused(seconds: float) -> None:
    """A budget must be positive."""
    with pytest.raises(SpecError) as caught:
        device_curves("cpu", time_budget_seconds=seconds)
    assert caught.value.problems[0].field == "time_budget_seconds"


def test_convolutions_are_counted_as_torch_counts_them() -> None:
    """FLOPs and elements of a strided convolution are those of its tensors."""
    shape = ImageShape(images=2, inputs=4, outputs=6, size=9, kernel=3, stride=2)
    images, weight = torch.zeros(2, 4, 9, 9), torch.zeros(6, 4, 3, 3)
    output = torch.nn.functional.conv2d(images, weight, stride=2, padding=1)
    assert shape.output_size == output.shape[-1]
    assert shape.flops == 2 * output.numel() * 4 * 3 * 3
    assert shape.elements == images.numel() + weight.numel() + output.numel()


@pytest.mark.parametrize(
    ("work", "phases"),
    [
        (Linear((4, 8, 16, 1), torch.float32, CPU, 2), 3),
        (Convolution(ImageShape(1, 4, 4, 8, 3), torch.float32, CPU, 2), 3),
        (Attention(1, 2, 16, 8, True, torch.float32, CPU, 2), 2),
        (Streaming(4096, torch.float32, CPU, 2), 1),
        (Accumulation(4096, torch.float32, CPU, 2), 1),
    ],
)
def test_every_workload_marks_its_phases(
    work: Linear | Convolution | Attention | Streaming | Accumulation, phases: int
) -> None:
    """Each can be run again and again, with one mark more than phases."""
    for _ in range(2):
        marks: list[None] = []
        work.run(lambda marks=marks: marks.append(None))  # type: ignore[misc]
        assert len(marks) == phases + 1


def test_tensors_take_turns_without_overlap() -> None:
    """Slices of one pool, as many as the caches cannot hold; beyond the pool, one of its own."""
    found = module.turns(CPU, torch.float32, (16, 64))
    assert len(found) == 1 + (1 << 16) // (16 * 64 * 4)
    places = {each.data_ptr() for each in found}
    assert len(places) == len(found)
    assert max(places) - min(places) == (len(found) - 1) * 16 * 64 * 4
    (alone,) = module.turns(CPU, torch.float32, (512, 512))
    assert alone.shape == (512, 512)


def test_weight_gradients_are_added_to_earlier_ones() -> None:
    """Two runs with one weight leave the sum of two gradients."""
    work = Linear((4, 8, 16, 1), torch.float32, CPU, repeats=1)
    work._tensors = [(torch.ones(8, 16), torch.zeros(8, 16))]
    work._input, work._gradient = torch.ones(4, 16), torch.ones(4, 8)
    for _ in range(2):
        work.run(lambda: None)
    assert torch.equal(work._tensors[0][1], torch.full((8, 16), 8.0))
