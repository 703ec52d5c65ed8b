"""U-Net with a long skip connection per resolution: Ronneberger et al. 2015, "U-Net: Convolutional Networks for
Biomedical Image Segmentation", figure 1, simplified and made scalable as in Kim et al. 2020, "torchgpipe", section 4.2:
`convolutions` per resolution and `channels` at the finest one set its size.

    [ encoder 0 ]---------------------[ decoder 0 ]--[ segment ]
        [ encoder 1 ]-------------[ decoder 1 ]
                [ bottleneck ]
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

DROPOUT = 0.1


def unet(depth: int, convolutions: int, channels: int, classes: int) -> nn.Module:
    """U-Net of `depth` resolutions. Takes (batch, 3, height, width) images, sides divisible by 2^depth."""
    return UNet(depth, convolutions, channels, classes)


class UNet(nn.Module):
    """Encoder, bottleneck and decoder; every decoder level also takes the output of the encoder at its resolution."""

    def __init__(
        self, depth: int, convolutions: int, channels: int, classes: int
    ) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth)]
        self.encoders = nn.ModuleList(
            _convolutions(inputs, width, width, convolutions)
            for inputs, width in zip([3, *widths], widths, strict=False)
        )
        self.down = nn.MaxPool2d(kernel_size=2)
        self.bottleneck = _convolutions(
            widths[-1], 2 * widths[-1], widths[-1], convolutions
        )
        self.up = nn.Upsample(scale_factor=2)
        self.decoders = nn.ModuleList(
            _convolutions(2 * width, width // 2, width // 2, convolutions)
            for width in reversed(widths)
        )
        self.segment = nn.Conv2d(channels // 2, classes, kernel_size=1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) -> scores (batch, classes, height, width)."""
        skips: list[Tensor] = []
        for encoder in self.encoders:
            skips.append(encoder(images))
            images = self.down(skips[-1])
        images = self.bottleneck(images)
        for decoder in self.decoders:
            images = decoder(torch.cat((self.up(images), skips.pop()), dim=1))
        scores: Tensor = self.segment(images)
        return scores


def _convolutions(inputs: int, inside: int, outputs: int, count: int) -> nn.Sequential:
    widths = [inputs, *[inside] * (count - 1), outputs]
    return nn.Sequential(*(_convolution(a, b) for a, b in pairwise(widths)))


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.Dropout2d(DROPOUT),
        nn.InstanceNorm2d(outputs),
        nn.LeakyReLU(negative_slope=0.01),
    )
