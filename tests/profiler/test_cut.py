"""Cutting nn.Sequential, and the rules that hold for every cut."""

from __future__ import annotations

import copy
import itertools
from typing import get_args

import pytest
import torch
from torch import nn

from planner.errors import LayoutError, UnsupportedError
from planner.profiler.cut import cut_model
from planner.profiler.kinds import name_kinds
from planner.profiler.models import load_model
from planner.spec.profile import RecomputeMode

CALLABLES = "tests.profiler.callables"


def _meta(module: nn.Module) -> nn.Module:
    return module.to("meta")


@pytest.mark.parametrize("function", ["mlp", "token_chain", "with_example"])
@pytest.mark.parametrize("recompute", get_args(RecomputeMode))
def test_stages_of_a_sequential_equal_the_whole(
    function: str, recompute: RecomputeMode
):
    """Outputs, gradients and running statistics agree for one layer per stage, recomputed or not."""
    source = load_model(f"{CALLABLES}:{function}")
    cut = source.cut()
    inputs = source.example_inputs(4, 5)[0]
    torch.manual_seed(0)
    whole = source.build()
    expected = whole(inputs)
    expected.square().sum().backward()
    torch.manual_seed(0)
    again = source.build()
    output = inputs
    states: dict[str, torch.Tensor] = {}
    for start, stop in itertools.pairwise(range(len(cut.layers) + 1)):
        mode = recompute if cut.layers[start].recomputable else "none"
        stage = cut.stage(again, start, stop, recompute={start: mode})
        output = stage(output)
        states |= stage.state_dict(keep_vars=True)
    output.square().sum().backward()
    torch.testing.assert_close(output, expected)
    for name, value in whole.state_dict(keep_vars=True).items():
        torch.testing.assert_close(states[name], value, msg=name)
        if isinstance(value, nn.Parameter):
            torch.testing.assert_close(states[name].grad, value.grad, msg=name)


def test_activations_in_place_do_not_begin_a_stage():
    """A stage trains on what it receives, which no layer may change in place then."""

    def model() -> nn.Sequential:
        parts = (nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Hardtanh(inplace=True))
        return nn.Sequential(
            nn.Linear(4, 4), parts[0], nn.Linear(4, 4), *parts[1:], nn.Linear(4, 2)
        )

    cut = cut_model(_meta(model()), torch.empty(3, 4, device="meta"))
    assert [layer.modules for layer in cut.layers] == [
        ("0", "1"),
        ("2", "3", "4"),
        ("5",),
    ]
    whole, inputs = model(), torch.randn(3, 4)
    output = inputs
    for index in range(3):
        given = output.detach().requires_grad_()
        output = cut.stage(copy.deepcopy(whole), index, index + 1)(given)
        output.sum().backward()
        assert given.grad is not None
    torch.testing.assert_close(output, whole(inputs))


def test_stage_that_ends_in_a_view_returns_a_copy():
    """Flatten returns a view, which pipelining could not detach in place."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(8, 2))
    cut = cut_model(
        _meta(nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(8, 2))),
        torch.empty(3, 2, 4, device="meta"),
    )
    output = cut.stage(model, 0, 2)(torch.randn(3, 2, 4))
    assert output.shape == (3, 8)
    assert not output._is_view()


def test_layers_of_one_kind_agree_in_structure_and_input():
    """Equal linear layers share a kind; an equal pooling at another resolution, or another stride, does not."""
    model = nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1),
        nn.MaxPool2d(2),
        nn.MaxPool2d(2),
        nn.Conv2d(2, 2, 3, padding=1),
        nn.Conv2d(2, 2, 3, padding=1),
        nn.Conv2d(2, 2, 3, padding=1, stride=2),
    )
    cut = cut_model(_meta(model), torch.empty(1, 2, 16, 16, device="meta"))
    assert [layer.kind for layer in cut.layers] == [
        "Conv2d",
        "MaxPool2d",
        "MaxPool2d-2",
        "Conv2d-2",
        "Conv2d-2",
        "Conv2d-3",
    ]


def test_kind_names_are_one_to_one_with_signatures():
    """The same signature gets the same name, another one another."""
    assert name_kinds([1, 2, 1, 3], ["A", "A", "A", "B"]) == ["A", "A-2", "A", "B"]


def test_tied_layers_of_a_sequential_are_shared():
    """A weight used by two children is one shared parameter of both layers."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        )
        model[2].weight = model[0].weight
    (shared,) = cut_model(
        model, torch.empty(1, 3, dtype=torch.long, device="meta")
    ).shared_parameters
    assert (shared.names, shared.layers, shared.parameters) == (
        ("0.weight", "2.weight"),
        ("0", "2"),
        24,
    )


def test_frozen_statistics_of_cumulative_batch_norm():
    """Batch norm without momentum averages over its calls: recomputation must not count as one."""
    cut = load_model(f"{CALLABLES}:with_example").cut()
    model, plain = (load_model(f"{CALLABLES}:with_example").build() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    model[1][1].momentum = plain[1][1].momentum = None
    stage = cut.stage(model, 0, 3, recompute={1: "full"})
    images = torch.randn(4, 3, 8, 8)
    for _ in range(2):
        stage(images).sum().backward()
        plain(images).sum().backward()
    assert stage.state_dict()["1.1.num_batches_tracked"] == 2
    torch.testing.assert_close(
        stage.state_dict()["1.1.running_var"], plain.state_dict()["1.1.running_var"]
    )


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (0, 6), (3, 1)])
def test_impossible_ranges_are_refused(start: int, stop: int):
    """A stage must hold at least one layer of the model."""
    source = load_model(f"{CALLABLES}:mlp")
    with pytest.raises(LayoutError, match="the model has 5"):
        source.cut().stage(source.build_on_meta(), start, stop)


def test_recompute_outside_of_the_stage_is_refused():
    """A layer can be recomputed only where it stands."""
    source = load_model(f"{CALLABLES}:mlp")
    with pytest.raises(LayoutError, match="layer 3 is to be recomputed"):
        source.cut().stage(source.build_on_meta(), 0, 2, recompute={3: "full"})


def test_recompute_of_the_last_layer_is_refused(write_config):
    """The loss keeps the last layer's output anyway; embedding and head of a transformer are not offered either."""
    source = load_model(f"{CALLABLES}:mlp")
    with pytest.raises(UnsupportedError, match="cannot be recomputed"):
        source.cut().stage(source.build_on_meta(), 0, 5, recompute={4: "full"})
    offered = [
        layer.recomputable for layer in load_model(write_config("gpt2")).cut().layers
    ]
    assert offered == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5)),
            "does not run on meta tensors",
        ),
        (nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4)), "does not run"),
    ],
)
def test_chains_that_do_not_hold_are_refused(model: nn.Sequential, words: str):
    """A child that cannot follow the one before it is named."""
    with pytest.raises(UnsupportedError, match=words):
        cut_model(_meta(model), torch.empty(2, 4, device="meta"))
