"""Networks that transformers does not have: as many parameters as published, and they train."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from planner.profiler import catalogue
from planner.profiler.networks import BUILDERS
from planner.profiler.networks.amoebanet import FactorizedReduction, amoebanet_d
from planner.profiler.networks.dit import dit
from planner.profiler.networks.gnmt import gnmt
from planner.profiler.networks.unet import unet


def parameters(build, *arguments: int) -> int:
    """Elements of the network, built without storage."""
    with torch.device("meta"):
        network: nn.Module = build(*arguments)
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("convolutions", "channels", "published"),
    [
        (6, 72, 362.2e6),
        (11, 128, 2.21e9),
        (24, 128, 4.99e9),
        (24, 160, 7.80e9),
        (48, 160, 15.82e9),
    ],
)
def test_unet_has_the_parameters_of_torchgpipe(
    convolutions: int, channels: int, published: float
):
    """The table of torchgpipe's memory benchmark, to its last digit."""
    assert parameters(unet, 5, convolutions, channels, 1) == pytest.approx(
        published, rel=2e-3
    )


@pytest.mark.parametrize(
    ("layers", "filters", "gpipe", "torchgpipe"),
    [
        (18, 208, 82e6, 81.5e6),
        (18, 416, 318e6, 319.0e6),
        (18, 544, 542e6, 542.7e6),
        (36, 544, 1.05e9, 1.06e9),
        (72, 512, 1.8e9, 1.84e9),
    ],
)
def test_amoebanet_has_the_parameters_of_gpipe(
    layers: int, filters: int, gpipe: float, torchgpipe: float
):
    """Table 1 of GPipe, as rounded there, and torchgpipe's table of the same sizes to its last digit."""
    found = parameters(amoebanet_d, layers, filters, 1000)
    assert found == pytest.approx(gpipe, rel=0.03)
    assert found == pytest.approx(torchgpipe, rel=4e-3)


@pytest.mark.parametrize(
    ("depth", "width", "heads", "published"),
    [
        (12, 384, 6, 33e6),
        (12, 768, 12, 130e6),
        (24, 1024, 16, 458e6),
        (28, 1152, 16, 675e6),
    ],
)
def test_dit_has_the_parameters_of_its_paper(
    depth: int, width: int, heads: int, published: float
):
    """DiT-S, -B, -L and -XL with patches of 2, table 4."""
    assert parameters(dit, depth, width, heads, 2, 32, 4, 1000) == pytest.approx(
        published, rel=5e-3
    )


@pytest.mark.parametrize("layers", [4, 8])
def test_gnmt_has_the_parameters_of_its_layers(layers: int):
    """Wu et al. 2016, section 3: an LSTM has 4 h (x + h + 2) parameters; encoder and decoder share the embedding."""
    h, vocabulary = 1024, 32320

    def lstm(x: int) -> int:
        return 4 * h * (x + h + 2)

    encoder = 2 * lstm(h) + lstm(2 * h) + (layers - 2) * lstm(h)
    decoder = lstm(h) + (layers - 1) * lstm(2 * h)
    attention = 2 * h * h + 2 * h
    expected = vocabulary * h + encoder + decoder + attention + vocabulary * (h + 1)
    assert parameters(gnmt, layers, h, vocabulary) == expected


def test_factorised_reduction_sees_every_second_diagonal():
    """The two halves read the pixels at even and at odd places, which batch normalisation of one kernel shows."""
    reduction = FactorizedReduction(1, 2).eval()
    for weight in (reduction.even.weight, reduction.odd.weight):
        nn.init.ones_(weight)
    images = torch.arange(16.0).reshape(1, 1, 4, 4)
    even, odd = reduction(images)[0].round()
    assert even.tolist() == [[0, 2], [8, 10]]
    assert odd.tolist() == [[5, 7], [13, 15]]


SMALL: dict[str, tuple[dict[str, object], tuple[Tensor, ...], tuple[int, ...]]] = {
    "amoebanet-d": (
        {"layers": 3, "filters": 16, "classes": 5},
        (torch.randn(2, 3, 64, 64),),
        (2, 5),
    ),
    "dit": (
        {
            "depth": 2,
            "width": 32,
            "heads": 4,
            "patch": 2,
            "side": 8,
            "channels": 4,
            "classes": 10,
        },
        (torch.randn(2, 4, 8, 8), torch.tensor([3, 900]), torch.tensor([1, 9])),
        (2, 8, 8, 8),
    ),
    "gnmt": (
        {"layers": 3, "width": 16, "vocabulary": 50},
        (torch.randint(50, (2, 7)), torch.randint(50, (2, 5))),
        (2, 5, 50),
    ),
    "resnet": (
        {"blocks": [1, 1, 1, 1], "classes": 5},
        (torch.randn(2, 3, 32, 32),),
        (2, 5),
    ),
    "unet": (
        {"depth": 2, "convolutions": 2, "channels": 4, "classes": 3},
        (torch.randn(2, 3, 16, 16),),
        (2, 3, 16, 16),
    ),
    "vgg": (
        {"stages": [[2], [2], [2], [2], [2]], "classes": 5},
        (torch.randn(2, 3, 224, 224),),
        (2, 5),
    ),
}


@pytest.mark.parametrize("architecture", BUILDERS)
def test_every_parameter_gets_a_gradient(architecture: str):
    """A small network of every family trains: outputs of the right shape, no parameter outside of the graph."""
    arguments, inputs, shape = SMALL[architecture]
    network = BUILDERS[architecture](**arguments).train()
    output = network(*inputs)
    assert output.shape == shape
    output.square().mean().backward()
    idle = [
        name
        for name, each in network.named_parameters()
        if each.requires_grad and each.grad is None
    ]
    assert idle == []


def test_every_entry_names_a_builder():
    """No catalogue entry asks for an architecture that is not there, and every architecture is asked for."""
    entries = [catalogue.entry(name) for name in catalogue.names()]
    assert {
        each.network.architecture for each in entries if each.network is not None
    } == set(BUILDERS)
