"""What it costs a pipeline that its ranks share the cores of one machine.

Ranks r = 0 .. n-1 stand in a chain and pass M = n micro-batches down it and back, each a product of t seconds down and
two back, as a step with a fill-drain schedule does (Huang et al. 2019, "GPipe", figure 2c). With a core for every rank
that takes (M + n - 1) 3 t; here it takes longer while more ranks compute than there are cores:

    slowdown = measured / ((M + n - 1) 3 t),    t with as many ranks computing at once as there are cores, at least 1

A layer should therefore be timed beside as many ranks as there are cores (`planner profile --concurrency CORES`), and
its seconds be multiplied by this. Ranks that never wait for each other, such as replicas, slow each other more.
"""

from __future__ import annotations

import statistics
from time import perf_counter

import torch
import torch.distributed as dist

from planner.profiler.cores import available_cores
from planner.profiler.links_overlap import Compute, most

ACTION_SECONDS = 0.02
"""Of one micro-batch down one rank; far more than a message or a time slice takes."""
BACKWARD = 2
"""Products back / products down."""


def pipeline_slowdown(repeats: int) -> float:
    """Measured over all ranks of the default process group, on CPUs. Every rank must call it.

    Args:
        repeats: samples the median is taken over.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    compute = Compute.lasting(ACTION_SECONDS, torch.device("cpu"))
    at_once = min(ranks, available_cores())
    samples = []
    for _ in range(repeats + 1):
        dist.barrier()
        alone = most(compute.seconds() if rank < at_once else 0.0, compute.device)
        dist.barrier()
        began = perf_counter()
        _pass_down_and_back(compute, rank, ranks)
        taken = most(perf_counter() - began, compute.device)
        samples.append(taken / ((2 * ranks - 1) * (1 + BACKWARD) * alone))
    return max(
        1.0, statistics.median(samples[1:])
    )  # the first one makes the connections


def _pass_down_and_back(compute: Compute, rank: int, ranks: int) -> None:
    """As many micro-batches as ranks: all down the chain, then all back."""
    message = torch.zeros(1)
    for step, products in ((1, 1), (-1, BACKWARD)):
        before, after = rank - step, rank + step
        for _ in range(ranks):
            if 0 <= before < ranks:
                dist.recv(message, before)
            for _ in range(products):
                compute.seconds()
            if 0 <= after < ranks:
                dist.send(message, after)
