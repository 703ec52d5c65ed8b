"""Initial values do not depend on the layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from planner.errors import UnsupportedError
from planner.executor.checkpoint.materialise import materialise
from planner.profiler.models import ModelSource
from tests.executor.plans import CONFIGS, source_of

CPU = torch.device("cpu")


def _build(source: ModelSource, start: int, stop: int, seed: int = 3) -> nn.Module:
    cut = source.cut()
    return materialise(
        source, lambda model: cut.stage(model, start, stop), device=CPU, seed=seed
    )


@pytest.mark.parametrize("name", [*CONFIGS, "mlp"])
def test_a_stage_starts_as_the_same_part_of_the_whole(
    name: str, tmp_path: Path
) -> None:
    """Parameters and buffers of any stage equal those of the whole model, bit for bit, under the same names."""
    source = source_of(name, tmp_path)
    layers = len(source.cut().layers)
    whole = _build(source, 0, layers)
    values = dict(whole.named_parameters(remove_duplicate=False)) | dict(
        whole.named_buffers()
    )
    for start, stop in [(0, 1), (0, 3), (1, 4), (3, layers), (layers - 1, layers)]:
        stage = _build(source, start, stop)
        for key, value in (
            *stage.named_parameters(remove_duplicate=False),
            *stage.named_buffers(),
        ):
            assert torch.equal(value, values[key]), key


def test_seeds_and_layers_differ(tmp_path: Path) -> None:
    """Another seed gives other values, and so does another layer."""
    source = source_of("llama", tmp_path)
    first, second = (
        dict(_build(source, 0, 3, seed).named_parameters()) for seed in (1, 2)
    )
    name = "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(first[name.format(0)], second[name.format(0)])
    assert not torch.equal(first[name.format(0)], first[name.format(1)])


def test_values_follow_the_models_own_rules(tmp_path: Path) -> None:
    """GPT-2 draws weights with deviation 0.02, scales residual projections by 1/sqrt(2 layers), and zeroes biases."""
    stage = _build(source_of("gpt2", tmp_path), 0, 6)
    values = {name: value.detach() for name, value in stage.named_parameters()}
    assert float(values["transformer.wte.weight"].std()) == pytest.approx(
        0.02, rel=0.05
    )
    assert float(values["transformer.h.0.mlp.c_proj.weight"].std()) == pytest.approx(
        0.02 / 8**0.5, rel=0.1
    )
    assert not values["transformer.h.0.mlp.c_fc.bias"].any()
    assert bool((values["transformer.h.0.ln_1.weight"] == 1).all())


def test_tied_copies_start_equal(tmp_path: Path) -> None:
    """The head's copy of the embedding is drawn from the embedding's stream when the embedding is elsewhere."""
    source = source_of("gpt2", tmp_path)
    embedding = dict(_build(source, 0, 1).named_parameters())["transformer.wte.weight"]
    head = dict(_build(source, 5, 6).named_parameters())["lm_head.weight"]
    assert torch.equal(embedding, head)


def test_ties_within_a_stage_stay_ties(tmp_path: Path) -> None:
    """One parameter under two names is materialised once."""
    whole = _build(source_of("gpt2", tmp_path), 0, 6)
    assert whole.get_parameter("lm_head.weight") is whole.get_parameter(
        "transformer.wte.weight"
    )


def test_rotary_frequencies_are_real(tmp_path: Path) -> None:
    """Buffers that no checkpoint holds carry their computed values, not what memory happened to hold."""
    stage = _build(source_of("llama", tmp_path), 2, 3)
    frequencies = dict(stage.named_buffers())["model.rotary_emb.inv_freq"]
    assert torch.allclose(frequencies, 10000.0 ** (-torch.arange(0, 8, 2) / 8))


def test_the_callers_random_stream_goes_on(tmp_path: Path) -> None:
    """Building a stage draws nothing from the global generator."""
    source = source_of("gpt2", tmp_path)
    source.cut()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    _build(source, 0, 2)
    assert torch.equal(torch.rand(3), expected)


def test_parameter_without_a_rule_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `_init_weights` leaves out would start as garbage; the error names it."""
    from transformers import GPT2PreTrainedModel

    monkeypatch.setattr(GPT2PreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(
        UnsupportedError,
        match=r"gives the parameter 'transformer\.wte\.weight' no value",
    ):
        _build(source_of("gpt2", tmp_path), 0, 1)
