"""A model that does more than call modules and functions is trained as its own code says, cut or whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.profiler.cut import LayerCut, cut_model
from planner.spec.profile import RecomputeMode
from planner.spec.recompute import EXECUTED

WIDTH = 4


class Negated(torch.autograd.Function):
    """Twice its input, with a gradient of its own."""

    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        """2 x."""
        return inputs * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Not that of 2 x."""
        return -gradient


class Three(nn.Module):
    """Three products, with something odd between them."""

    def __init__(self, between: Callable[[Three, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(WIDTH, WIDTH) for _ in range(3)
        )
        self.register_buffer("average", torch.ones(WIDTH))
        self.runs = 0
        self._between = between

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, width) -> the same."""
        hidden = self._between(self, self.first(inputs))
        return self.third(torch.relu(self.second(hidden)) * self.average)


class Blocks(nn.Module):
    """Such modules one after the other, the last two of them."""

    def __init__(self, between: Callable[[Three, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Three(between) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, width) -> the same."""
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


def stopped(module: Three, hidden: Tensor) -> Tensor:
    """A target that no gradient goes through."""
    with torch.no_grad():
        target = module.second(hidden)
    return hidden * target


def hooked(module: Three, hidden: Tensor) -> Tensor:
    """A gradient that is scaled on its way back."""
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient / 8)
    return hidden


def own_gradient(module: Three, hidden: Tensor) -> Tensor:
    """A function with a gradient of its own."""
    return Negated.apply(hidden)  # type: ignore[no-any-return]


def averaged(module: Three, hidden: Tensor) -> Tensor:
    """A moving average that the output depends on, as spectral norm's vectors are."""
    module.average.mul_(0.5).add_(hidden.detach().abs().mean(0))
    return hidden


def averaged_anew(module: Three, hidden: Tensor) -> Tensor:
    """The same, in a new tensor."""
    module.average = module.average * 0.5 + hidden.detach().abs().mean(0)
    return hidden


def counted(module: Three, hidden: Tensor) -> Tensor:
    """A number that changes whenever the module runs."""
    module.runs += 1
    return hidden / module.runs


def drawn(module: Three, hidden: Tensor) -> Tensor:
    """A number that Python draws."""
    return hidden * random.random()


def normed(module: Three, hidden: Tensor) -> Tensor:
    """A parameter that is scaled in place."""
    with torch.no_grad():
        module.second.weight.div_(module.second.weight.norm())
    return hidden


def assigned(module: Three, hidden: Tensor) -> Tensor:
    """The same, by its data."""
    module.second.weight.data = (
        module.second.weight.data / module.second.weight.data.norm()
    )
    return hidden


def rounded(module: Three, hidden: Tensor) -> Tensor:
    """A product in half precision."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (hidden @ module.first.weight).float()


ODD = (
    stopped,
    hooked,
    own_gradient,
    averaged,
    averaged_anew,
    counted,
    drawn,
    normed,
    assigned,
    rounded,
)


def hooked_sequential() -> nn.Module:
    """A container with a hook of its own."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


class Doubled(nn.Sequential):
    """A container with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Doubled."""
        return super().forward(input) * 2  # type: ignore[no-any-return]


def doubled() -> nn.Module:
    """Three products."""
    return Doubled(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def _differences(build: Callable[[], nn.Module], mode: RecomputeMode) -> list[str]:
    """What differs after two forwards and backwards: plain, and every layer a stage of its own."""
    with torch.device("meta"):
        meta = build()
    cut = cut_model(meta, torch.empty(2, WIDTH, device="meta"))
    torch.manual_seed(0)
    plain = build()
    stages = [_stage(cut, build, index, mode) for index in range(len(cut.layers))]
    found = []
    for step in range(2):
        inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
        outputs = []
        for run in (plain, nn.Sequential(*stages)):
            random.seed(step)
            outputs.append(run(inputs))
            outputs[-1].square().sum().backward()
        found += [] if torch.allclose(*outputs) else [f"output {step}"]
    held = {
        name: value
        for stage in stages
        for name, value in (*stage.named_parameters(), *stage.named_buffers())
    }
    for name, value in (*plain.named_parameters(), *plain.named_buffers()):
        gradients = [
            torch.zeros_like(value) if each.grad is None else each.grad
            for each in (value, held[name])
        ]
        same = torch.allclose(value, held[name]) and torch.allclose(
            *gradients, atol=1e-6
        )
        found += [] if same else [name]
    return found


def _stage(
    cut: LayerCut, build: Callable[[], nn.Module], index: int, mode: RecomputeMode
) -> nn.Module:
    torch.manual_seed(0)
    chosen: dict[int, RecomputeMode] = (
        {index: mode} if cut.layers[index].recomputable else {}
    )
    return cut.stage(build(), index, index + 1, recompute=chosen)


@pytest.mark.parametrize("mode", EXECUTED)
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
def test_odd_modules_compute_what_their_code_says(
    odd: Callable[[Three, Tensor], Tensor], mode: RecomputeMode
) -> None:
    """Stop-gradients, hooks, own gradients, moving averages, counters, draws of Python: silently lost by a cut, or done
    twice by recomputation."""
    assert _differences(lambda: Three(odd), mode) == []
    assert _differences(lambda: Blocks(odd), mode) == []


@pytest.mark.parametrize("build", [hooked_sequential, doubled])
def test_containers_with_code_of_their_own_are_followed(
    build: Callable[[], nn.Module],
) -> None:
    """An nn.Sequential with a hook, or of a class of its own, was run as its children alone."""
    assert _differences(build, "none") == []


def test_frozen_batch_norm_is_not_counted_by_recomputation() -> None:
    """A norm in evaluation counted its batches backwards."""

    def build() -> nn.Module:
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        )
        model[1].eval()
        return model

    assert _differences(build, "full") == []
