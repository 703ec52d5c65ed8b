"""Optimizers, and master copies in mixed precision."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from planner.errors import UnsupportedError
from planner.executor.train.optimizer import Optimizer, make_optimizer
from planner.spec.job import OptimizerName, Precision
from planner.spec.recipes import ParameterCount, recipe

OPTIMIZERS = get_args(OptimizerName)
PRECISIONS = get_args(Precision)


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64, bias=False)


def _train(module: nn.Module, optimizer: Optimizer, steps: int) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(8, 64)
        module(
            inputs.to(next(module.parameters()).dtype)
        ).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_gradients()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_are_those_of_the_recipe(
    name: OptimizerName, precision: Precision
) -> None:
    """What the memory model promises is what torch holds (some count their steps in one number more)."""
    module = _linear()
    optimizer = Optimizer(
        module, name=name, precision=precision, learning_rate=0.1, hidden=("weight",)
    )
    _train(module, optimizer, 1)
    expected = recipe(precision, name)
    elements = module.weight.numel()
    assert module.weight.nbytes == expected.parameter_bytes * elements
    assert module.weight.grad.nbytes == expected.gradient_bytes * elements
    count = ParameterCount(
        elements, matrix_elements=elements, factored_elements=64 + 64
    )
    assert 0 <= optimizer.bytes - expected.optimizer_bytes(count) <= 4


def test_fp32_is_torchs_own_optimizer() -> None:
    """Without a master copy nothing stands between the parameters and torch."""
    ours, theirs = _linear(), _linear()
    _train(ours, Optimizer(ours, name="adamw", precision="fp32", learning_rate=0.01), 3)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01, fused=True)
    torch.manual_seed(1)
    for _ in range(3):
        plain.zero_grad()
        theirs(torch.randn(8, 64)).square().mean().backward()
        plain.step()
    assert torch.equal(ours.weight, theirs.weight)


def test_master_copy_keeps_what_bf16_would_lose() -> None:
    """Steps far below a parameter's bf16 resolution add up, as they do in fp32."""
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)
    optimizer = Optimizer(
        module, name="sgd", precision="bf16-mixed", learning_rate=1e-4
    )
    for _ in range(100):
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()
    assert float(module.weight.detach()) == pytest.approx(0.99, abs=2**-8)
    assert float(module.weight.detach()) < 1.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pure_bf16_is_torchs_own_optimizer_on_bf16(name: str) -> None:
    """Without a master copy parameters are rounded as torch rounds them."""
    ours, theirs = _linear(), _linear().bfloat16()
    _train(ours, Optimizer(ours, name=name, precision="bf16", learning_rate=0.01), 3)
    plain = make_optimizer(name, theirs.parameters(), 0.01)
    torch.manual_seed(1)
    for _ in range(3):
        plain.zero_grad()
        theirs(torch.randn(8, 64).bfloat16()).float().square().mean().backward()
        plain.step()
    assert torch.equal(ours.weight, theirs.weight)


def test_muon_orthogonalises_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    """The named matrices move as with `torch.optim.Muon`, the others as with AdamW."""
    ours, theirs = (
        nn.Sequential(_linear(), _linear(), nn.Linear(64, 2)) for _ in range(2)
    )
    theirs.load_state_dict(ours.state_dict())
    _train(
        ours,
        Optimizer(
            ours, name="muon", precision="fp32", learning_rate=0.01, hidden={"1.weight"}
        ),
        3,
    )
    rest = [value for name, value in theirs.named_parameters() if name != "1.weight"]
    muon = torch.optim.Muon([theirs[1].weight], lr=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=0.01, fused=True)
    torch.manual_seed(1)
    for _ in range(3):
        theirs.zero_grad()
        theirs(torch.randn(8, 64)).square().mean().backward()
        muon.step()
        adamw.step()
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_factor_multiplies_the_gradients(precision: str) -> None:
    """Every precision takes the factor; half of it is half of the movement."""
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)
    optimizer = Optimizer(module, name="sgd", precision=precision, learning_rate=1.0)
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step(0.5)
    assert float(module.weight.detach()) == 0.5


def test_gradients_are_unscaled_without_underflow() -> None:
    """A scaled gradient whose unscaled value fp16 cannot hold still moves the master copy."""
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(0.0)
    optimizer = Optimizer(
        module, name="sgd", precision="fp16-mixed", learning_rate=2.0**16
    )
    gradient, scale = 2.0**-20, 2.0**16
    assert torch.tensor(gradient / scale).half() == 0
    module.weight.grad = torch.full_like(module.weight, gradient)
    optimizer.step(1 / scale)
    assert float(module.weight.detach()) == -gradient


def test_parameters_start_from_their_fp32_values() -> None:
    """The master copy is taken before rounding, and ties survive the cast."""
    module = _linear()
    module.twin = module.weight
    before = module.weight.detach().clone()
    optimizer = Optimizer(module, name="sgd", precision="bf16-mixed", learning_rate=1.0)
    assert module.twin is module.weight
    assert torch.equal(module.weight, before.bfloat16())
    module.weight.grad = torch.zeros_like(module.weight)
    optimizer.step()
    assert torch.equal(optimizer.trained["weight"], before)


def test_gradients_keep_their_place() -> None:
    """Zeroing writes in place: the tensors may be views of communication buckets."""
    module = _linear()
    optimizer = Optimizer(module, name="sgd", precision="fp32", learning_rate=0.1)
    _train(module, optimizer, 1)
    place = module.weight.grad
    _train(module, optimizer, 1)
    assert module.weight.grad is place
    assert not place.any()


def test_unknown_optimizer_is_refused() -> None:
    """The error lists those that are known."""
    with pytest.raises(
        UnsupportedError,
        match="use sgd, momentum, adam, adamw, adam-8bit, adafactor or muon",
    ):
        make_optimizer("lion", [torch.zeros(1, requires_grad=True)], 0.1)
