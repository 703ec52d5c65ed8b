"""Networks of the catalogue that transformers does not have, as plain torch modules: one file per family.

A builder takes the arguments of a catalogue entry's `network` and returns the network in training mode, under torch's
default device and data type.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from planner.profiler.catalogue import Network
from planner.profiler.networks.amoebanet import amoebanet_d
from planner.profiler.networks.dit import dit
from planner.profiler.networks.gnmt import gnmt
from planner.profiler.networks.resnet import resnet
from planner.profiler.networks.unet import unet
from planner.profiler.networks.vgg import vgg

__all__ = [
    "BUILDERS",
    "amoebanet_d",
    "build_network",
    "dit",
    "gnmt",
    "resnet",
    "unet",
    "vgg",
]

BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "amoebanet-d": amoebanet_d,
    "dit": dit,
    "gnmt": gnmt,
    "resnet": resnet,
    "unet": unet,
    "vgg": vgg,
}


def build_network(network: Network) -> nn.Module:
    """A new network of this architecture."""
    return BUILDERS[network.architecture](**network.arguments)
