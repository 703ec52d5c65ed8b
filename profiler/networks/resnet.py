"""ResNet with bottleneck blocks: He et al. 2016, "Deep Residual Learning for Image Recognition", table 1.

A chain: every residual block is one child.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

EXPANSION = 4
"""Channels out of a bottleneck block per channel inside."""


def resnet(blocks: list[int], classes: int) -> nn.Sequential:
    """ResNet of bottleneck blocks; `blocks` per resolution. Takes (batch, 3, 224, 224) images."""
    layers: list[tuple[str, nn.Module]] = [("stem", _stem())]
    inputs, width = 64, 64
    for group, count in enumerate(blocks, start=1):
        for index in range(count):
            stride = 2 if group > 1 and index == 0 else 1
            layers.append(
                (f"group{group}_block{index}", Bottleneck(inputs, width, stride))
            )
            inputs = width * EXPANSION
        width *= 2
    layers.append(
        (
            "classifier",
            nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)
            ),
        )
    )
    return nn.Sequential(OrderedDict(layers))


def _stem() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution around a shortcut; the stride sits in the 3x3 one."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, width, kernel_size=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(
                width, width, kernel_size=3, stride=stride, padding=1, bias=False
            ),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, kernel_size=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(outputs),
            )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, inputs, height, width) -> (batch, 4 * width, height / stride, width / stride)."""
        output: Tensor = self.activation(self.residual(images) + self.shortcut(images))
        return output
