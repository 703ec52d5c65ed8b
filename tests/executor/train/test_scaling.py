"""The loss scale against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import RunError
from planner.executor.train import scaling
from planner.executor.train.scaling import (
    INITIAL_SCALE,
    MAXIMUM_SCALE,
    LossScaler,
    scaler_for,
)


def _torch_scales(overflows: list[bool]) -> list[float]:
    """The scales of `GradScaler` after steps of which these overflow."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scales = []
    for overflow in overflows:
        scaler.scale(parameter.sum() * (math.inf if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@given(st.lists(st.booleans(), max_size=16))
def test_scales_are_those_of_grad_scaler(overflows: list[bool]) -> None:
    """Halves after an overflow, doubles after as many good steps in a row as the interval says."""
    scaler, scales = LossScaler(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "GROWTH_INTERVAL", 3)
        for overflow in overflows:
            scaler.update(overflowed=overflow)
            scales.append(scaler.scale)
    assert scales == _torch_scales(overflows)


def test_defaults_are_those_of_grad_scaler() -> None:
    """Start and interval."""
    assert torch.amp.GradScaler("cpu").get_growth_interval() == scaling.GROWTH_INTERVAL
    assert (
        torch.amp.GradScaler("cpu")._init_scale == INITIAL_SCALE == LossScaler().scale
    )


def test_scale_stays_in_fp32() -> None:
    """It grows no further than fp32 can tell."""
    scaler = LossScaler(scale=MAXIMUM_SCALE, good_steps=scaling.GROWTH_INTERVAL - 1)
    scaler.update(overflowed=False)
    assert scaler.scale == MAXIMUM_SCALE < torch.finfo(torch.float32).max


def test_overflow_at_the_lowest_scale_is_an_error() -> None:
    """Sixteen halvings lead from 2**16 to 1; the next overflow ends the run."""
    scaler = LossScaler()
    for _ in range(16):
        scaler.update(overflowed=True)
    assert scaler.scale == 1.0
    with pytest.raises(RunError, match="overflow fp16 even with a loss scale of 1"):
        scaler.update(overflowed=True)


@pytest.mark.parametrize(
    ("precision", "scaled"),
    [("fp32", 0), ("fp16-mixed", 1), ("bf16-mixed", 0), ("bf16", 0)],
)
def test_only_fp16_is_scaled(precision: str, scaled: bool) -> None:
    """bf16 has fp32's range."""
    assert (scaler_for(precision) is not None) == scaled
