"""Sizes of decoders from their configurations, without torch."""

from __future__ import annotations

from typing import Any

import pytest

from planner.profiler import catalogue
from planner.profiler.catalogue import CatalogueEntry
from planner.profiler.decoder_config import transformer_of

TYPES_OF_DECODERS = {
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "opt",
    "qwen3",
    "qwen3_moe",
}
ENTRIES = [catalogue.entry(name) for name in catalogue.names()]
DECODERS = [
    entry
    for entry in ENTRIES
    if (entry.config or {}).get("model_type") in TYPES_OF_DECODERS
]
OTHERS = [entry for entry in ENTRIES if entry not in DECODERS]
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
FURTHER = {
    "deepseek_v2": SMALL | LATENT,
    "gemma": SMALL,
    "mistral": SMALL,
    "olmo": SMALL,
    "phi3": SMALL,
    "qwen2": SMALL,
}
"""Settings of architectures that the catalogue has no model of, or none of these."""


@pytest.mark.parametrize("entry", DECODERS, ids=lambda entry: entry.name)
def test_parameters_equal_the_catalogue(entry: CatalogueEntry) -> None:
    """The sizes give exactly the parameters that the catalogue states."""
    model = transformer_of(entry.config or {})
    assert model is not None
    assert model.parameters == entry.parameters


@pytest.mark.parametrize("entry", OTHERS, ids=lambda entry: entry.name)
def test_other_models_have_no_sizes_of_a_decoder(entry: CatalogueEntry) -> None:
    """Encoders, encoder-decoders and image models are no decoders."""
    assert transformer_of(entry.config or {}) is None


@pytest.mark.parametrize("architecture", FURTHER)
def test_parameters_equal_those_of_transformers(architecture: str) -> None:
    """Missing fields mean what they mean in transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    settings = FURTHER[architecture]
    config = transformers.AutoConfig.for_model(architecture, **settings)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in module.parameters())
    written = transformer_of(config.to_dict())
    given = transformer_of({"model_type": architecture, **settings})
    assert written is not None
    assert given is not None
    assert written.parameters == expected
    assert given.parameters == expected


def test_windows_of_gemma_repeat() -> None:
    """Five layers of six attend to the window."""
    model = transformer_of(catalogue.entry("gemma-3-4b").config or {})
    assert model is not None
    windowed = [model.is_windowed(layer) for layer in range(6)]
    assert windowed == [True] * 5 + [False]


def test_layer_types_without_a_period_are_refused() -> None:
    """A pattern of windows that no period describes has no sizes."""
    config = dict(catalogue.entry("gpt-oss-20b").config or {})
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert transformer_of(config | {"layer_types": types}) is None


def test_biases_of_some_layers_are_refused() -> None:
    """Llama with biases in attention only has no sizes, since they name no such case."""
    config = dict(catalogue.entry("llama-3.1-8b").config or {})
    assert transformer_of(config | {"attention_bias": True}) is None


def test_incomplete_configurations_have_no_sizes() -> None:
    """A configuration without its number of layers has no sizes."""
    config = dict(catalogue.entry("llama-3.1-8b").config or {})
    del config["num_hidden_layers"]
    assert transformer_of(config) is None
