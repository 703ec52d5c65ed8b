"""A lower bound on the step of every part of a cluster, before its layouts are bounded.

For every split of the model's layers (micro-batch size m; tensor and context degree t,
c) W(g) is the least time of one micro-batch through all layers on devices of node group
g, wherever ranks are placed, and R the sum over layers of their least share of W(g). On
n(g) devices of every group, some device is busy for

    T >= ceil(batch / m) t c R / sum over g of n(g) / W(g)

The bound of a part is the least T over the splits that it has devices for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.cost import Workload
from planner.cost.nearest import nearest_ticks
from planner.search.engine.bound import IMPOSSIBLE
from planner.search.engine.space import Split, divisors
from planner.search.engine.sums import Floats
from planner.search.parts import Part
from planner.search.support import supported_space

_ROUNDING = 1 - 1e-9


def least_work(whole: Workload, parts: Sequence[Part]) -> list[int]:
    """Return nanoseconds that no layout of each part beats.

    Args:
        whole: the workload on all devices of the cluster.
        parts: of the cluster.
    """
    degrees = sorted({each for part in parts for each in divisors(part.devices)})
    together = _LeastWork(whole, degrees)
    alone = [_LeastWork(group, degrees) for group in whole.groups] or [together]
    found = []
    for part in parts:
        devices = _devices_of_groups(whole, part)
        used = np.flatnonzero(devices)
        if len(used) == 1:
            found.append(alone[used[0]].bound_on(devices[used]))
        else:
            found.append(together.bound_on(devices))
    return found


def _devices_of_groups(whole: Workload, part: Part) -> Floats:
    """Return the devices of a part in every node group of the whole cluster."""
    first_nodes = np.cumsum([each.nodes for each in whole.cluster.node_groups])
    devices = np.zeros(len(first_nodes))
    place = 0
    for group in part.cluster.node_groups:
        node = part.nodes[place]
        index = int(np.searchsorted(first_nodes, node, side="right"))
        devices[index] += group.nodes * group.devices_per_node
        place += group.nodes
    return devices


class _LeastWork:
    """The least work of a batch under every split, on one or several node groups."""

    def __init__(self, work: Workload, degrees: Sequence[int]) -> None:
        """Price every split.

        Args:
            work: on the node groups.
            degrees: of tensor and context parallelism.
        """
        self.groups = work.groups or (work,)
        batch = work.job.global_batch_size
        space = supported_space(work, degrees)
        ranks = []
        shares = []
        totals = []
        for split, chunk_counts in zip(space.splits, space.chunks, strict=True):
            for chunks in chunk_counts:
                of_groups, least_share = self._of_micro_batch(split, chunks)
                micro_batches = -(-batch // split.micro_batch_size)
                ranks.append(split.tensor * split.context)
                shares.append(micro_batches * ranks[-1] * least_share)
                totals.append(of_groups)
        self.ranks = np.array(ranks, dtype=np.int64)
        """t c, per split and number of chunks."""
        self.shares = np.array(shares)
        """ceil(batch / m) t c R, for the same."""
        self.totals = np.array(totals).reshape(-1, len(self.groups))
        """W, [split with chunks, group]."""

    def _of_micro_batch(self, split: Split, chunks: int) -> tuple[Floats, float]:
        """Return W of every node group, and R."""
        expert_tensor = split.expert_tensor or None
        ticks = [
            nearest_ticks(group, split.size, chunks, expert_tensor)
            for group in self.groups
        ]
        each = np.array(ticks, dtype=np.float64).sum(axis=1)
        totals = np.maximum(1.0, each.sum(axis=1))
        least_share = float((each / totals[:, None]).min(axis=0).sum())
        return totals, least_share

    def bound_on(self, devices: Floats) -> int:
        """Return nanoseconds that no layout beats.

        Args:
            devices: number of devices in each node group.
        """
        steps = self.shares / (devices / self.totals).sum(axis=1)
        possible = steps[self.ranks <= devices.sum()]
        least = float(possible.min(initial=IMPOSSIBLE))
        return int(least * _ROUNDING)
