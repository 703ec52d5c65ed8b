"""A lower bound on the step of every part of a cluster, before its layouts are bounded.

For every split of the model's layers (micro-batch size m; tensor, context and expert
degree t, c, e) W is the least time of one micro-batch through all layers. On n devices,
with p pipeline ranks and d = n / (t c p) replicas, some rank is busy for

    T >= M W / p,   M = ceil(batch / (d m))

The bound of a part is the least T over its splits and degrees. Parts share the times of
their splits, so that a part costs a sum and no prices.

On several node groups g of n(g) devices, with W(g) the time on one of them and R the
sum over layers of their least share of W(g), some device is busy for

    T >= ceil(batch / m) t c R / sum over g of n(g) / W(g)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.cost import LayoutCosts, Workload, layout_costs
from planner.cost.nearest import nearest_ticks
from planner.cost.placement import widest_expert_group
from planner.cost.workload import on_part
from planner.search.engine.arrangement import RANK_ORDERS
from planner.search.engine.bound import IMPOSSIBLE
from planner.search.engine.constraints import recompute_modes
from planner.search.engine.space import Split, divisors, runtime_constraints
from planner.search.engine.sums import Floats
from planner.search.parts import Part
from planner.search.support import supported_space
from planner.spec.layout import Layout

_ROUNDING = 1 - 1e-9


class LeastWork:
    """Times of splits, shared by all parts of one cluster."""

    def __init__(self, whole: Workload) -> None:
        """Start without any time.

        Args:
            whole: the workload on all devices of the cluster.
        """
        self.whole = whole
        constraint = runtime_constraints(whole).get("recompute")
        supported = whole.framework.supports.allowed("recompute")
        self._modes = recompute_modes(constraint, supported)
        self._times: dict[tuple[object, ...], float] = {}
        self._of_groups: dict[Split, tuple[Floats, float]] = {}

    def of_parts(self, parts: Sequence[Part]) -> list[int]:
        """Return nanoseconds that no layout of each part beats."""
        if self.whole.groups:
            return [self._on_groups(part) for part in parts]
        return [self._of_part(on_part(self.whole, part.cluster)) for part in parts]

    def _on_groups(self, part: Part) -> int:
        """Return nanoseconds that no layout of a part of several node groups beats."""
        devices = self._devices_of_groups(part)
        work = replace(self.whole, cluster=part.cluster)
        work.__dict__["sizes"] = self.whole.sizes
        batch = work.job.global_batch_size
        least = float(IMPOSSIBLE)
        for split in supported_space(work).splits:
            ranks = split.tensor * split.context
            if ranks > part.devices:
                continue
            totals, least_share = self._on_every_group(split)
            speed = float((devices / totals).sum())
            micro_batches = -(-batch // split.micro_batch_size)
            least = min(least, micro_batches * ranks * least_share / speed)
        return int(least * _ROUNDING)

    def _devices_of_groups(self, part: Part) -> Floats:
        """Return the devices of a part in every node group of the whole cluster."""
        first_nodes = np.cumsum([each.nodes for each in self.whole.cluster.node_groups])
        devices = np.zeros(len(first_nodes))
        place = 0
        for group in part.cluster.node_groups:
            node = part.nodes[place]
            devices[int(np.searchsorted(first_nodes, node, side="right"))] += (
                group.nodes * group.devices_per_node
            )
            place += group.nodes
        return devices

    def _on_every_group(self, split: Split) -> tuple[Floats, float]:
        """Return W of every node group, and R, for a split of the layers."""
        if split not in self._of_groups:
            both = np.array(
                [nearest_ticks(group, split.size) for group in self.whole.groups],
                dtype=np.float64,
            )
            each = both.sum(axis=1)
            totals = np.maximum(1.0, each.sum(axis=1))
            least_share = float((each / totals[:, None]).min(axis=0).sum())
            self._of_groups[split] = totals, least_share
        return self._of_groups[split]

    def _of_part(self, work: Workload) -> int:
        space = supported_space(work)
        batch = work.job.global_batch_size
        least = float(IMPOSSIBLE)
        for split, chunks in zip(space.splits, space.chunks, strict=True):
            for count in chunks:
                for layout in _layouts(work, split, count):
                    replicas = layout.data_parallel_degree
                    micro_batches = -(-batch // (replicas * split.micro_batch_size))
                    time = self._time(work, split, layout)
                    busy = time * micro_batches / layout.pipeline_parallel_degree
                    least = min(least, busy)
        return int(least * _ROUNDING)

    def _time(self, work: Workload, split: Split, layout: Layout) -> float:
        """Return the least nanoseconds of one micro-batch through all layers."""
        if split.expert == 1:
            return self._priced(work, split, layout, None)
        found = []
        for order in RANK_ORDERS:
            placed = layout.model_copy(update={"rank_order": order})
            group = widest_expert_group(placed, work.domain_devices)
            found.append(self._priced(work, split, placed, group))
        return min(found)

    def _priced(
        self, work: Workload, split: Split, layout: Layout, group: object
    ) -> float:
        links = (work.intra_node, work.inter_node, work.domain_devices)
        key = (split, layout.sequence_chunks, group, links)
        if key not in self._times:
            replicas = layout.data_parallel_degree
            even = _with_batch(work, replicas * split.micro_batch_size)
            self._times[key] = self._total(layout_costs(even, layout))
        return self._times[key]

    def _total(self, costs: LayoutCosts) -> float:
        """Return nanoseconds of all layers, each in its shortest permitted mode."""
        total = 0.0
        for first, count in costs.kinds:
            modes = costs.layers[first]
            permitted = [one for mode, one in modes.items() if mode in self._modes]
            every = permitted or list(modes.values())
            total += count * min(
                one.forward_ticks + one.backward_ticks for one in every
            )
        return total


def _with_batch(work: Workload, batch: int) -> Workload:
    """Return the workload with a batch that a layout divides; layers cost the same."""
    job = work.job.model_copy(update={"global_batch_size": batch})
    found = replace(work, job=job)
    for name in ("sizes", "_alike", "spent"):
        found.__dict__[name] = getattr(work, name)
    return found


def _layouts(work: Workload, split: Split, chunks: int) -> Iterator[Layout]:
    """Yield every way to give the ranks of a split to pipelines and replicas."""
    ranks = split.tensor * split.context
    if work.devices % ranks:
        return
    left = work.devices // ranks
    for pipeline in divisors(left):
        data = left // pipeline
        if pipeline > len(work.profile.layers):
            continue
        if data * ranks % split.expert_ranks:
            continue
        yield Layout.model_construct(
            data_parallel_degree=data,
            tensor_parallel_degree=split.tensor,
            pipeline_parallel_degree=pipeline,
            context_parallel_degree=split.context,
            expert_parallel_degree=split.expert,
            expert_tensor_parallel_degree=split.expert_tensor or None,
            micro_batch_size=split.micro_batch_size,
            sequence_parallel=split.sequence_parallel,
            sequence_chunks=chunks,
        )
