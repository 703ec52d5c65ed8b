"""The catalogue: every architecture has the number of parameters that its authors state."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest

from planner.errors import UnknownNameError
from profiler import catalogue
from profiler.models import load_model

load = cache(load_model)
"""One model of every name for all tests: a cut is found once."""
ROUNDING = 0.03
"""Published sizes are names such as 340M or 70B, rounded generously."""

NORMS = {"gemma2": 4, "gemma3_text": 4}
"""Norms of a block, before and after attention and feed-forward; 2 where only before."""
LLAMA_LIKE = {"llama", "mistral", "qwen3", "gemma2", "gemma3_text"}
HEAD_NORMS = {"qwen3", "gemma3_text"}
"""Queries and keys are normalised per head."""


def _llama_parameters(config: dict) -> int:
    """Touvron et al. 2023: embedding, blocks of gated feed-forward and grouped attention, head if it is not tied."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim", width // heads)
    key_value = config["num_key_value_heads"] * head
    attention = width * heads * head * 2 + width * key_value * 2
    norms = NORMS.get(config["model_type"], 2) * width + (2 * head if config["model_type"] in HEAD_NORMS else 0)
    block = attention + 3 * width * config["intermediate_size"] + norms
    embeddings = 1 if config["tie_word_embeddings"] else 2
    return embeddings * config["vocab_size"] * width + config["num_hidden_layers"] * block + width


def _gpt_parameters(vocabulary: int, positions: int, layers: int, width: int) -> int:
    """Radford et al. 2019: tied embeddings, blocks of 12 width^2 with biases and norms, final norm."""
    block = 12 * width * width + 13 * width
    return (vocabulary + positions) * width + layers * block + 2 * width


def _expected(entry: catalogue.CatalogueEntry) -> int:
    config = entry.config or {}
    if config.get("model_type") in LLAMA_LIKE:
        return _llama_parameters(config)
    if config.get("model_type") == "gpt2":
        return _gpt_parameters(config["vocab_size"], config["n_positions"], config["n_layer"], config["n_embd"])
    if config.get("model_type") == "opt":  # two positions more than it uses
        positions = config["max_position_embeddings"] + 2
        return _gpt_parameters(config["vocab_size"], positions, config["num_hidden_layers"], config["hidden_size"])
    if config.get("model_type") == "bert":
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        embeddings = (vocabulary + config["max_position_embeddings"] + 2) * width + 2 * width
        head = width * width + 3 * width + vocabulary
        return embeddings + config["num_hidden_layers"] * (12 * width * width + 13 * width) + head
    return entry.published_parameters


@pytest.mark.parametrize("name", catalogue.names())
def test_architecture_has_the_published_parameters(name: str):
    """What is built agrees with the closed form of the architecture, and with the stated size up to its rounding."""
    entry = catalogue.entry(name)
    built = sum(parameter.numel() for parameter in load(name).blueprint.parameters())
    assert built == entry.parameters == _expected(entry)
    assert abs(built / entry.published_parameters - 1) < ROUNDING


@pytest.mark.parametrize("name", catalogue.names())
def test_entry_agrees_with_the_model(name: str):
    """Layers and longest sequence of the listing are those of the model that is built."""
    entry, source = catalogue.entry(name), load(name)
    assert entry.name == name
    assert entry.citation
    assert entry.longest_sequence == source.longest_sequence
    if entry.config is not None:
        assert len(source.cut().layers) == entry.layers + 2


def test_names_are_sorted_by_size():
    """The listing reads from small to large, and holds the models that the planner is asked for."""
    sizes = [catalogue.entry(name).parameters for name in catalogue.names()]
    assert sizes == sorted(sizes)
    assert {"gpt2", "llama-3.1-405b", "gpt3-175b", "bert-large", "resnet-50", "vgg16"} <= set(catalogue.names())


def test_unknown_name_lists_close_ones():
    """A typing error is answered with what was meant."""
    with pytest.raises(UnknownNameError, match=r"llama-3\.1-70b"):
        catalogue.entry("llama-3-70b")


def test_listing_needs_no_torch():
    """Names and entries are read in an interpreter that never loads torch."""
    code = (
        "import sys; from profiler import catalogue as c; [c.entry(n) for n in c.names()]; "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
