"""AmoebaNet-D: Real et al. 2019, "Regularized Evolution for Image Classifier Architecture Search", appendix D, sized by
(layers, filters) as in Huang et al. 2019, "GPipe", table 1.

Each cell takes the outputs of the two cells before it. Inside, five pairs of operations each add up to a new state. The
operations, and the states that are joined, are those of the reference implementation in TensorFlow; it differs from the
paper in what normal cells join, and it gives GPipe's numbers of parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

Operation = Callable[[int, int], nn.Module]
"""(channels, stride) -> what is done to a state."""
Step = tuple[int, Operation, int, Operation]
"""Left state, operation on it, right state, operation on it; states 0 and 1 are the cell's inputs."""


def amoebanet_d(layers: int, filters: int, classes: int) -> nn.Module:
    """AmoebaNet-D (layers, filters). Takes (batch, 3, 224, 224) images."""
    return AmoebaNet(layers, filters, classes)


def _normalised(
    inputs: int,
    outputs: int,
    kernel: int | tuple[int, int] = 1,
    stride: int | tuple[int, int] = 1,
) -> nn.Sequential:
    """ReLU, convolution and batch normalisation, as every convolution of the network."""
    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    padding = (sides[0] // 2, sides[1] // 2)
    convolution = nn.Conv2d(
        inputs, outputs, kernel_size=sides, stride=stride, padding=padding, bias=False
    )
    return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2d(outputs))


def _average_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(
        kernel_size=3, stride=stride, padding=1, count_include_pad=False
    )


def _max_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(kernel_size=3, stride=stride, padding=1)


def _max_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(kernel_size=2, stride=stride)


def _identity(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduction(channels, channels)


def _convolution_1x1(channels: int, stride: int) -> nn.Module:
    return _normalised(channels, channels, 1, stride)


def _convolution_3x3(channels: int, stride: int) -> nn.Module:
    inside = channels // 4
    return nn.Sequential(
        _normalised(channels, inside),
        _normalised(inside, inside, 3, stride),
        _normalised(inside, channels),
    )


def _convolution_1x7_7x1(channels: int, stride: int) -> nn.Module:
    inside = channels // 4
    return nn.Sequential(
        _normalised(channels, inside),
        _normalised(inside, inside, (1, 7), (1, stride)),
        _normalised(inside, inside, (7, 1), (stride, 1)),
        _normalised(inside, channels),
    )


NORMAL: tuple[Step, ...] = (
    (1, _convolution_1x1, 1, _max_3x3),
    (1, _identity, 0, _convolution_1x7_7x1),
    (0, _convolution_1x1, 0, _convolution_1x7_7x1),
    (2, _max_3x3, 2, _identity),
    (1, _average_3x3, 5, _convolution_1x1),
)
NORMAL_JOINED = (0, 3, 4, 6)
REDUCTION: tuple[Step, ...] = (
    (0, _max_2x2, 0, _max_3x3),
    (2, _identity, 1, _convolution_3x3),
    (2, _convolution_1x7_7x1, 2, _max_3x3),
    (3, _identity, 1, _max_2x2),
    (2, _average_3x3, 3, _convolution_1x1),
)
REDUCTION_JOINED = (4, 5, 6)


class FactorizedReduction(nn.Module):
    """Halves the sides: two 1x1 convolutions of stride 2, of the images and of the images moved by one pixel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.activation = nn.ReLU()
        self.shift = nn.ZeroPad2d((-1, 1, -1, 1))
        self.even = nn.Conv2d(inputs, outputs // 2, kernel_size=1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, kernel_size=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, inputs, height, width) -> (batch, outputs, height / 2, width / 2)."""
        images = self.activation(images)
        output: Tensor = self.norm(
            torch.cat((self.even(images), self.odd(self.shift(images))), dim=1)
        )
        return output


class Cell(nn.Module):
    """A normal cell, or one that halves the sides."""

    def __init__(
        self,
        before_last: int,
        last: int,
        channels: int,
        *,
        reduces: bool,
        last_reduced: bool,
    ) -> None:
        super().__init__()
        steps = REDUCTION if reduces else NORMAL
        self.joined: tuple[int, ...] = REDUCTION_JOINED if reduces else NORMAL_JOINED
        self.take_last = _normalised(last, channels)
        self.take_before_last: nn.Module = nn.Identity()
        if last_reduced:
            self.take_before_last = FactorizedReduction(before_last, channels)
        elif before_last != channels:
            self.take_before_last = _normalised(before_last, channels)
        self.pairs = tuple((left, right) for left, _, right, _ in steps)
        self.operations = nn.ModuleList(
            operation(channels, 2 if reduces and state < 2 else 1)
            for left, on_left, right, on_right in steps
            for state, operation in ((left, on_left), (right, on_right))
        )

    def forward(self, last: Tensor, before_last: Tensor) -> Tensor:
        """Outputs of the two cells before -> (batch, channels x states joined, height, width) or half the sides."""
        states = [self.take_last(last), self.take_before_last(before_last)]
        for index, (left, right) in enumerate(self.pairs):
            on_left, on_right = (
                self.operations[2 * index],
                self.operations[2 * index + 1],
            )
            states.append(on_left(states[left]) + on_right(states[right]))
        return torch.cat([states[index] for index in self.joined], dim=1)


class AmoebaNet(nn.Module):
    """Stem, cells at three resolutions, classifier."""

    def __init__(self, layers: int, filters: int, classes: int) -> None:
        super().__init__()
        channels = filters // 4
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, kernel_size=3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        group = [False] * (layers // 3)
        self.cells, outputs = _cells(
            [True, True, *group, True, *group, True, *group], channels
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(outputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, 224, 224) -> scores (batch, classes)."""
        before_last = last = self.stem(images)
        for cell in self.cells:
            before_last, last = last, cell(last, before_last)
        scores: Tensor = self.classifier(self.pool(last).flatten(1))
        return scores


def _cells(reductions: list[bool], channels: int) -> tuple[nn.ModuleList, int]:
    """Cells that reduce or not, and the channels that come out of the last; every reduction doubles the channels."""
    cells = nn.ModuleList()
    before_last = last = channels
    for last_reduced, reduces in pairwise([False, *reductions]):
        channels *= 2 if reduces else 1
        cells.append(
            Cell(
                before_last, last, channels, reduces=reduces, last_reduced=last_reduced
            )
        )
        before_last, last = (
            last,
            channels * len(REDUCTION_JOINED if reduces else NORMAL_JOINED),
        )
    return cells, last
