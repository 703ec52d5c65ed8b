"""Data parallelism: the sum of the gradients over the replicas, hidden behind a step's last backward.

The method is DistributedDataParallel's (Li et al. 2020, "PyTorch Distributed", section 3.2): gradients live in
buckets, and a bucket is reduced as soon as the last backward, or W, has filled it and those before it: in one order
on all replicas, whatever each one's samples leave unused. DDP itself does not fit a pipeline's stage: it takes no
DTensors, so no tensor parallelism beside it; its hooks do not see a backward that is split into input and weight
gradients, which it would leave unreduced without a word; and without synchronising the first micro-batches it holds
every gradient twice, beside its bucket, until it has bound and re-built its buckets in the first two steps. Here
gradients are views of their buckets from the start.

The mean is taken in the loss: dividing a sum afterwards would read and write all gradients once more, and in fp16 the
sum could overflow where the mean does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from planner.executor.parallel.sharding import local, with_local

BUCKET_BYTES = 25 * 1024 * 1024
"""One collective's worth of gradients, as in DDP."""


class Reducer(Protocol):
    """Owns the gradients of a rank's parameters, and adds them up over the replicas."""

    def forward(self) -> AbstractContextManager[object]:
        """The context that every forward runs in."""

    def arm(self, stage: int) -> None:
        """The next backward is this stage's last one in the step: reduce what it fills."""

    def after_backward(self, stage: int) -> None:
        """A micro-batch has added all its gradients to this stage's parameters."""

    def launch(self, stage: int) -> None:
        """This stage's gradients are whole: start to reduce those that are not under way."""

    def finish(self) -> None:
        """Wait until every gradient is the sum over the replicas."""


@dataclass(slots=True)
class Bucket:
    """Gradients that are reduced together."""

    flat: torch.Tensor
    """All of them, one after the other."""
    parameters: int
    stage: int | None
    """Whose backward fills it; None: several stages'."""
    group: dist.ProcessGroup
    """Ranks that it is added up over."""
    unfilled: int = field(init=False)
    armed: bool = False
    work: dist.Work | None = None

    def __post_init__(self) -> None:
        self.unfilled = self.parameters


class GradientReducer:
    """Owns the gradients of a rank's parameters.

    A parameter of several stages of the rank (a tied embedding) is reduced once, when all of them have ended.

    Args:
        stages: parameters by stage, in their final type, without gradients.
        group_of: the replicas of a parameter; None: it has none.
    """

    def __init__(
        self,
        stages: Mapping[int, Iterable[nn.Parameter]],
        group_of: Callable[[nn.Parameter], dist.ProcessGroup | None],
    ) -> None:
        # The backward fills the gradients of the last layers first.
        self._buckets = [
            self._bind(stage, group, run)
            for (stage, group), parameters in _by_holder(stages, group_of).items()
            for run in _runs(parameters[::-1])
        ]

    def forward(self) -> AbstractContextManager[object]:
        """See `Reducer`."""
        return nullcontext()

    def arm(self, stage: int) -> None:
        """See `Reducer`."""
        for bucket in self._of(stage):
            bucket.armed = True

    def after_backward(self, stage: int) -> None:
        """See `Reducer`: nothing is due before the last one."""

    def launch(self, stage: int) -> None:
        """See `Reducer`."""
        for bucket in self._of(stage):
            self._launch(bucket)

    def finish(self) -> None:
        """See `Reducer`."""
        for bucket in self._buckets:
            self._launch(bucket)
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work, bucket.unfilled, bucket.armed = None, bucket.parameters, False

    def _of(self, stage: int) -> list[Bucket]:
        return [bucket for bucket in self._buckets if bucket.stage == stage]

    def _bind(
        self,
        stage: int | None,
        group: dist.ProcessGroup,
        parameters: list[nn.Parameter],
    ) -> Bucket:
        """Make every parameter's gradient a view of one new tensor."""
        shards = [local(parameter.detach()) for parameter in parameters]
        bucket = Bucket(
            shards[0].new_zeros(sum(shard.numel() for shard in shards)),
            len(parameters),
            stage,
            group,
        )
        parts = bucket.flat.split([shard.numel() for shard in shards])  # type: ignore[no-untyped-call]
        for parameter, shard, part in zip(parameters, shards, parts, strict=True):
            parameter.grad = with_local(parameter, part.view(shard.shape))
            hook = partial(self._filled, bucket)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return bucket

    def _filled(self, bucket: Bucket, parameter: torch.Tensor) -> None:
        if not bucket.armed:
            return
        bucket.unfilled -= 1
        for each in self._buckets:
            if (each.stage, each.group) == (bucket.stage, bucket.group):
                if each.unfilled:
                    break
                self._launch(each)

    def _launch(self, bucket: Bucket) -> None:
        if bucket.work is None:
            bucket.work = dist.all_reduce(
                bucket.flat, group=bucket.group, async_op=True
            )


def _by_holder(
    stages: Mapping[int, Iterable[nn.Parameter]],
    group_of: Callable[[nn.Parameter], dist.ProcessGroup | None],
) -> dict[tuple[int | None, dist.ProcessGroup], list[nn.Parameter]]:
    """Trained parameters that have replicas, by the stage that holds them (None: several do) and these replicas."""
    holders: dict[nn.Parameter, int | None] = {}
    for stage, parameters in stages.items():
        for parameter in dict.fromkeys(parameters):
            if parameter.requires_grad:
                holders[parameter] = None if parameter in holders else stage
    found: dict[tuple[int | None, dist.ProcessGroup], list[nn.Parameter]] = {}
    for parameter, holder in holders.items():
        if (group := group_of(parameter)) is not None:
            found.setdefault((holder, group), []).append(parameter)
    return found


def _runs(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one type in runs of about `BUCKET_BYTES`."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        run: list[nn.Parameter] = []
        size = 0
        for parameter in (
            parameter for parameter in parameters if parameter.dtype == dtype
        ):
            run.append(parameter)
            size += local(parameter.detach()).nbytes
            if size >= BUCKET_BYTES:
                yield run
                run, size = [], 0
        if run:
            yield run
