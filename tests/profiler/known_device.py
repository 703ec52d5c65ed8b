"""A device that is known already: its data sheet takes seconds and processes to measure, and has tests of its own."""

from __future__ import annotations

from typing import Any

import pytest

from planner.profiler import measure
from planner.profiler.measure_device import DeviceSheet
from planner.spec import DeviceSpec


def know_cpu(monkeypatch: pytest.MonkeyPatch, **figures: Any) -> DeviceSpec:
    """What profiles say of the device from now on, of a GiB; figures as in its document."""
    spec = DeviceSpec(id="cpu", memory_bytes=1 << 30, **figures)
    monkeypatch.setattr(
        measure,
        "look_up_device",
        lambda place, _: DeviceSheet(place, "test", 1 << 30, None, None),
    )
    monkeypatch.setattr(measure, "measure_peaks", lambda *arguments: spec)
    return spec
