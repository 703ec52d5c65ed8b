"""Data parallelism: the sum of the gradients over the replicas, hidden behind a step's last backward.

The method is DistributedDataParallel's (Li et al. 2020, "PyTorch Distributed", section 3.2): gradients live in buckets,
and a bucket is reduced as soon as the last backward has filled it. DDP itself does not fit a pipeline's stage: it takes
no DTensors, so no tensor parallelism beside it; its hooks do not see a backward that is split into input and weight
gradients; and without synchronising the first micro-batches it holds every gradient twice, beside its bucket, until it
has bound and re-built its buckets in the first two steps. Here gradients are views of their buckets from the start.

The mean is taken in the loss: dividing a sum afterwards would read and write all gradients once more, and in fp16 the
sum could overflow where the mean does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from planner.executor.sharding import local

BUCKET_BYTES = 25 * 1024 * 1024
"""One collective's worth of gradients, as in DDP."""


@dataclass(slots=True)
class Bucket:
    """Gradients that are reduced together."""

    flat: torch.Tensor
    """All of them, one after the other."""
    parameters: int
    unfilled: int = field(init=False)
    work: dist.Work | None = None

    def __post_init__(self) -> None:
        self.unfilled = self.parameters


class GradientReducer:
    """Owns the gradients of a stage's parameters.

    Args:
        parameters: of one stage, in their final type, without gradients.
        group: the replicas.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._armed = False
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # The backward fills the gradients of the last layers first.
        self._buckets = [self._bind(run) for run in _runs(trained[::-1])]

    def arm(self) -> None:
        """The next backward is the step's last one: reduce what it fills."""
        self._armed = True

    def finish(self) -> None:
        """Wait until every gradient is the sum over the replicas."""
        for bucket in self._buckets:
            if bucket.work is None:
                self._launch(bucket)
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work, bucket.unfilled = None, bucket.parameters
        self._armed = False

    def _bind(self, parameters: list[nn.Parameter]) -> Bucket:
        """Make every parameter's gradient a view of one new tensor."""
        shards = [local(parameter.detach()) for parameter in parameters]
        bucket = Bucket(shards[0].new_zeros(sum(shard.numel() for shard in shards)), len(parameters))
        parts = bucket.flat.split([shard.numel() for shard in shards])  # type: ignore[no-untyped-call]
        for parameter, shard, part in zip(parameters, shards, parts, strict=True):
            parameter.grad = _like(parameter, part.view(shard.shape))
            hook = partial(self._filled, bucket)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return bucket

    def _filled(self, bucket: Bucket, parameter: torch.Tensor) -> None:
        if not self._armed:
            return
        bucket.unfilled -= 1
        if bucket.unfilled == 0:
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)


def _runs(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one type in runs of about `BUCKET_BYTES`."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        run: list[nn.Parameter] = []
        size = 0
        for parameter in (parameter for parameter in parameters if parameter.dtype == dtype):
            run.append(parameter)
            size += local(parameter.detach()).nbytes
            if size >= BUCKET_BYTES:
                yield run
                run, size = [], 0
        if run:
            yield run


def _like(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return gradient
    return DTensor.from_local(
        gradient,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
