"""The catalogue: every architecture has the number of parameters that its authors state."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib.resources import files

import pytest

from planner.errors import UnknownNameError
from planner.profiler import catalogue
from planner.profiler.models import load_model

COUNTED = files("planner.profiler.catalogue").joinpath("counted")
load = cache(load_model)
"""One model of every name for all tests: a cut is found once."""
ROUNDING = 0.03
"""Published sizes are names such as 340M or 70B, rounded generously."""

NORMS = {"gemma2": 4, "gemma3_text": 4}
"""Norms of a block, before and after attention and feed-forward; 2 where only before."""
LLAMA_LIKE = {"llama", "mistral", "qwen3", "gemma2", "gemma3_text"}
MIXTURES = {"mixtral": "mistral", "qwen3_moe": "qwen3", "gpt_oss": "mistral"}
"""The dense model that a mixture of experts is built like."""
HEAD_NORMS = {"qwen3", "gemma3_text"}
"""Queries and keys are normalised per head."""


def _llama_parameters(config: dict) -> int:
    """Touvron et al. 2023: embedding, blocks of gated feed-forward and grouped attention, head if it is not tied."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim", width // heads)
    key_value = config["num_key_value_heads"] * head
    attention = width * heads * head * 2 + width * key_value * 2
    norms = NORMS.get(config["model_type"], 2) * width + (
        2 * head if config["model_type"] in HEAD_NORMS else 0
    )
    block = attention + 3 * width * config["intermediate_size"] + norms
    embeddings = 1 if config["tie_word_embeddings"] else 2
    return (
        embeddings * config["vocab_size"] * width
        + config["num_hidden_layers"] * block
        + width
    )


def _mixture_parameters(config: dict) -> int:
    """Llama's, with a router and experts instead of one feed-forward (Jiang et al. 2024, section 2)."""
    dense = _llama_parameters(
        {**config, "model_type": MIXTURES[config["model_type"]], "intermediate_size": 0}
    )
    width, experts = (
        config["hidden_size"],
        config.get("num_experts") or config["num_local_experts"],
    )
    each = 3 * width * config.get("moe_intermediate_size", config["intermediate_size"])
    return dense + config["num_hidden_layers"] * experts * (width + each)


def _gpt_oss_parameters(config: dict) -> int:
    """OpenAI 2025: biases everywhere, and one trained attention sink per head."""
    width, heads, head = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["head_dim"],
    )
    query, key_value = heads * head, config["num_key_value_heads"] * head
    biases = (
        query
        + 2 * key_value
        + width
        + heads
        + config["num_local_experts"] * (1 + 3 * width)
    )
    return _mixture_parameters(config) + config["num_hidden_layers"] * biases


def _latent_parameters(config: dict) -> int:
    """DeepSeek-AI 2024, DeepSeek-V3 Technical Report, sections 2.1 and 4.2: latent attention, one shared expert."""
    width, heads, layers = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_hidden_layers"],
    )
    rope, nope, value = (
        config["qk_rope_head_dim"],
        config["qk_nope_head_dim"],
        config["v_head_dim"],
    )
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    attention = query * (width + 1 + heads * (nope + rope))
    attention += (
        width * (latent + rope)
        + latent * (1 + heads * (nope + value))
        + heads * value * width
    )
    dense = config["first_k_dense_replace"]
    experts = config["n_routed_experts"] + config["n_shared_experts"]
    mixture = (
        3 * width * config["moe_intermediate_size"] * experts
        + width * config["n_routed_experts"]
    )
    feed_forward = (
        dense * 3 * width * config["intermediate_size"] + (layers - dense) * mixture
    )
    return (
        layers * (attention + 2 * width)
        + feed_forward
        + 2 * config["vocab_size"] * width
        + width
    )


def _t5_parameters(config: dict) -> int:
    """Raffel et al. 2020: one embedding for all, no biases, positions only in the first block of each stack."""
    width, inside = config["d_model"], config["num_heads"] * config["d_kv"]
    attention, feed_forward = (
        4 * width * inside + width,
        2 * width * config["d_ff"] + width,
    )
    positions = config["relative_attention_num_buckets"] * config["num_heads"]
    encoder = config["num_layers"] * (attention + feed_forward)
    decoder = config["num_decoder_layers"] * (2 * attention + feed_forward)
    return config["vocab_size"] * width + encoder + decoder + 2 * (positions + width)


def _vit_parameters(config: dict) -> int:
    """Dosovitskiy et al. 2021: patches, a class token and positions, blocks of 12 width^2, norm and classifier."""
    width, patches = (
        config["hidden_size"],
        (config["image_size"] // config["patch_size"]) ** 2,
    )
    embedding = (
        width * (3 * config["patch_size"] ** 2 + 1) + width + (patches + 1) * width
    )
    block = (
        4 * (width * width + width)
        + 2 * width * config["intermediate_size"]
        + config["intermediate_size"]
        + 5 * width
    )
    return (
        embedding
        + config["num_hidden_layers"] * block
        + 2 * width
        + config["num_labels"] * (width + 1)
    )


def _gpt_parameters(vocabulary: int, positions: int, layers: int, width: int) -> int:
    """Radford et al. 2019: tied embeddings, blocks of 12 width^2 with biases and norms, final norm."""
    block = 12 * width * width + 13 * width
    return (vocabulary + positions) * width + layers * block + 2 * width


def _expected(entry: catalogue.CatalogueEntry) -> int:
    config = entry.config or {}
    if config.get("model_type") in LLAMA_LIKE:
        return _llama_parameters(config)
    if config.get("model_type") == "t5":
        return _t5_parameters(config)
    if config.get("model_type") == "vit":
        return _vit_parameters(config)
    if config.get("model_type") in ("mixtral", "qwen3_moe"):
        return _mixture_parameters(config)
    if config.get("model_type") == "gpt_oss":
        return _gpt_oss_parameters(config)
    if config.get("model_type") == "deepseek_v3":
        return _latent_parameters(config)
    if config.get("model_type") == "gpt2":
        return _gpt_parameters(
            config["vocab_size"],
            config["n_positions"],
            config["n_layer"],
            config["n_embd"],
        )
    if config.get("model_type") == "opt":  # two positions more than it uses
        positions = config["max_position_embeddings"] + 2
        return _gpt_parameters(
            config["vocab_size"],
            positions,
            config["num_hidden_layers"],
            config["hidden_size"],
        )
    if config.get("model_type") == "bert":
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        embeddings = (
            vocabulary + config["max_position_embeddings"] + 2
        ) * width + 2 * width
        head = width * width + 3 * width + vocabulary
        return (
            embeddings
            + config["num_hidden_layers"] * (12 * width * width + 13 * width)
            + head
        )
    return entry.parameters  # networks: tests/profiler/test_networks.py


@pytest.mark.parametrize("name", catalogue.names())
def test_architecture_has_the_published_parameters(name: str):
    """What is built agrees with the closed form of the architecture, and with the stated size up to its rounding."""
    entry = catalogue.entry(name)
    built = sum(parameter.numel() for parameter in load(name).blueprint.parameters())
    assert built == entry.parameters == _expected(entry)
    assert (
        entry.published_parameters is None
        or abs(built / entry.published_parameters - 1) < ROUNDING
    )


@pytest.mark.parametrize(
    "name",
    [name for name in catalogue.names() if catalogue.entry(name).active_parameters],
)
def test_mixtures_have_the_published_active_parameters(name: str):
    """All but the experts that a token is not routed to, give or take the embedding, which not all authors count."""
    entry = catalogue.entry(name)
    config = entry.config or {}
    width, top = config["hidden_size"], config["num_experts_per_tok"]
    experts = (
        config.get("n_routed_experts")
        or config.get("num_experts")
        or config["num_local_experts"]
    )
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    each = 3 * width * config.get("moe_intermediate_size", config["intermediate_size"])
    active = entry.parameters - layers * (experts - top) * each
    embedding = config["vocab_size"] * width
    assert (
        (active - embedding) * (1 - ROUNDING)
        < entry.active_parameters
        < active * (1 + ROUNDING)
    )


@pytest.mark.parametrize("name", catalogue.names())
def test_entry_agrees_with_the_model(name: str):
    """Layers and longest sequence of the listing are those of the model that is built."""
    entry, source = catalogue.entry(name), load(name)
    assert entry.name == name
    assert entry.citation
    assert entry.longest_sequence == source.longest_sequence
    assert entry.takes_tokens == (source.input_kind == "tokens")
    if entry.config is not None:
        layers = [
            layer
            for layer, _, _ in json.loads(
                COUNTED.joinpath(f"{name}.json").read_text(encoding="utf-8")
            )["layers"]
        ]
        assert (
            sum(layer.rpartition(".")[2].isdecimal() for layer in layers)
            == entry.layers
        )


def test_names_are_sorted_by_size():
    """The listing reads from small to large, and holds the models that the planner is asked for."""
    sizes = [catalogue.entry(name).parameters for name in catalogue.names()]
    assert sizes == sorted(sizes)
    assert {
        "gpt2",
        "llama-3.1-405b",
        "gpt3-175b",
        "bert-large",
        "resnet-50",
        "vgg16",
    } <= set(catalogue.names())


def test_unknown_name_lists_close_ones():
    """A typing error is answered with what was meant."""
    with pytest.raises(UnknownNameError, match=r"llama-3\.1-70b"):
        catalogue.entry("llama-3-70b")


def test_listing_needs_no_torch():
    """Names and entries are read in an interpreter that never loads torch."""
    code = (
        "import sys; from planner.profiler import catalogue as c; [c.entry(n) for n in c.names()]; "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
