"""Flat shards: parameters one after the other in one tensor, cut into equal parts, one per rank of a group.

Of n elements on r ranks every rank holds ceil(n / r), whatever the shapes: what the cost model promises (M1), and as
DeepSpeed and FSDP's first version do (Rajbhandari et al. 2020, "ZeRO", section 5; Zhao et al. 2023, "PyTorch FSDP",
section 3.2.1). Shards by rows, as in FSDP2, would leave more to the first ranks wherever rows do not divide.

A unit is what is gathered and reduced in one collective. Its parameters are views of one tensor, whose storage can be
freed and made again without their noticing, so that what autograd has saved of them stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from planner.executor.parallel.sharding import local, placed_as, with_local

# Before torch 2.13 they had other names, which warn by now.
all_gather: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


@dataclass(frozen=True, slots=True)
class Span:
    """Where a parameter stands in its unit."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of a parameter."""

    span: Span
    start: int
    """In the parameter's elements, one after the other."""
    stop: int
    place: int
    """Of its first element in the rank's shard."""


class Unit:
    """Parameters that are gathered and reduced together.

    Args:
        named: all of one type, all trained or none.
        group: the ranks that share them out.
        stage: whose backward fills the gradients; None: several stages'.
        copies: ranks of other such groups that keep the same part; None: there is one group.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        stage: int | None,
        copies: dist.ProcessGroup | None = None,
    ) -> None:
        self.group, self.stage, self._copies = group, stage, copies
        self.spans: list[Span] = []
        end = 0
        for name, parameter in named.items():
            start, end = end, end + local(parameter.detach()).numel()
            self.spans.append(Span(name, parameter, start, end))
        self.is_trained = next(iter(named.values())).requires_grad
        self.shard_elements = -(-end // group.size())
        self.padding_elements = self.shard_elements * group.size() - end
        self.first = self.shard_elements * group.rank()
        self.full = self.shard = self.gradient = torch.empty(0)
        """All values; this rank's part of them; this rank's part of the gradient."""
        self.full_gradient: torch.Tensor | None = None
        """ZeRO 1: of all values."""
        self.unfilled = len(self.spans)
        """Gradients that the backward at hand has not filled yet."""
        self.is_gathered = True
        """Or on its way: `gather` waits for it."""
        self._gathering: dist.Work | None = None
        self._own_shard = False

    def pieces(self) -> Iterator[Piece]:
        """What this rank holds, without what is empty."""
        last = self.first + self.shard_elements
        for span in self.spans:
            start, stop = max(span.start, self.first), min(span.stop, last)
            if start < stop:
                yield Piece(
                    span, start - span.start, stop - span.start, start - self.first
                )

    @torch.no_grad()
    def bind(self, *, own_shard: bool, own_gradient: bool) -> None:
        """Make the parameters views of one tensor.

        Args:
            own_shard: keep this rank's values apart, so that those of all ranks can be freed.
            own_gradient: likewise the gradient, which is else kept whole.
        """
        sample = local(self.spans[0].parameter.detach())
        self.full = sample.new_zeros(self.shard_elements * self.group.size())
        for span in self.spans:
            view = self._view(self.full, span)
            view.copy_(local(span.parameter.detach()))
            put(span.parameter, with_local(span.parameter, view))
        self.shard = self._mine(self.full)
        self._own_shard = own_shard
        if own_shard:
            self.shard = self.shard.clone()
            self.free()
        if self.is_trained:
            self._bind_gradient(own_gradient)

    def _bind_gradient(self, own: bool) -> None:
        if own:
            self.gradient = torch.zeros_like(self.shard)
            return
        self.full_gradient = torch.zeros_like(self.full)
        self.gradient = self._mine(self.full_gradient)
        for span in self.spans:
            span.parameter.grad = with_local(
                span.parameter, self._view(self.full_gradient, span)
            )

    def start_gather(self) -> None:
        """Begin to make all values again, from all ranks; they are not to be read before `gather`."""
        if not self.is_gathered:
            self.full.untyped_storage().resize_(self.full.nbytes)
            self._gathering = all_gather(
                self.full, self.shard, group=self.group, async_op=True
            )
            self.is_gathered = True

    def gather(self) -> None:
        """Have all values."""
        self.start_gather()
        self._wait()

    def free(self) -> None:
        """Free all values but this rank's."""
        self._wait()
        self.full.untyped_storage().resize_(0)
        self.is_gathered = False

    def _wait(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def publish(self) -> dist.Work | None:
        """Send this rank's values, which have changed, to all; where they are kept apart, `gather` will."""
        if self._own_shard:
            self.free()
            return None
        work: dist.Work | None = all_gather(
            self.full, self.shard, group=self.group, async_op=True
        )
        return work

    @torch.no_grad()
    def take_gradients(self) -> torch.Tensor:
        """The gradients of the parameters, one after the other; the parameters have none afterwards."""
        taken = self.full.new_zeros(self.shard_elements * self.group.size())
        for span in self.spans:
            gradient = span.parameter.grad
            if gradient is not None:
                self._view(taken, span).copy_(
                    local(placed_as(span.parameter, gradient))
                )
                span.parameter.grad = None
        return taken

    def sum_copies(self) -> dist.Work | None:
        """Add up this rank's part of the gradient over the groups that share it out; nothing where there is one."""
        if self._copies is None:
            return None
        work: dist.Work = dist.all_reduce(
            self.gradient, group=self._copies, async_op=True
        )
        return work

    def _mine(self, full: torch.Tensor) -> torch.Tensor:
        return full[self.first : self.first + self.shard_elements]

    @staticmethod
    def _view(full: torch.Tensor, span: Span) -> torch.Tensor:
        return full[span.start : span.stop].view(local(span.parameter.detach()).shape)


def put(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter these values, and their type, in place."""
    if isinstance(
        parameter, DTensor
    ):  # assigning to .data would leave its own record of its type behind
        torch.utils.swap_tensors(
            parameter, nn.Parameter(values, parameter.requires_grad)
        )  # type: ignore[no-untyped-call]
    else:  # swapping refuses what weak references lead to, as torch's recurrent layers keep them
        parameter.data = values
