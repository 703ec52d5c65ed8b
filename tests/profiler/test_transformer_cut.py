"""Stages of transformers against the whole model."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from planner.profiler.models import ModelSource, load_model
from planner.spec.profile import RecomputeMode
from tests.profiler.conftest import TINY

FAMILIES = tuple(TINY)


def _build(source: ModelSource) -> nn.Module:
    torch.manual_seed(0)
    return source.build()


def _gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.grad.clone()
        for name, value in module.named_parameters(remove_duplicate=False)
        if value.grad is not None
    }


def _run_whole(
    model: nn.Module, inputs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(inputs).logits
    logits.square().mean().backward()
    return logits.detach(), _gradients(model)


def _run_stages(
    stages: list[nn.Module], inputs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """As separate processes would: every boundary detached, gradients handed back by hand."""
    received, sent = [], []
    tensor = inputs
    for stage in stages:
        given = (
            tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
        )
        received.append(given)
        tensor = stage(given)
        assert not tensor._is_view()
        sent.append(tensor)
    logits = tensor.detach()
    tensor.square().mean().backward()
    for output, following in reversed(list(zip(sent, received[1:], strict=False))):
        output.backward(following.grad)
    gradients: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, gradient in _gradients(stage).items():
            assert name not in gradients, "no parameter stands in two stages"
            gradients[name] = gradient
    return logits, gradients


def _tied(gradients: dict[str, torch.Tensor], cut) -> dict[str, torch.Tensor]:
    """Sum the gradients of the copies of a shared parameter, as the embedding group's all-reduce does."""
    total = dict(gradients)
    for shared in cut.shared_parameters:
        copies = {
            id(gradients[name]): gradients[name]
            for name in shared.names
            if name in gradients
        }
        for name in shared.names:
            total[name] = sum(copies.values())
    return total


def _assert_same(
    source: ModelSource,
    *splits: tuple[int, ...],
    modes: Sequence[RecomputeMode] = ("none",),
) -> None:
    """Of all splits, by their bounds, in all modes."""
    cut = source.cut()
    inputs = source.example_inputs(2, 12)[0]
    whole = _build(source)
    expected, expected_gradients = _run_whole(copy.deepcopy(whole), inputs)
    for bounds, mode in itertools.product(splits, modes):
        stages = [
            cut.stage(
                copy.deepcopy(whole),
                start,
                stop,
                recompute={
                    index: mode
                    for index in range(start, stop)
                    if cut.layers[index].recomputable
                },
            )
            for start, stop in itertools.pairwise((0, *bounds, len(cut.layers)))
        ]
        logits, gradients = _run_stages(stages, inputs)
        torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)
        if len(stages) > 1:
            gradients = _tied(gradients, cut)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(
                gradients[name], gradient, atol=1e-6, rtol=1e-5, msg=name
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_split_into_two_equals_the_whole_model(family: str, write_config):
    """Logits and gradients of two stages are the whole model's, wherever the cut is made."""
    source = load_model(write_config(family))
    _assert_same(
        source, *((boundary,) for boundary in range(1, len(source.cut().layers)))
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_one_layer_per_stage_equals_the_whole_model(family: str, write_config):
    """The finest split is exact too, also with every block recomputed, whole or selectively."""
    source = load_model(write_config(family))
    _assert_same(
        source, tuple(range(1, len(source.cut().layers))), modes=get_args(RecomputeMode)
    )


def test_blocks_that_return_tuples_are_cut(tmp_path: Path):
    """Of which the model's loop takes the first: from an absent block too, whose tensor it would take a sample of."""
    sizes = {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    path = tmp_path / "falcon.json"
    path.write_text(
        json.dumps(
            {"model_type": "falcon", **sizes, "bos_token_id": 0, "eos_token_id": 0}
        )
    )
    _assert_same(load_model(str(path)), (1, 2, 3, 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_stage_of_all_layers_is_the_whole_model(family: str, write_config):
    """A pipeline of one rank runs the model as it is."""
    _assert_same(load_model(write_config(family)), ())


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_own_each_parameter_once_under_its_own_name(family: str, write_config):
    """On meta tensors, the stages' parameter names are the model's, divided; only shared ones stand twice."""
    source = load_model(write_config(family))
    cut = source.cut()
    names = {name for name, _ in source.build_on_meta().named_parameters()}
    aliases = {
        name: shared.names[0]
        for shared in cut.shared_parameters
        for name in shared.names
    }
    found = [
        aliases.get(name, name)
        for index in range(len(cut.layers))
        for name, value in cut.stage(
            source.build_on_meta(), index, index + 1
        ).named_parameters()
        if value.is_meta
    ]
    assert sorted(set(found)) == sorted(names)
    assert len(found) == len(names) + sum(
        len(shared.layers) - 1 for shared in cut.shared_parameters
    )


def test_tied_embeddings_are_named_with_their_owner_first(write_config):
    """GPT-2's head shares the token embedding; llama's does not unless the configuration says so."""
    (shared,) = load_model(write_config("gpt2")).cut().shared_parameters
    assert shared.names == ("transformer.wte.weight", "lm_head.weight")
    assert shared.layers == ("embedding", "head")
    assert shared.parameters == 96 * 32
    assert not load_model(write_config("llama")).cut().shared_parameters
    assert (
        load_model(write_config("llama", tie_word_embeddings=True))
        .cut()
        .shared_parameters
    )


def test_equal_blocks_share_a_kind_and_sliding_ones_do_not(write_config):
    """Blocks of one structure are one kind; gemma3 alternates two sorts of attention."""
    kinds = [layer.kind for layer in load_model(write_config("llama")).cut().layers]
    assert kinds == ["embedding", *["LlamaDecoderLayer"] * 3, "head"]
    sliding = [layer.kind for layer in load_model(write_config("gemma3")).cut().layers]
    assert sliding[1] == sliding[3] != sliding[2]


def test_dropout_before_the_blocks_runs_on_the_first_stage_only(write_config):
    """A later stage of GPT-2 hands the received tensor to its first block untouched."""
    source = load_model(write_config("gpt2", embd_pdrop=0.9))
    stage = source.cut().stage(_build(source), 1, 2)
    hidden = torch.randn(2, 8, 32)
    assert torch.equal(stage(hidden), stage(hidden))
    assert not any(
        isinstance(part, nn.Dropout) and part.p == 0.9 for part in stage.modules()
    )


def test_recomputed_block_keeps_only_its_input(write_config):
    """What autograd saves for a recomputed block is the hidden tensor alone."""
    source = load_model(write_config("llama"))
    stage = source.cut().stage(_build(source), 1, 2, recompute={1: "full"})
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    hidden = torch.randn(2, 8, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stage(hidden)
    assert {tensor.untyped_storage().data_ptr() for tensor in saved} == {
        hidden.untyped_storage().data_ptr()
    }


def test_layer_outputs_are_what_the_layers_hand_on(write_config):
    """Meta outputs have the shapes of a real run: hidden tensors, then logits."""
    outputs = load_model(write_config("bert")).borders(3, 10).makes
    assert [tuple(output.shape) for (output,) in outputs] == [(3, 10, 32)] * 4 + [
        (3, 10, 96)
    ]
    assert all(output.is_meta for (output,) in outputs)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_cut_of_a_deep_copy_is_the_same(family: str, write_config):
    """A cut is a plain value: made twice, it is equal."""
    source = load_model(write_config(family))
    assert (
        load_model(write_config(family)).cut()
        == source.cut()
        == copy.copy(source.cut())
    )
