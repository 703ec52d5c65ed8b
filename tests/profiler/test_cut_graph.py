"""Stages of any model against the whole model."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from planner.errors import LayoutError, UnknownNameError, UnsupportedError
from planner.profiler.count import profile
from planner.profiler.cut_trace import output_tensors
from planner.profiler.cut_whole import same_numbers
from planner.profiler.models import ModelSource, load_model
from tests.profiler.conftest import SMALL
from tests.profiler.test_saved import saved_by_model

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


def _run(
    source: ModelSource,
    bounds: tuple[int, ...],
    inputs: tuple[Tensor, ...],
    mode: str = "none",
):
    """Outputs, gradients by name (summed over the copies of shared parameters) and buffers of a split, every boundary
    detached as between processes."""
    cut = source.cut()
    spans = list(itertools.pairwise((0, *bounds, len(cut.layers))))
    received: list[list[Tensor]] = []
    sent: list[tuple[Tensor, ...]] = []
    stages = []
    given = inputs
    for start, stop in spans:
        recompute = {
            i: mode
            for i in range(start, stop)
            if cut.layers[i].recomputable and mode != "none"
        }
        stage = cut.stage(_build(source), start, stop, recompute=recompute)
        _seed_layers(source, stage, range(start, stop))
        leaves = [
            each.detach().requires_grad_(each.is_floating_point() and start > 0)
            for each in given
        ]
        output = stage(*leaves)
        given = output if isinstance(output, tuple) else (output,)
        assert not any(tensor._is_view() for tensor in given)
        received.append(leaves)
        sent.append(given)
        stages.append(stage)
    _loss(given).backward()
    for outputs, leaves in reversed(list(zip(sent, received[1:], strict=False))):
        pairs = [
            (out, leaf.grad)
            for out, leaf in zip(outputs, leaves, strict=True)
            if out.requires_grad
        ]
        torch.autograd.backward(
            *zip(*[pair for pair in pairs if pair[1] is not None], strict=True)
        )
    gradients: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
        buffers |= {
            name: value
            for name, value in stage.named_buffers()
            if "running" in name or "tracked" in name
        }
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
            torch.testing.assert_close(
                ours[name], value, atol=1e-6, rtol=1e-4, msg=name
            )


@pytest.mark.parametrize("name", MODELS)
def test_one_layer_per_stage_equals_one_stage(name: str, tmp_path: Path):
    """Outputs, gradients and running statistics are those of a single stage when every layer is a stage of its own,
    recomputed or not, and when the model is split in two."""
    source = _load(name, tmp_path)
    count = len(source.cut().layers)
    inputs = source.example_inputs(3, 6)
    whole = _run(source, (), inputs)
    _assert_same(_run(source, (count // 2,), inputs), whole)
    _assert_same(_run(source, tuple(range(1, count)), inputs), whole)
    _assert_same(_run(source, tuple(range(1, count)), inputs, "full"), whole)


@pytest.mark.parametrize("name", MODELS)
def test_one_stage_equals_the_users_model(name: str, tmp_path: Path):
    """Without dropout, the single stage computes what the user's own forward computes, with all of its gradients."""
    source = _load(name, tmp_path)
    inputs = source.example_inputs(3, 6)
    model, stage = (
        part.train()
        for part in (
            _build(source),
            source.cut().stage(_build(source), 0, len(source.cut().layers)),
        )
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
            torch.testing.assert_close(
                held[parameter_name].grad, parameter.grad, msg=parameter_name
            )


def _names(source: ModelSource) -> list[str]:
    return [layer.name for layer in source.cut().layers]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        (
            "unet",
            ["down1", "down2", "middle", "grow2", "up2", "grow1", "up1", "classes"],
        ),
        (
            "resnet",
            ["conv1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2", "fc"],
        ),
        (
            "diffusion",
            ["patch", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm"],
        ),
        ("pairwise", ["tokens", "layers.0.0", "layers.1.0", "layers.2.0", "scale"]),
        ("mixture", ["blocks.0", "blocks.1", "blocks.2", "head"]),
        ("plain", ["conv1", "conv2", "fc1", "fc2"]),
        (
            "t5.json",
            [
                *(
                    "encoder.embed_tokens",
                    "encoder.block.0",
                    "encoder.block.1",
                    "encoder.final_layer_norm",
                ),
                *("decoder.block.0", "decoder.block.1", "decoder.final_layer_norm"),
            ],
        ),
        (
            "vit.json",
            ["vit.embeddings", "vit.layers.0", "vit.layers.1", "vit.layernorm"],
        ),
    ],
)
def test_layers_are_what_people_call_blocks(
    name: str, layers: list[str], tmp_path: Path
):
    """Blocks of lists, levels and pairs are layers; residual branches and parallel experts are not torn apart."""
    assert _names(_load(name, tmp_path)) == layers


def test_every_parameter_belongs_to_a_layer_and_shared_ones_to_several(tmp_path: Path):
    """The layers' stages own the model's parameters under their own names, each once but the shared ones."""
    for name in ("unet", "diffusion", "pairwise", "t5.json", "albert.json"):
        source = _load(name, tmp_path)
        cut = source.cut()
        owned = [
            parameter
            for index in range(len(cut.layers))
            for parameter, _ in cut.layer(
                source.build_on_meta(), index
            ).named_parameters()
        ]
        shared = {each for group in cut.shared_parameters for each in group.names}
        assert {each for each, _ in source.build_on_meta().named_parameters()} <= set(
            owned
        )
        assert {each for each in owned if owned.count(each) > 1} <= shared


def test_skips_of_a_unet_carry_their_bytes(tmp_path: Path):
    """Each level's output skips to its counterpart: channels x height x width floats, from the last layer with it."""
    edges = {
        (edge.from_, edge.to): edge.bytes for edge in _load("unet", tmp_path).edges(0)
    }
    assert edges == {
        ("down2", "up1"): 4 * 16 * 16 * 4,
        ("middle", "up2"): 8 * 8 * 8 * 4,
    }


@pytest.mark.parametrize("name", ["unet", "diffusion", "t5.json", "pairwise"])
def test_boundary_is_output_and_skips(name: str, tmp_path: Path):
    """What the cost model adds up, a layer's output and the skips over it, is what a stage of one sample sends."""
    source = _load(name, tmp_path)
    borders, edges, names = source.borders(1, 8), source.edges(8), _names(source)
    order = {each: index for index, each in enumerate(names)}
    for last in range(len(names) - 1):
        over = sum(
            edge.bytes for edge in edges if order[edge.from_] <= last < order[edge.to]
        )
        sent = sum(tensor.nbytes for tensor in borders.crossing[last + 1])
        assert borders.output_bytes[last] + over == sent, names[last]


def test_encoder_output_reaches_every_decoder_layer(tmp_path: Path):
    """It travels from decoder layer to decoder layer, beside the position biases of one micro-batch."""
    edges = {
        (edge.from_, edge.to): edge for edge in _load("t5.json", tmp_path).edges(8)
    }
    edge = edges["decoder.block.0", "decoder.block.1"]
    assert (edge.bytes, edge.sequence_length) == (8 * 16 * 4, 8)
    assert edges["encoder.embed_tokens", "encoder.final_layer_norm"].bytes == 8 * 8, (
        "ids of the decoder"
    )


def test_the_user_names_the_cut(tmp_path: Path):
    """Layers start where the named modules first run, wherever they stand in the tree; the stages stay exact."""
    source = _load("resnet", tmp_path).cut_at(("layer2.*", "fc"))
    assert _names(source) == ["conv1", "layer2.0", "layer2.1", "layer2.2", "fc"]
    inner = _load("resnet", tmp_path).cut_at(("layer1.1.conv2", "layer2"))
    assert _names(inner) == ["conv1", "layer1.1.conv2", "layer2"]
    assert len(inner.borders(1, 0).makes[0]) == 2, "the branch, and what goes around it"
    inputs = inner.example_inputs(3, 0)
    _assert_same(_run(inner, (1, 2), inputs), _run(inner, (), inputs))


def test_language_models_take_named_cuts_too(write_config):
    """Named cuts of a transformers model are exact as well."""
    source = load_model(write_config("llama")).cut_at(("model.layers.1", "lm_head"))
    assert _names(source) == ["model.embed_tokens", "model.layers.1", "lm_head"]
    inputs = source.example_inputs(2, 6)
    _assert_same(_run(source, (1, 2), inputs), _run(source, (), inputs))


def test_unknown_name_in_a_cut_is_refused_with_the_nearest(tmp_path: Path):
    """A typing mistake is told with names that run."""
    with pytest.raises(
        UnknownNameError, match=r"no module 'layer3\.\*'.*did you mean layer"
    ):
        _load("resnet", tmp_path).cut_at(("layer3.*",)).cut()


def test_model_that_cannot_be_cut_is_one_layer_with_the_reason(tmp_path: Path):
    """A tensor that is neither parameter nor buffer nor made in the run cannot be followed: the model stays whole."""
    source = _load("untraceable", tmp_path)
    cut = source.cut()
    assert _names(source) == ["model"]
    assert "Untraceable uses a tensor" in cut.reason
    inputs = source.example_inputs(3, 0)
    torch.testing.assert_close(
        cut.stage(_build(source), 0, 1)(*inputs), _build(source)(*inputs)
    )
    counted = profile(source, sequence_length=0, micro_batch_sizes=(1,))
    assert counted.environment["cut"] == f"one layer: {cut.reason}"
    assert counted.layers[0].parameters == sum(
        each.numel() for each in source.blueprint.parameters()
    )


@pytest.mark.parametrize("name", ["reading", "halting"])
def test_model_that_reads_values_is_one_layer_counted_on_a_real_run(
    name: str, tmp_path: Path
):
    """Control flow by values stops on meta tensors, which is told with the module that does it; the model is counted
    whole, and keeps what autograd keeps of the same run."""
    source = _load(name, tmp_path)
    cut = source.cut()
    assert _names(source) == ["model"]
    assert cut.needs_values
    told = {"reading": "module 'gate' of Reading", "halting": "Halting"}[name]
    assert cut.reason.startswith(f"{told} does not run on meta tensors")
    counted = profile(source, sequence_length=0, micro_batch_sizes=(3,))
    assert counted.environment["cut"].endswith("others may take another way.")
    row = counted.layers[0].measurements[0]
    with same_numbers():
        inputs = source.example_inputs(3, 0)
    with same_numbers(), FlopCounterMode(display=False) as flops:
        assert row.activation_bytes == saved_by_model(source, inputs)
    assert row.forward_flops == flops.get_total_flops() > 0


def test_model_that_does_not_run_is_refused(tmp_path: Path):
    """What fails on real tensors too cannot be counted."""
    with pytest.raises(UnsupportedError, match="Failing does not run on meta tensors"):
        _load("failing", tmp_path).cut()


def test_functions_with_their_own_backward_are_followed(tmp_path: Path):
    """A torch.autograd.Function between modules is a step like any other."""
    source = _load("opaque", tmp_path)
    assert _names(source) == ["one", "two"]
    inputs = source.example_inputs(3, 0)
    _assert_same(_run(source, (1,), inputs), _run(source, (), inputs))


def test_stage_takes_other_sizes_and_types(tmp_path: Path):
    """One stage runs any micro-batch size, sequence length and type: it is traced anew."""
    source = _load("t5.json", tmp_path)
    stage = source.cut().stage(_build(source).eval(), 3, 5)
    for size, dtype in (
        ((2, 8), torch.float32),
        ((1, 5), torch.float32),
        ((4, 9), torch.bfloat16),
    ):
        stage.to(dtype)
        given = source.borders(*size).crossing
        zeros = [torch.zeros(each.shape, dtype=each.dtype) for each in given[3]]
        made = stage(
            *(each.to(dtype) if each.is_floating_point() else each for each in zeros)
        )
        assert [tuple(each.shape) for each in made] == [
            tuple(each.shape) for each in given[5]
        ]


def test_stage_refuses_what_no_size_gives(tmp_path: Path):
    """Tensors that cannot cross the border are refused, not run on."""
    source = _load("unet", tmp_path)
    stage = source.cut().stage(_build(source), 1, 3)
    with pytest.raises(LayoutError, match="does not take tensors of shapes"):
        stage(torch.zeros(2, 5, 16, 16))


def test_first_activation_in_place_does_not_change_what_was_received(tmp_path: Path):
    """A stage that starts with an in-place activation works on a copy: what was received may still be sent on."""
    source = _load("in_place", tmp_path).cut_at(("act", "last"))
    stage = source.cut().stage(_build(source), 1, 2)
    received = torch.randn(3, 8, requires_grad=True)
    before = received.detach().clone()
    stage(received).sum().backward()
    assert torch.equal(received, before)
    assert received.grad is not None
    assert not source.cut().layers[1].recomputable


def test_equal_blocks_share_a_kind(tmp_path: Path):
    """Blocks with equal steps, shapes and neighbours are one kind; another stride is not."""
    kinds = [layer.kind for layer in _load("diffusion", tmp_path).cut().layers]
    assert kinds == ["patch", *["Modulated"] * 4, "norm"]
    residual = [layer.kind for layer in _load("resnet", tmp_path).cut().layers]
    assert residual[1] == residual[2]
    assert residual[4] == residual[5] != residual[3]


def test_a_model_that_is_not_of_transformers_is_cut_without_importing_it() -> None:
    """The import takes two seconds, on every rank of a run."""
    code = (
        "import sys; from planner.profiler.models import load_model; source = load_model('tests.profiler.graphs:unet'); "
        "assert len(source.cut().layers) > 4; source.borders(2, 0); assert 'transformers' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2]
    )
