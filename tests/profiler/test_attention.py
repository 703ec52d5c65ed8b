"""Attention by shapes alone agrees with torch's memory-efficient kernel, wherever torch's own meta kernel is exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from planner.profiler.attention import efficient_attention

ROWS = 64
"""A multiple of 32, to which torch's meta kernel rounds the rows up."""


def _inputs(rows: int, width: int, value_width: int) -> tuple[Tensor, Tensor, Tensor]:
    widths = (width, width, value_width)
    query, key, value = (
        torch.empty(2, 4, rows, each, device="meta", requires_grad=True)
        for each in widths
    )
    return query, key, value


def _run(function, *inputs: Tensor) -> tuple[Tensor, int, int, int]:
    """Output, bytes kept, FLOPs of forward, FLOPs of forward and backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with (
        FlopCounterMode(display=False) as counter,
        saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        output = function(*inputs)
        forward = counter.get_total_flops()
        output.sum().backward()
    return output, sum(kept.values()), forward, counter.get_total_flops()


def _torch(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True
    )[0]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("value_width", [16, 8])
def test_agrees_with_torch(with_bias: bool, value_width: int):
    """Shape, strides, kept bytes and FLOPs are those of torch's kernel."""
    inputs = _inputs(ROWS, 16, value_width)
    bias = torch.empty(2, 4, ROWS, ROWS, device="meta") if with_bias else None
    ours, theirs = _run(efficient_attention, *inputs, bias), _run(_torch, *inputs, bias)
    assert (ours[0].shape, ours[0].stride()) == (theirs[0].shape, theirs[0].stride())
    assert ours[2:] == theirs[2:]
    # torch's own saves two numbers of its random generator, too.
    assert 0 <= theirs[1] - ours[1] <= 16


def test_one_number_per_row_is_kept():
    """Besides inputs and output: 4 bytes per sample, head and row, whatever the number of rows."""
    query, key, value = _inputs(23, 16, 8)
    output, kept, _, _ = _run(efficient_attention, query, key, value, None)
    assert (
        kept
        == sum(each.nbytes for each in (query, key, value, output)) + 2 * 4 * 23 * 4
    )


def test_a_trained_bias_gets_its_gradient():
    """As T5 trains its relative positions: the gradient has the bias's own shape, summed over samples."""
    bias = torch.empty(1, 4, 23, 23, device="meta", requires_grad=True)
    efficient_attention(*_inputs(23, 16, 16), bias).sum().backward()
    assert bias.grad is not None
    assert bias.grad.shape == bias.shape
