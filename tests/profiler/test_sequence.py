"""A causal language model on pieces of its sequence computes what it computes on the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import UnsupportedError
from planner.profiler.lower_right import use_lower_right
from planner.profiler.models import ModelSource, load_model
from planner.profiler.recompute import recompute
from planner.profiler.sequence import KeyValues, Pieces, check_pieces
from tests.executor.plans import CONFIGS, LLAMA

SEQUENCE = 16
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {
        **CONFIGS["gpt2"],
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    # Positions in the attention scores; keys and values compressed; windows that pieces cross; routed experts.
    "bloom": {
        "model_type": "bloom",
        "n_layer": 2,
        "hidden_size": 32,
        "n_head": 4,
        "vocab_size": 256,
    },
    "deepseek": {
        **LLAMA,
        "model_type": "deepseek_v3",
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "gemma3": {
        **LLAMA,
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def _source(name: str, config: dict[str, Any], folder: Path) -> ModelSource:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return load_model(str(path))


def _gradients(
    model: nn.Module, outputs: list[Tensor], weights: Tensor
) -> dict[str, Tensor]:
    """Of the sum of outputs times weights, from the last piece to the first."""
    model.zero_grad()
    parts = weights.chunk(len(outputs), dim=1)
    for output, part in reversed(list(zip(outputs, parts, strict=True))):
        torch.autograd.backward((output * part).sum())
    return {
        name: each.grad
        for name, each in model.named_parameters()
        if each.grad is not None
    }


@pytest.mark.parametrize("name", MODELS)
def test_chunks_compute_what_the_whole_computes(name: str, tmp_path: Path) -> None:
    """Outputs, and every parameter's gradient, whether blocks recompute or not."""
    source = _source(name, MODELS[name], tmp_path)
    check_pieces(source)
    torch.manual_seed(0)
    model = source.build()
    tokens, weights = torch.randint(256, (2, SEQUENCE)), torch.randn(2, SEQUENCE, 256)
    whole = model(tokens).logits
    wanted = _gradients(model, [whole], weights)
    use_lower_right(model)
    blocks = [layer.modules[0] for layer in source.cut().layers if layer.recomputable]
    for recomputes in (False, True):
        for index, block in enumerate(blocks if recomputes else ()):
            recompute(model.get_submodule(block), "full" if index % 2 else "selective")
        kept = KeyValues(Pieces(SEQUENCE, chunks=4))
        outputs = [
            model(piece, past_key_values=kept.past(chunk), use_cache=True).logits
            for chunk, piece in enumerate(tokens.chunk(4, dim=1))
        ]
        assert torch.allclose(torch.cat(outputs, dim=1), whole, atol=1e-5)
        found = _gradients(model, outputs, weights)
        assert wanted.keys() == found.keys()
        for parameter, gradient in wanted.items():
            assert float((found[parameter] - gradient).abs().max()) < 1e-5 * float(
                gradient.abs().max()
            ), parameter


def test_pieces_of_chunks_stand_side_by_side() -> None:
    """Chunks come one after the other; within one, the pieces of the ranks; each sees all up to its own end."""
    pieces = [
        Pieces(24, chunks=2, context_ranks=3, context_rank=rank) for rank in range(3)
    ]
    places = [[each.piece(chunk).start for each in pieces] for chunk in range(2)]
    assert places == [[0, 4, 8], [12, 16, 20]]
    assert [[each.piece(chunk).stop for each in pieces] for chunk in range(2)] == [
        [4, 8, 12],
        [16, 20, 24],
    ]
    assert [pieces[1].piece(chunk).chunk_stop for chunk in range(2)] == [12, 24]
    assert pieces[0].tokens == 4
    assert Pieces(24, context_ranks=3).piece(0).is_alone
    assert not Pieces(24).is_split


def test_models_that_attend_to_later_tokens_are_refused(tmp_path: Path) -> None:
    """BERT's first tokens would need keys that are not there yet."""
    with pytest.raises(
        UnsupportedError, match="attends to later tokens in its module 'bert"
    ):
        check_pieces(_source("bert", BERT, tmp_path))


def test_models_that_mix_tokens_otherwise_are_refused(tmp_path: Path) -> None:
    """Mamba's convolution and state run from token to token beside any attention."""
    config = {
        "model_type": "mamba",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "vocab_size": 256,
    }
    with pytest.raises(
        UnsupportedError, match="mixes neighbouring tokens in its module"
    ):
        check_pieces(_source("mamba", config, tmp_path))


@pytest.mark.parametrize("name", ["unet", "diffusion"])
def test_models_without_blocks_of_attention_are_refused(name: str) -> None:
    """A traced module has no place to hand keys and values to."""
    with pytest.raises(UnsupportedError, match="no causal language model"):
        check_pieces(load_model(f"tests.profiler.graphs:{name}"))
