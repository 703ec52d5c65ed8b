"""Mixtures of experts, counted by shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from planner.profiler.count import count
from planner.profiler.experts import grouped_product
from planner.profiler.models import load_model
from tests.profiler.conftest import LLAMA_LIKE

TOKENS, WIDTH, INNER = 12, 32, 48


def _block_flops(tmp_path: Path, experts: int, chosen: int) -> tuple[int, int, int]:
    config = {
        **LLAMA_LIKE,
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
    }
    path = tmp_path / f"{experts}-{chosen}.json"
    path.write_text(json.dumps(config))
    row = count(load_model(str(path)), micro_batch_size=1, sequence_length=TOKENS)[
        "MixtralDecoderLayer"
    ]
    return row.forward_flops, row.backward_input_flops, row.backward_weight_flops


def test_flops_follow_the_experts_that_a_token_goes_to(tmp_path: Path):
    """One expert more per token costs three products of its rows, in each of the three directions; one more that is
    not chosen costs only the router's column."""
    two, three = (_block_flops(tmp_path, 4, chosen) for chosen in (2, 3))
    expert = 3 * 2 * TOKENS * WIDTH * INNER
    assert [more - less for more, less in zip(three, two, strict=True)] == [expert] * 3
    router = 2 * TOKENS * WIDTH
    more = _block_flops(tmp_path, 5, 2)
    assert [more - less for more, less in zip(more, two, strict=True)] == [router] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_counts_its_rows(dtype: torch.dtype):
    """2 x rows x k x n forward, and as much for each gradient; the weights' is left out where nobody wants it."""
    rows = torch.empty(6, 4, device="meta", dtype=dtype, requires_grad=True)
    weights = torch.empty(3, 4, 5, device="meta", dtype=dtype, requires_grad=True)
    ends = torch.empty(3, device="meta", dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        product = grouped_product(rows, weights, offs=ends)
    assert (tuple(product.shape), counter.get_total_flops()) == ((6, 5), 240)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(product, rows, torch.empty_like(product), retain_graph=True)
    assert counter.get_total_flops() == 240
    with FlopCounterMode(display=False) as counter:
        product.backward(torch.empty_like(product))
    assert counter.get_total_flops() == 480
    assert weights.grad is not None
    assert weights.grad.shape == weights.shape
