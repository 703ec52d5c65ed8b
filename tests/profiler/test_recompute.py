"""Selective recomputation beside collectives, with real values in a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.profiler import recompute as module
from planner.profiler.recompute import recompute


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    """A process group in this process."""
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Scattered(torch.autograd.Function):
    """A reduce-scatter; over one rank its gradient is the same."""

    @staticmethod
    def forward(context: Any, partial: Tensor) -> Tensor:
        """Partial sums to the sums."""
        assert dist.group.WORLD is not None
        operations, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
        summed = operations.reduce_scatter_tensor(partial, "sum", 1, group)
        return cast(Tensor, operations.wait_tensor(summed))

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Tensor:
        """The gradient of the sums."""
        return cast(Tensor, gradients[0])


class RowWise(nn.Module):
    """A product, the sum of whose partial results passes an activation."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.product = nn.Linear(8, 8, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """(rows, 8) -> (rows, 8)."""
        partial = self.product(inputs)
        halves = torch.cat(partial.chunk(2, 0)) if self.way == "copied" else partial
        summed = cast(Tensor, Scattered.apply(halves))  # type: ignore[no-untyped-call]
        if self.way == "read":
            summed = summed * partial.exp()
        if self.way == "copy is read":
            summed = summed * partial.clone().exp()
        return torch.tanh(inputs + summed)


@pytest.mark.parametrize(
    ("way", "dropped"),
    [
        ("plain", 1),
        ("copied", 1),
        ("read", 0),
        ("copy is read", 0),
    ],
)
def test_partial_sums_that_only_a_collective_reads_are_not_kept(
    way: str, dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are those without recomputation in every case; what something else reads is kept."""
    made: list[Tensor] = []
    plain = module._Unread.__init__

    def note(self: Any, tensor: Tensor) -> None:
        made.append(tensor)
        plain(self, tensor)

    monkeypatch.setattr(module._Unread, "__init__", note)
    torch.manual_seed(0)
    layer, inputs = RowWise(way), torch.randn(4, 8, requires_grad=True)
    wanted = torch.autograd.grad(
        layer(inputs).square().sum(), [inputs, *layer.parameters()]
    )
    recompute(layer, "selective")
    found = torch.autograd.grad(
        layer(inputs).square().sum(), [inputs, *layer.parameters()]
    )
    torch.testing.assert_close(found, wanted)
    assert len(made) == dropped
