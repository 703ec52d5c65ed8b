"""Counted peaks inside a layer against what the CPU's allocator really hands out."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from planner.profiler.count import Counter
from planner.profiler.models import load_model

BATCH, TOKENS = 4, 64


def _peak_bytes(stage: torch.nn.Module, inputs: torch.Tensor) -> int:
    """Most bytes that forward and backward of a layer hold at one time, its input apart, gradients made before."""
    gradient = torch.ones_like(stage(inputs))
    stage(inputs).backward(gradient)
    inputs.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        output = stage(inputs)
        edge = torch.autograd.graph.get_gradient_edge(output)
        del output
        torch.autograd.backward(edge, gradient)
    held = most = 0
    events = [
        event
        for event in seen.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most + gradient.nbytes


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_peak_of_a_block_is_the_counted_one(family: str, write_config):
    """Kept and temporary bytes together are the allocator's peak within 10 %: kernels have workspace of their own."""
    source = load_model(write_config(family))
    (kind,) = {layer.kind for layer in source.cut().layers[1:-1]}
    counted = Counter(source, "fp32").count(kind, BATCH, TOKENS)
    mode = counted.modes["none"]
    stage = source.cut().layer(source.build(), 1)
    inputs = torch.randn(BATCH, TOKENS, 32, requires_grad=True)
    assert mode.kept_bytes + max(mode.temporaries) - inputs.nbytes == pytest.approx(
        _peak_bytes(stage, inputs), rel=0.1
    )
