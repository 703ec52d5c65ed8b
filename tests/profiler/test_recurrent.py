"""LSTM layers by shapes alone: outputs of torch's shape, gradients for all weights, the FLOPs of their products."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from planner.profiler.watch import FusedAttention

SAMPLES, STEPS, INPUTS, WIDTH = 3, 7, 5, 4


def _layer(*, both_ways: bool = False, bias: bool = True, layers: int = 1) -> nn.LSTM:
    return nn.LSTM(
        INPUTS,
        WIDTH,
        layers,
        bias=bias,
        batch_first=True,
        bidirectional=both_ways,
        device="meta",
    )


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_trains_like_torch(both_ways: bool, bias: bool):
    """Outputs have the shape that torch's own gives; input and every weight get gradients of their shapes."""
    layer, inputs = (
        _layer(both_ways=both_ways, bias=bias),
        torch.empty(SAMPLES, STEPS, INPUTS, device="meta"),
    )
    expected = layer(inputs)[0].shape
    inputs.requires_grad_()
    with FusedAttention():
        output = layer(inputs)[0]
    output.sum().backward()
    assert output.shape == expected
    assert inputs.grad is not None
    assert inputs.grad.shape == inputs.shape
    assert all(
        each.grad is not None and each.grad.shape == each.shape
        for each in layer.parameters()
    )


@pytest.mark.parametrize("both_ways", [False, True])
def test_flops_are_those_of_the_products_that_torch_runs(both_ways: bool):
    """torch writes the steps out on meta tensors, and counts their products; the fused layer counts the same."""
    layer, inputs = (
        _layer(both_ways=both_ways),
        torch.empty(SAMPLES, STEPS, INPUTS, device="meta"),
    )
    counts = []
    for kernels in (nullcontext(), FusedAttention()):
        with FlopCounterMode(display=False) as counter, kernels:
            layer(inputs)
        counts.append(counter.get_total_flops())
    assert (
        counts[0]
        == counts[1]
        == 2 * SAMPLES * STEPS * (INPUTS + WIDTH) * 4 * WIDTH * (2 if both_ways else 1)
    )


def test_stacked_layers_are_refused():
    """A module of several layers says how to write it so that it can be counted."""
    with (
        FusedAttention(),
        pytest.raises(NotImplementedError, match=r"one nn\.LSTM per layer"),
    ):
        _layer(layers=2)(torch.empty(SAMPLES, STEPS, INPUTS, device="meta"))
