"""Small models that are no chains, in the forms that people write."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DoubleConvolution(nn.Sequential):
    """Two convolutions with batch norm, as in a level of a U-Net."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Long skips between the levels on the way down and up."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1 = DoubleConvolution(3, width)
        self.down2 = DoubleConvolution(width, 2 * width)
        self.pool = nn.MaxPool2d(2)
        self.middle = DoubleConvolution(2 * width, 4 * width)
        self.grow2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = DoubleConvolution(4 * width, 2 * width)
        self.grow1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = DoubleConvolution(2 * width, width)
        self.drop = nn.Dropout(0.25)
        self.classes = nn.Conv2d(width, 5, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) -> (batch, 5) means of the class maps."""
        first = self.down1(images)
        second = self.down2(self.pool(first))
        middle = self.middle(self.pool(second))
        up = self.up2(torch.cat([second, self.grow2(middle)], dim=1))
        up = self.up1(torch.cat([first, self.grow1(up)], dim=1))
        return self.classes(self.drop(up)).mean((2, 3))


class Residual(nn.Module):
    """A block of a ResNet, its last activation in place."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))
            if stride > 1
            else None
        )

    def forward(self, images: Tensor) -> Tensor:
        """(batch, inputs, height, width) -> (batch, outputs, height / stride, width / stride)."""
        output = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(images)))))
        output += images if self.downsample is None else self.downsample(images)
        return self.relu(output)


class ResNet(nn.Module):
    """As torchvision writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(4, 4, 1), Residual(4, 4, 1))
        self.layer2 = nn.Sequential(
            Residual(4, 8, 2), Residual(8, 8, 1), Residual(8, 8, 1)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) -> (batch, 5)."""
        stem = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(stem))), 1))


class Modulated(nn.Module):
    """A block of a diffusion transformer: the condition goes into every block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.mlp = nn.Sequential(
            nn.Linear(width, width),
            nn.GELU(),
            nn.Dropout(0.25),
            nn.Linear(width, width),
        )

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        """Hidden (batch, tokens, width), condition (batch, width)."""
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, dim=-1)
        return hidden + self.mlp(self.norm(hidden) * (1 + scale) + shift)


class Diffusion(nn.Module):
    """Two inputs, a parameter of the root, a condition for every block, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(6, 8)
        self.position = nn.Parameter(torch.randn(1, 7, 8))
        self.label = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Modulated(8) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.noise = nn.Linear(8, 6)
        self.variance = nn.Linear(8, 6)

    def forward(self, patches: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Patches (batch, 7, 6), labels (batch,)."""
        hidden = self.patch(patches) + self.position * torch.arange(
            1, 8, device=patches.device
        ).view(1, 7, 1)
        condition = self.label(labels)
        for block in self.blocks:
            hidden = block(hidden, condition)
        hidden = functional.dropout(self.norm(hidden), 0.25, self.training)
        return {"noise": self.noise(hidden), "variance": self.variance(hidden)}


class PairwiseTransformer(nn.Module):
    """Blocks that are pairs of modules in a list; the output projection is the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.MultiheadAttention(8, 2, batch_first=True),
                    nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
                ]
            )
            for _ in range(3)
        )
        self.scale = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, tokens) -> (batch, tokens, 32)."""
        hidden = self.tokens(ids)
        for attention, feed_forward in self.layers:
            hidden = hidden + attention(hidden, hidden, hidden, need_weights=False)[0]
            hidden = hidden + feed_forward(hidden)
        return functional.linear(self.scale(hidden), self.tokens.weight)


class Experts(nn.Module):
    """A dense mixture: parallel experts of one class, which are no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
            for _ in range(3)
        )

    def forward(self, features: Tensor) -> Tensor:
        """(batch, 8) -> (batch, 8)."""
        normed = self.norm(features)
        weights = self.gate(normed).softmax(-1)
        for index, expert in enumerate(self.experts):
            features = features + weights[:, index : index + 1] * expert(normed)
        return features


class Mixture(nn.Module):
    """Blocks of parallel experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, 8) -> (batch, 4)."""
        for block in self.blocks:
            features = block(features)
        return self.head(features)


class Plain(nn.Module):
    """No lists, no blocks: modules one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.fc1 = nn.Linear(4 * 4 * 4, 8)
        self.fc2 = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, 16, 16) -> (batch, 5)."""
        images = self.pool(functional.relu(self.bn1(self.conv1(images))))
        images = self.pool(functional.relu(self.conv2(images)))
        return self.fc2(functional.relu(self.fc1(images.flatten(1))))


class Doubled(torch.autograd.Function):
    """A function that torch cannot look into."""

    @staticmethod
    def forward(context: object, features: Tensor) -> Tensor:
        """Twice."""
        return 2 * features

    @staticmethod
    def backward(context: object, *gradients: Tensor) -> Tensor:
        """Twice."""
        return 2 * gradients[0]


class Opaque(nn.Module):
    """Uses its own autograd function at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 4)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, 8) -> (batch, 4)."""
        return self.two(Doubled.apply(self.one(features)))


class Untraceable(nn.Module):
    """Keeps a tensor that it registers nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 4)
        self.table = torch.ones(8)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, 8) -> (batch, 4)."""
        return self.two(self.one(features) * self.table)


class Gate(nn.Module):
    """Reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, 8) -> (batch, 8)."""
        return self.linear(features) if features.sum().item() > 0 else features


class Reading(nn.Module):
    """Its second module reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.gate = Gate()

    def forward(self, features: Tensor) -> Tensor:
        """(batch, 8) -> (batch, 8)."""
        return self.gate(self.one(features))


class Halting(nn.Module):
    """Repeats its block until values are small, and has one head for positive sums, another for negative ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.block = nn.Linear(16, 16)
        self.left = nn.Linear(16, 4)
        self.right = nn.Linear(16, 4)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, 8) -> (batch, 4)."""
        hidden = self.first(features)
        steps = 0
        while hidden.abs().mean().item() > 0.05 and steps < 3:
            hidden = torch.tanh(self.block(hidden))
            steps += 1
        output: Tensor = (
            self.left(hidden) if hidden.sum().item() > 0 else self.right(hidden)
        )
        return output


class Forking(nn.Module):
    """Has one head for positive features, another for negative ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.left = nn.Linear(16, 4)
        self.right = nn.Linear(16, 4)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, 8) -> (batch, 4)."""
        hidden = torch.tanh(self.first(features))
        output: Tensor = (
            self.left(hidden) if features.sum().item() < 0 else self.right(hidden)
        )
        return output


class Failing(nn.Module):
    """Multiplies what does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(4, 4)

    def forward(self, features: Tensor) -> Tensor:
        """Raises."""
        output: Tensor = self.two(self.one(features))
        return output


class InPlace(nn.Module):
    """An activation in place between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)
        self.mix = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, 8) -> (batch, 4)."""
        return self.last(self.mix(self.act(self.one(features))))


class Wide(nn.Module):
    """A residual stream in fp32 whatever the type of the layers, a table that it registers, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 8))
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)
        )
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.last = nn.Linear(8, 5)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, 6) -> (batch, 5)."""
        hidden = self.first(features)
        stream = (hidden + self.table).float()
        for block in self.blocks:
            stream = stream + block(stream.to(hidden.dtype)).float()
        return self.last(
            self.recurrent(stream.to(hidden.dtype).unsqueeze(1))[0].squeeze(1)
        )


def wide() -> tuple[nn.Module, Tensor]:
    """Computes in two types."""
    return Wide(), torch.zeros(2, 6)


def unet() -> tuple[nn.Module, Tensor]:
    """Long skips."""
    return UNet(), torch.zeros(1, 3, 16, 16)


def resnet() -> tuple[nn.Module, Tensor]:
    """Residual blocks in Sequentials."""
    return ResNet(), torch.zeros(1, 3, 16, 16)


def diffusion() -> tuple[nn.Module, dict[str, Tensor]]:
    """Inputs by keyword."""
    return Diffusion(), {
        "patches": torch.zeros(1, 7, 6),
        "labels": torch.zeros(1, dtype=torch.long),
    }


def pairwise() -> nn.Module:
    """Token ids in, tied logits out."""
    return PairwiseTransformer()


def mixture() -> tuple[nn.Module, tuple[Tensor]]:
    """Parallel experts."""
    return Mixture(), (torch.zeros(1, 8),)


def plain() -> tuple[nn.Module, Tensor]:
    """Neither lists nor blocks."""
    return Plain(), torch.zeros(1, 3, 16, 16)


def opaque() -> tuple[nn.Module, Tensor]:
    """A function with a backward of its own."""
    return Opaque(), torch.zeros(1, 8)


def untraceable() -> tuple[nn.Module, Tensor]:
    """Cannot be cut, but runs."""
    return Untraceable(), torch.zeros(1, 8)


def reading() -> tuple[nn.Module, Tensor]:
    """Does not run on meta tensors."""
    return Reading(), torch.zeros(1, 8)


def halting() -> tuple[nn.Module, Tensor]:
    """Goes where its values say."""
    return Halting(), torch.zeros(1, 8)


def forking() -> tuple[nn.Module, Tensor]:
    """Uses one head or the other."""
    return Forking(), torch.zeros(1, 8)


def failing() -> tuple[nn.Module, Tensor]:
    """Does not run at all."""
    return Failing(), torch.zeros(1, 8)


def in_place() -> tuple[nn.Module, Tensor]:
    """Changes a tensor in place."""
    return InPlace(), torch.zeros(1, 8)
