"""How much a collective slows the compute that runs beside it.

On every rank the same matrix products are timed twice: alone, and while all-reduces of the group are on their way,
enough of them to outlast the compute. On a GPU they take multiprocessors and memory bandwidth from it, on a CPU cores:

    slowdown = median over the samples of (seconds beside / seconds alone), at least 1, of the slowest rank

All ranks compute in both cases, so what they take from each other by computing alone does not count.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from planner.profiler.links_groups import RankGroup

MATMUL_SIZE: dict[str, int] = {"cpu": 384, "cuda": 8192}
"""Rows and columns of the products; large enough to run at full speed."""
COMPUTE_SECONDS = 0.02
"""Least time of one sample's products."""
BUCKET_BYTES = 25 << 20
"""Of one all-reduce: the size of a gradient bucket of DistributedDataParallel."""
COVER = 1.5
"""The all-reduces alone take this many times as long as the compute alone."""
MOST_EXCHANGES = 64


def overlap_slowdown(group: RankGroup, device: torch.device, repeats: int) -> float:
    """Seconds of compute beside an all-reduce of this group / seconds alone. Every rank must call it.

    Args:
        group: all groups of its shape work at the same time; a rank of the remainder computes only.
        device: of this rank's tensors.
        repeats: samples the median is taken over.
    """
    compute = Compute.lasting(COMPUTE_SECONDS, device)
    bucket = torch.zeros(BUCKET_BYTES // 4, device=device)
    count = _exchanges(group, bucket, compute.seconds())
    ratios = []
    for _ in range(repeats + 1):
        dist.barrier()
        alone = compute.seconds()
        dist.barrier()
        ratios.append(_seconds_beside(compute, group, bucket, count) / alone)
    slowest = most(statistics.median(ratios[1:]), device)  # the first one warms up
    return max(1.0, slowest)


@dataclass(slots=True)
class Compute:
    """Matrix products one after the other."""

    device: torch.device
    count: int = 1
    _matrix: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = MATMUL_SIZE[self.device.type]
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self._matrix = torch.zeros(size, size, device=self.device, dtype=dtype)

    @classmethod
    def lasting(cls, least_seconds: float, device: torch.device) -> Compute:
        """As many products, on every rank, as last so long on the fastest one."""
        compute = cls(device)
        compute.seconds()
        once = min(compute.seconds() for _ in range(3))
        compute.count = math.ceil(most(least_seconds / once, device))
        return compute

    def seconds(self) -> float:
        """Do the products once; other streams of the device are not waited for."""
        self._wait()
        start = perf_counter()
        for _ in range(self.count):
            torch.mm(self._matrix, self._matrix)
        self._wait()
        return perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _exchanges(group: RankGroup, bucket: Tensor, compute_seconds: float) -> int:
    """All-reduces that outlast the compute; the same number on every rank."""
    seconds = compute_seconds
    if group.members:
        for _ in range(2):  # the first one makes the connections
            start = perf_counter()
            dist.all_reduce(bucket, group=group.process_group)
            if bucket.is_cuda:
                torch.cuda.synchronize(bucket.device)
            seconds = perf_counter() - start
    wanted = most(COVER * compute_seconds / seconds, bucket.device)
    return min(MOST_EXCHANGES, math.ceil(wanted))


def _seconds_beside(
    compute: Compute, group: RankGroup, bucket: Tensor, count: int
) -> float:
    handles = [
        dist.all_reduce(bucket, group=group.process_group, async_op=True)
        for _ in range(count)
        if group.members
    ]
    seconds = compute.seconds()
    for handle in handles:
        assert handle is not None
        handle.wait()
    if bucket.is_cuda:
        torch.cuda.synchronize(bucket.device)
    return seconds


def most(value: float, device: torch.device) -> float:
    """The greatest value of all ranks, on every rank."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
