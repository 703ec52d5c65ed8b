"""`planner calibrate --device`, and what takes its document."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli.calibrate_device import noise_warning
from planner.profiler import device_curves as module
from planner.spec import DeviceSpec, read
from tests.cli.support import Command
from tests.cost.test_curves import curves


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> DeviceSpec:
    """The device that is measured here from now on."""
    spec = DeviceSpec(
        id="cpu",
        memory_bytes=1 << 34,
        peak_flops_per_second={"fp32": 1e11},
        memory_bandwidth_bytes_per_second=1e10,
        curves=curves(),
    )
    monkeypatch.setattr(module, "device_curves", lambda *args, **options: spec)
    return spec


@pytest.fixture
def device_file(planner: Command, measured: DeviceSpec, tmp_path: Path) -> Path:
    """Its document."""
    path = tmp_path / "device.json"
    assert planner("calibrate", "--device", "cpu", "-o", path).code == 0
    return path


@pytest.mark.parametrize("name", ["here", "cpu"])
def test_the_document_is_the_device_with_curves(
    planner: Command, measured: DeviceSpec, tmp_path: Path, name: str
) -> None:
    """The file can be read back, and the summary names what was measured."""
    path = tmp_path / "device.json"
    ended = planner("calibrate", "--device", name, "-o", path)
    assert ended.code == 0
    assert read(DeviceSpec, path) == measured
    for part in ("memory bandwidth", "weight gradient", "attention", "memory-bound"):
        assert part in ended.out
    shown = planner("calibrate", "--device", name, "--json")
    assert DeviceSpec.model_validate(shown.json) == measured


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, False),
        ({"environment": {"load_average": "0.10 before, 1.00 after"}}, False),
        ({"environment": {"load_average": "999 before, 999 after"}}, True),
    ],
)
def test_a_busy_machine_is_reported(
    measured: DeviceSpec, changes: dict[str, object], *, warns: bool
) -> None:
    """Other processes before the measurement make the figures too slow."""
    spec = measured.model_copy(update={"curves": curves(**changes)})
    warning = noise_warning(spec)
    assert (warning is not None) == warns
    if warning is not None:
        assert "999" in warning


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--device", "tpu"), "--device"),
        (("--device", "cpu", "--runs", "runs.json"), "--runs"),
        (("--device", "cpu", "--runtime", "nemo"), "--runtime"),
        (("--concurrency", "2", "--runs", "runs.json"), "--concurrency"),
        ((), "--runs"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    planner: Command, words: tuple[str, ...], field: str
) -> None:
    """The error names the option."""
    ended = planner("calibrate", *words)
    assert ended.code == 2
    assert field in ended.err


def test_profiles_are_priced_for_the_document(
    planner: Command, device_file: Path
) -> None:
    """`analytic:` takes a file, and its curves price the rows."""
    words = ("profile", "gpt2", "--dtype", "fp32", "--sequence-length", "64")
    size = ("--micro-batch-sizes", "1", "-o", "-")
    ended = planner(*words, *size, "--device", f"analytic:{device_file}")
    assert ended.code == 0
    rows = ended.json["layers"][1]["measurements"]
    plain = next(row for row in rows if row["recompute"] == "none")
    assert plain["backward_weight_seconds"] > 1.5 * plain["forward_seconds"]


def test_plans_take_the_document(planner: Command, device_file: Path) -> None:
    """`--devices 1xFILE` is a node of that device."""
    words = ("plan", "gpt2", "--batch", "2", "--sequence", "64", "--precision", "fp32")
    ended = planner(*words, "--devices", f"1x{device_file}", "--json")
    assert ended.code == 0
    device = ended.json["request"]["cluster"]["node_groups"][0]["device"]
    assert device["curves"]["device"] == "test"
