"""Models are cast as the executor trains them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from planner.errors import UnsupportedError
from profiler.compute_type import cast
from profiler.count import profile
from profiler.models import load_model
from tests.executor.plans import source_of
from tests.profiler.graphs import Wide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_keeps_its_statistics_in_fp32(dtype: torch.dtype) -> None:
    """It is torch's operation on activations of 16 bits, with weights and statistics of 32."""
    norm = cast(nn.BatchNorm2d(3), dtype)
    assert isinstance(norm, nn.BatchNorm2d)
    images = torch.randn(2, 3, 4, 4, dtype=dtype)
    mean, variance = torch.zeros(3), torch.ones(3)
    expected = functional.batch_norm(images, mean, variance, norm.weight.float(), norm.bias.float(), training=True)
    made = norm(images)
    assert made.dtype == dtype
    assert torch.equal(made, expected)
    assert norm.running_mean is not None
    assert torch.equal(norm.running_mean, mean)
    made.float().square().sum().backward()
    assert norm.weight.grad is not None
    assert norm.weight.grad.dtype == norm.weight.dtype == dtype


def test_a_copy_of_a_norm_has_statistics_of_its_own() -> None:
    """As layers that are copied from one model."""
    norm = cast(nn.BatchNorm1d(3), torch.bfloat16)
    other = copy.deepcopy(norm)
    other(torch.ones(4, 3, dtype=torch.bfloat16))
    assert not norm.running_mean.any()  # type: ignore[union-attr, operator]
    assert other.running_mean.all()  # type: ignore[union-attr, operator]


def test_buffers_of_own_models_alone_are_cast(tmp_path: Path) -> None:
    """transformers' keep the types that their code makes them in."""
    assert cast(Wide(), torch.bfloat16).get_buffer("table").dtype == torch.bfloat16
    llama = cast(source_of("llama", tmp_path).build(), torch.bfloat16)
    assert {each.dtype for name, each in llama.named_buffers() if "inv_freq" in name} == {torch.float32}
    assert {each.dtype for each in llama.parameters()} == {torch.bfloat16}


def test_tensors_at_borders_are_of_the_types_that_layers_hand_on() -> None:
    """A stream in fp32 is sent in fp32, beside layers in bf16."""
    source = load_model("tests.profiler.graphs:wide")
    kinds = [{each.dtype for each in border} for border in source.borders(2, 0, torch.bfloat16).crossing]
    assert kinds[0] == kinds[-1] == {torch.bfloat16}
    assert any(torch.float32 in each for each in kinds[1:-1])
    assert {each.dtype for border in source.borders(2, 0).crossing for each in border} == {torch.float32}


def test_a_model_that_does_not_run_in_a_type_is_refused() -> None:
    """Its tensor that is registered nowhere stays in fp32, beside weights in bf16."""
    source = load_model("tests.profiler.graphs:untraceable")
    profile(source, sequence_length=0, micro_batch_sizes=(2,))
    with pytest.raises(UnsupportedError, match="does not run on 2 samples in bfloat16"):
        profile(source, sequence_length=0, micro_batch_sizes=(2,), dtype="bf16")


def test_batch_norm_of_features_is_not_counted_on_one_sample() -> None:
    """Of which there is no mean; with images there is, of its pixels."""
    sizes = {
        name: {row.micro_batch_size for layer in found.layers for row in layer.measurements}
        for name in ("wide", "plain")
        for found in [
            profile(load_model(f"tests.profiler.graphs:{name}"), sequence_length=0, micro_batch_sizes=(1, 2, 4))
        ]
    }
    assert sizes == {"wide": {2, 4}, "plain": {1, 2, 4}}
