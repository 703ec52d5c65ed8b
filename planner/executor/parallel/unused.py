"""Parameters that no sample of a step used: the optimizer leaves them as they are, as in a single process.

There a parameter without a gradient is passed over; a gradient of zero, as buckets and shards hold it, would let
weight decay, momentum and Adam's averages move it. Whether a parameter was used is put to the vote of all ranks that
hold its stage, for samples may use it on one replica and not on another. torch's DistributedDataParallel does the same
where `find_unused_parameters` is set (``local_used_map`` of its `Reducer`), and fails where it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from planner.executor.parallel.gradients import SharedCopy
from planner.executor.parallel.mesh import Mesh
from planner.executor.train.optimizer import Optimizer


class UsedParameters:
    """Sees which trained parameters of a rank get gradients in a step.

    Args:
        module: all stages of the rank; ranks of the same stages have the same parameters, or parts of them.
        copies: parameters that other stages hold too; these count as used.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        copies: Iterable[SharedCopy],
        mesh: Mesh,
    ) -> None:
        trained = [
            parameter for parameter in module.parameters() if parameter.requires_grad
        ]
        held = _held(optimizer)
        shared = {id(copy.parameter) for copy in copies}
        self._carriers = [held.get(id(parameter)) for parameter in trained]
        """What carries the gradient for the optimizer: the parameter, or this rank's piece of it, if it has any."""
        self._always = [
            carrier is not None and id(carrier) in shared for carrier in self._carriers
        ]
        self._is_used = list(self._always)
        self._device = mesh.device_mesh.device_type
        self._groups = [
            group for group in (mesh.data_group, mesh.tensor_group) if group.size() > 1
        ]
        for place, parameter in enumerate(trained):
            hook = partial(self._see, place)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, what nobody has used in the step has no gradient; afterwards the next step may begin. A collective
        call of the ranks that hold the same stages."""
        unused = [
            carrier
            for carrier in self._unused()
            if carrier is not None and carrier.grad is not None
        ]
        gradients = [carrier.grad for carrier in unused]
        for carrier in unused:
            carrier.grad = None
        yield
        for carrier, gradient in zip(unused, gradients, strict=True):
            carrier.grad = gradient
        self._is_used = list(self._always)

    def _see(self, place: int, parameter: torch.Tensor) -> None:
        self._is_used[place] = True

    def _unused(self) -> list[torch.Tensor | None]:
        votes = torch.tensor(self._is_used, dtype=torch.uint8, device=self._device)
        for group in self._groups:
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
        if all(
            self._is_used
        ):  # what was used here was used: the votes need not be waited for
            return []
        return [
            carrier
            for carrier, vote in zip(self._carriers, votes.tolist(), strict=True)
            if not vote
        ]


def _held(optimizer: Optimizer) -> dict[int, torch.Tensor]:
    """What the optimizer steps, by the id of the parameter that it stands for."""
    owners = {} if optimizer.shards is None else optimizer.shards.owners()
    return {id(owners.get(id(each), each)): each for each in optimizer.parameters}
