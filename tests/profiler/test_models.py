"""References to models: what they resolve to, and how wrong ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from planner.errors import (
    DocumentError,
    MismatchError,
    UnknownNameError,
    UnsupportedError,
)
from planner.profiler.models import load_model

CALLABLES = "tests.profiler.callables"


def test_config_file_gives_a_token_model(write_config):
    """A config.json on disk gives vocabulary and longest sequence, and builds with fused attention and no cache."""
    source = load_model(write_config("llama"))
    model = source.build()
    assert (
        source.name,
        source.input_kind,
        source.vocabulary_size,
        source.longest_sequence,
    ) == (
        "llama",
        "tokens",
        96,
        64,
    )
    assert (
        model.config._attn_implementation,
        model.config.use_cache,
        model.training,
    ) == ("sdpa", False, True)
    assert model(*source.example_inputs(2, 5)).logits.shape == (2, 5, 96)


def test_directory_with_config_gives_its_name(tmp_path: Path, write_config):
    """The directory of a downloaded model may be given; the model is called like it."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(Path(write_config("gpt2")).read_text())
    assert (
        load_model(str(folder)).name
        == load_model(str(folder / "config.json")).name
        == "my-model"
    )


def test_build_follows_the_default_device_and_stays_fp32(write_config):
    """A meta model costs no memory; the type in the configuration is that of a checkpoint, not of training."""
    model = load_model(write_config("opt", dtype="bfloat16")).build_on_meta()
    assert all(
        each.is_meta and each.dtype is torch.float32 for each in model.parameters()
    )


def test_digest_tells_architectures_apart(write_config):
    """Equal shapes give equal digests, one changed width another one."""
    digest = load_model(write_config("gpt2")).digest
    assert digest == load_model(write_config("gpt2")).digest
    assert digest != load_model(write_config("gpt2", n_inner=64)).digest
    assert len(digest) == 64


@pytest.mark.parametrize(
    ("function", "kind", "shape"),
    [
        ("mlp", "features", (3, 8)),
        ("token_chain", "tokens", (3, 5)),
        ("with_example", "images", (3, 3, 8, 8)),
        ("transformer", "tokens", (3, 5)),
    ],
)
def test_callable_builds_a_model_that_takes_its_example_inputs(
    function: str, kind: str, shape: tuple[int, ...]
):
    """The kind of input is told by the example or by the first layer."""
    source = load_model(f"{CALLABLES}:{function}")
    (inputs,) = source.example_inputs(3, 5)
    assert (source.input_kind, tuple(inputs.shape)) == (kind, shape)
    source.build()(inputs)
    assert source.cut().layers


@pytest.mark.parametrize(
    ("reference", "error", "words"),
    [
        ("gpt-2", UnknownNameError, "did you mean gpt2"),
        ("nothing-like-it-at-all", UnknownNameError, "use one of"),
        ("no/such/config.json", DocumentError, "no such file"),
        ("no_such_package.module:build", DocumentError, "cannot import"),
        (f"{CALLABLES}:missing", DocumentError, "no callable 'missing'"),
        (f"{CALLABLES}:NOT_CALLABLE", DocumentError, "no callable"),
        (f"{CALLABLES}:failing", DocumentError, "RuntimeError: no weights today"),
        (f"{CALLABLES}:not_a_module", DocumentError, "returned int"),
        (f"{CALLABLES}:same_every_time", DocumentError, "same module"),
        (f"{CALLABLES}:on_its_own_device", DocumentError, "device of its own choice"),
        (f"{CALLABLES}:convolutions", UnsupportedError, "example inputs"),
    ],
)
def test_wrong_references_are_refused_with_a_hint(
    reference: str, error: type[Exception], words: str
):
    """Every mistake is an error of the house that says what to do instead."""
    with pytest.raises(error, match=words) as caught:
        load_model(reference)
    assert all(problem.hint for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "lama"}, UnknownNameError, "did you mean .*llama"),
        ({"model_type": None}, DocumentError, "model_type is missing"),
        ({"hidden_size": "wide"}, DocumentError, "llama"),
        ({"num_attention_heads": 5, "head_dim": None}, DocumentError, "llama"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            UnsupportedError,
            "use .*LlamaForCausalLM",
        ),
    ],
)
def test_broken_configurations_are_refused(
    change: dict, error: type[Exception], words: str, write_config
):
    """A configuration that transformers cannot take is a document error, not a traceback."""
    with pytest.raises(error, match=words):
        load_model(write_config("llama", **change))


def test_config_that_is_no_object_is_refused(tmp_path: Path):
    """A JSON list describes no model."""
    path = tmp_path / "list.json"
    path.write_text(json.dumps([1]))
    with pytest.raises(DocumentError, match="no JSON object"):
        load_model(str(path))


def test_module_of_another_model_is_refused(write_config):
    """A cut holds for what its own source builds; another model is told by a missing module."""
    source = load_model(write_config("llama"))
    assert source.cut(source.build()) is source.cut()
    with pytest.raises(MismatchError, match=r"without 'model\.embed_tokens'"):
        source.cut(load_model(write_config("gpt2")).build())
