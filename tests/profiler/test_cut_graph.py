"""Stages of any model against the whole model."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from profiler.cut_trace import output_tensors
from profiler.models import ModelSource, load_model
from tests.profiler.conftest import SMALL

GRAPHS = "tests.profiler.graphs"
CONFIGS = {
    "t5": {
        "model_type": "t5",
        "vocab_size": 96,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.1,
    },
    "vit": {
        "model_type": "vit",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "image_size": 16,
        "patch_size": 8,
    },
    "resnet": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [2, 2],
        "layer_type": "basic",
        "image_size": 32,
    },
    "albert": {
        "model_type": "albert",
        "vocab_size": 96,
        "embedding_size": 8,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        **SMALL,
    },
}
CALLABLES = ("unet", "resnet", "diffusion", "pairwise", "mixture", "plain")
MODELS = (*CALLABLES, *(f"{name}.json" for name in CONFIGS))


def _load(name: str, folder: Path) -> ModelSource:
    if not name.endswith(".json"):
        return load_model(f"{GRAPHS}:{name}")
    path = folder / name
    path.write_text(json.dumps(CONFIGS[name.removesuffix(".json")]))
    return load_model(str(path))


def _build(source: ModelSource) -> nn.Module:
    torch.manual_seed(0)
    return source.build()


def _seed_layers(source: ModelSource, stage: nn.Module, indices: range) -> None:
    """Dropout must draw the same in every split: the layers seed it, as the executor's streams do."""

    def seed(number: int, module: nn.Module, arguments: object) -> None:
        torch.manual_seed(number)

    for index in indices:
        for place, part in enumerate(source.cut().parts(stage, index).values()):
            part.register_forward_pre_hook(partial(seed, 100 * index + place))


def _loss(outputs: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([output.float().square().mean() for output in outputs]).sum()


def _run(source: ModelSource, bounds: tuple[int, ...], inputs: tuple[Tensor, ...], mode: str = "none"):
    """Outputs, gradients by name (summed over the copies of shared parameters) and buffers of a split, every boundary
    detached as between processes."""
    cut = source.cut()
    spans = list(itertools.pairwise((0, *bounds, len(cut.layers))))
    received: list[list[Tensor]] = []
    sent: list[tuple[Tensor, ...]] = []
    stages = []
    given = inputs
    for start, stop in spans:
        recompute = {i: mode for i in range(start, stop) if cut.layers[i].recomputable and mode != "none"}
        stage = cut.stage(_build(source), start, stop, recompute=recompute)
        _seed_layers(source, stage, range(start, stop))
        leaves = [each.detach().requires_grad_(each.is_floating_point() and start > 0) for each in given]
        output = stage(*leaves)
        given = output if isinstance(output, tuple) else (output,)
        assert not any(tensor._is_view() for tensor in given)
        received.append(leaves)
        sent.append(given)
        stages.append(stage)
    _loss(given).backward()
    for outputs, leaves in reversed(list(zip(sent, received[1:], strict=False))):
        pairs = [(out, leaf.grad) for out, leaf in zip(outputs, leaves, strict=True) if out.requires_grad]
        torch.autograd.backward(*zip(*[pair for pair in pairs if pair[1] is not None], strict=True))
    gradients: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
        buffers |= {name: value for name, value in stage.named_buffers() if "running" in name or "tracked" in name}
    for shared in cut.shared_parameters:
        total = sum(gradients.pop(name) for name in shared.names if name in gradients)
        gradients[shared.names[0]] = total
    return tuple(output.detach() for output in given), gradients, buffers


def _assert_same(found, expected) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_every_split_equals_one_stage(name: str, tmp_path: Path):
    """Outputs, gradients and running statistics are those of a single stage, wherever the model is split in two, and
    with one layer per stage, recomputed or not."""
    source = _load(name, tmp_path)
    count = len(source.cut().layers)
    inputs = source.example_inputs(3, 6)
    whole = _run(source, (), inputs)
    for boundary in range(1, count):
        _assert_same(_run(source, (boundary,), inputs), whole)
    _assert_same(_run(source, tuple(range(1, count)), inputs, "full"), whole)


@pytest.mark.parametrize("name", MODELS)
def test_one_stage_equals_the_users_model(name: str, tmp_path: Path):
    """Without dropout, the single stage computes what the user's own forward computes, with all of its gradients."""
    source = _load(name, tmp_path)
    inputs = source.example_inputs(3, 6)
    model, stage = (
        part.train() for part in (_build(source), source.cut().stage(_build(source), 0, len(source.cut().layers)))
    )
    for part in (*model.modules(), *stage.modules()):
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    torch.manual_seed(1)
    named = dict(zip(source.keywords, inputs, strict=True)) if source.keywords else {}
    expected = output_tensors(model(**named) if named else model(*inputs))
    torch.manual_seed(1)
    found = stage(*inputs)
    found = found if isinstance(found, tuple) else (found,)
    _loss(expected).backward()
    _loss(found).backward()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    gradients = {id(each): each.grad for each in model.parameters()}
    held = dict(stage.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        if gradients[id(parameter)] is not None:
            torch.testing.assert_close(held[parameter_name].grad, parameter.grad, msg=parameter_name)
