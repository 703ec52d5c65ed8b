"""8-bit Adam on a CPU: what is measured of it is what the executor's takes."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch

from planner.executor.train.adam_8bit import Adam8bit
from planner.profiler import measure_low_bit
from planner.profiler.measure_low_bit import SAMPLE, adam_8bit_seconds

SHAPES = ((128, 256), (256, 64), (300,))


def test_measured_seconds_are_those_of_the_executor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within a factor of two on any machine, by this process' own time, so that others do not count; fused AdamW takes
    a small part of it."""
    monkeypatch.setattr(measure_low_bit, "perf_counter", time.process_time)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        told = adam_8bit_seconds(SHAPES)
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        low_bit, fused = (
            Adam8bit(parameters, 1e-3),
            torch.optim.AdamW(parameters, fused=True),
        )
        took = {
            optimizer: _step_seconds(optimizer, parameters)
            for optimizer in (low_bit, fused)
        }
    finally:
        torch.set_num_threads(before)
    assert told is not None
    assert 0.5 < told / took[low_bit] < 2
    assert told > 4 * took[fused]


def _step_seconds(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]
) -> float:
    seconds = []
    for _ in range(8):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        begun = time.process_time()
        optimizer.step()
        seconds.append(time.process_time() - begun)
    return median(seconds[1:])


def test_large_tensors_are_measured_by_a_part_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole blocks grow with the elements; what is left of the last block is a call of its own."""
    asked: list[int] = []

    def call(elements: int, threads: int) -> float:
        asked.append(elements)
        return 1.0

    monkeypatch.setattr(measure_low_bit, "_call_seconds", call)
    assert adam_8bit_seconds(((4 * SAMPLE + 10,), (0,), (256,))) == 4 + 1 + 1
    assert asked == [SAMPLE, 10, 256]


def test_without_torchao_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile can do without: nothing trains by 8-bit Adam there."""
    monkeypatch.setattr(measure_low_bit, "find_spec", lambda name: None)
    assert adam_8bit_seconds(SHAPES) is None
