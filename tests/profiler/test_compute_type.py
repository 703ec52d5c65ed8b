"""Models are cast as the executor trains them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from planner.errors import UnsupportedError
from planner.profiler import compute_type
from planner.profiler.compute_type import cast
from planner.profiler.count import profile
from planner.profiler.models import load_model
from tests.executor.plans import LLAMA, source_of
from tests.profiler.graphs import Wide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_keeps_its_statistics_in_fp32(dtype: torch.dtype) -> None:
    """It is torch's operation on activations of 16 bits, with weights and statistics of 32."""
    norm = cast(nn.BatchNorm2d(3), dtype)
    assert isinstance(norm, nn.BatchNorm2d)
    images = torch.randn(2, 3, 4, 4, dtype=dtype)
    mean, variance = torch.zeros(3), torch.ones(3)
    expected = functional.batch_norm(
        images, mean, variance, norm.weight.float(), norm.bias.float(), training=True
    )
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
    """Of transformers, rotary frequencies keep the type that their code makes them in."""
    assert cast(Wide(), torch.bfloat16).get_buffer("table").dtype == torch.bfloat16
    llama = cast(source_of("llama", tmp_path).build(), torch.bfloat16)
    assert {
        each.dtype for name, each in llama.named_buffers() if "inv_freq" in name
    } == {torch.float32}
    assert {each.dtype for each in llama.parameters()} == {torch.bfloat16}


def test_tensors_at_borders_are_of_the_types_that_layers_hand_on() -> None:
    """A stream in fp32 is sent in fp32, beside layers in bf16."""
    source = load_model("tests.profiler.graphs:wide")
    kinds = [
        {each.dtype for each in border}
        for border in source.borders(2, 0, torch.bfloat16).crossing
    ]
    assert kinds[0] == kinds[-1] == {torch.bfloat16}
    assert any(torch.float32 in each for each in kinds[1:-1])
    assert {
        each.dtype for border in source.borders(2, 0).crossing for each in border
    } == {torch.float32}


def test_a_model_that_does_not_run_in_a_type_is_refused() -> None:
    """Its tensor that is registered nowhere stays in fp32, beside weights in bf16."""
    source = load_model("tests.profiler.graphs:untraceable")
    profile(source, sequence_length=0, micro_batch_sizes=(2,))
    with pytest.raises(UnsupportedError, match="does not run on 2 samples in bfloat16"):
        profile(source, sequence_length=0, micro_batch_sizes=(2,), dtype="bf16")


def test_batch_norm_of_features_is_not_counted_on_one_sample() -> None:
    """Of which there is no mean; with images there is, of its pixels."""
    sizes = {
        name: {
            row.micro_batch_size for layer in found.layers for row in layer.measurements
        }
        for name in ("wide", "plain")
        for found in [
            profile(
                load_model(f"tests.profiler.graphs:{name}"),
                sequence_length=0,
                micro_batch_sizes=(1, 2, 4),
            )
        ]
    }
    assert sizes == {"wide": {2, 4}, "plain": {1, 2, 4}}


MINIMAX = {
    **LLAMA,
    "model_type": "minimax",
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_buffers_are_of_the_types_that_transformers_itself_gives_them(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """As in `from_config` with that type: MiniMax's tables of decays in it, rotary frequencies in fp32."""
    (tmp_path / "minimax.json").write_text(json.dumps(MINIMAX))
    source = load_model(str(tmp_path / "minimax.json"))
    theirs = AutoModelForCausalLM.from_config(source.config, dtype=dtype)  # type: ignore[no-untyped-call]
    model = cast(source.build(), dtype)
    found = {name: each.dtype for name, each in model.named_buffers()}
    assert found == {name: each.dtype for name, each in theirs.named_buffers()}
    assert set(found.values()) == {dtype, torch.float32}
    assert model(torch.zeros(1, 8, dtype=torch.long)).logits.dtype == dtype


def test_a_transformer_that_would_not_train_in_a_type_is_not_profiled_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a plan would be found that every run refuses: here, of MiniMax with its buffers left in fp32."""
    monkeypatch.setattr(
        compute_type, "buffers_to_cast", lambda model, dtype: frozenset()
    )
    (tmp_path / "minimax.json").write_text(json.dumps(MINIMAX))
    source = load_model(str(tmp_path / "minimax.json"))
    profile(source, sequence_length=8, micro_batch_sizes=(1,))
    with pytest.raises(
        UnsupportedError, match="does not run on 1 samples of 8 tokens in bfloat16"
    ):
        profile(source, sequence_length=8, micro_batch_sizes=(1,), dtype="bf16")
