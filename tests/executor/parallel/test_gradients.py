"""What the whole model decides about its gradients, on one rank; several ranks are tested under torchrun."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

from planner.executor.parallel.gradients import any_overflow, clip_factor, total_norm
from planner.executor.parallel.mesh import Mesh, build_mesh
from planner.executor.support import Grid


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """One rank, alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield build_mesh(Grid(1, 1, 1, 1, ((((0,),),),)), "cpu")
    dist.destroy_process_group()


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Two with random gradients, one without."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (3, 50, 4)]
    for parameter in parameters[:2]:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    return parameters


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 25, 49])
def test_one_number_is_enough_to_overflow(
    mesh: Mesh, bad: float, position: int
) -> None:
    """Wherever it stands, and whatever stands beside it."""
    parameters = _parameters(torch.float16)
    parameters[1].grad[10] = 65504.0
    assert not any_overflow(parameters, mesh)
    parameters[1].grad[position] = bad
    assert any_overflow(parameters, mesh)


def test_largest_numbers_do_not_overflow(mesh: Mesh) -> None:
    """Gradients that fit are used, though their sum and norm do not fit fp16; a rank without gradients has none."""
    parameters = _parameters(torch.float16)
    parameters[1].grad.fill_(-65504.0)
    assert not any_overflow(parameters, mesh)
    assert total_norm(parameters[1:2], (), mesh) == pytest.approx(65504 * math.sqrt(50))
    assert not any_overflow([], mesh)


@pytest.mark.parametrize("maximum", [0.5, 100.0])
def test_clipping_is_torchs(mesh: Mesh, maximum: float) -> None:
    """Norm and factor are those of `clip_grad_norm_`."""
    parameters = _parameters(torch.float32)
    norm = total_norm(parameters, (), mesh)
    expected = parameters[1].grad * clip_factor(norm, maximum)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(parameters, maximum)))
    assert torch.allclose(parameters[1].grad, expected)


def test_squares_below_fp16_count(mesh: Mesh) -> None:
    """The norm of gradients whose squares fp16 rounds to zero."""
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 2.0**-20)
    assert parameter.grad.square().sum() == 0
    assert total_norm([parameter], (), mesh) == 2.0**-19
