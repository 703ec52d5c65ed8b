"""Conditions of a measurement: what this machine tells, and what nvidia-smi's words mean."""

from __future__ import annotations

import re

import torch

from planner.profiler.measure_conditions import compared, conditions, parse_gpu


def test_a_cpu_tells_its_load() -> None:
    """The load average is a number; the clock, where the machine tells it, is in GHz."""
    found = conditions(torch.device("cpu"))
    assert float(found["load_average"]) >= 0
    assert all(
        re.fullmatch(r"\d+\.\d\d GHz", text)
        for name, text in found.items()
        if name == "clock"
    )


def test_nvidia_smi_is_read() -> None:
    """Its one line gives clock, power and temperature, each with its limit."""
    assert parse_gpu(" 1755, 1980, 698.12, 700.00, 64\n") == {
        "clock": "1755 of 1980 MHz",
        "power": "698.12 of 700.00 W",
        "temperature": "64 C",
    }


def test_before_and_after_stand_together() -> None:
    """What was told both times is one text; what was not is left out."""
    assert compared({"clock": "2 GHz", "power": "5 W"}, {"clock": "1 GHz"}) == {
        "clock": "2 GHz before, 1 GHz after"
    }
