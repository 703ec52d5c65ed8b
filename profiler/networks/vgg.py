"""VGG: Simonyan and Zisserman 2015, "Very Deep Convolutional Networks for Large-Scale Image Recognition", table 1.

A chain: every convolution is one child.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def vgg(stages: list[list[int]], classes: int) -> nn.Sequential:
    """VGG: 3x3 convolutions, each stage ended by a pooling. Takes (batch, 3, 224, 224) images."""
    layers: list[tuple[str, nn.Module]] = []
    inputs = 3
    for stage, widths in enumerate(stages, start=1):
        for index, width in enumerate(widths, start=1):
            parts: list[nn.Module] = [
                nn.Conv2d(inputs, width, kernel_size=3, padding=1),
                nn.ReLU(inplace=True),
            ]
            if index == len(widths):
                parts.append(nn.MaxPool2d(kernel_size=2, stride=2))
            layers.append((f"conv{stage}_{index}", nn.Sequential(*parts)))
            inputs = width
    layers.append(("fc6", nn.Sequential(nn.Flatten(), *_dense(inputs * 7 * 7, 4096))))
    layers.append(("fc7", nn.Sequential(*_dense(4096, 4096))))
    layers.append(("fc8", nn.Linear(4096, classes)))
    return nn.Sequential(OrderedDict(layers))


def _dense(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout()
