"""Heterogeneous clusters: every rank is priced by the device and the links of the node group that it stands in.

A cell is the tensor- and context-parallel ranks of one pipeline and one data rank. Data ranks whose cells stand in the
same node groups, stage by stage, and that have as many micro-batches, act alike: they are a column.

    (V1)  ranks fill the node groups in order; a cell stands in one of them                     -> columns_of()
    (V2)  layers are priced by their cell's node group; the tensor, context and expert groups are those of the column's
          cells on the stage, whichever crosses most nodes                                      -> _rank_costs()
    (V3)  gradients are summed over the slowest links, field by field, of all node groups that hold the stage; no rank
          goes on before the slowest of the stage has updated its parameters; groups that share out ZeRO's states
          stand in one node group each, and go at the pace of the slowest of them                -> _linked()
    (V4)  a boundary between two node groups takes the slower of their network links, field by field; so does the way
          from the last rank back to the first, where ranks hold several stages                  -> _boundaries()
    (V5)  step = max over columns and pipeline ranks of end(p) + tail(p)                        -> planner.cost.step
    (V6)  memory of a pipeline rank is that of the column that has least room left, on its device or, where something
          is offloaded, in its host's memory                                                    -> planner.cost.step
    (V7)  shares: one micro-batch after the other goes to the data rank that is done first with it, by the ticks t of a
          micro-batch on its busiest device: (share + P - 1) t, P - 1 to fill its pipeline      -> fair_shares()
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from planner.cost.communication import Group, crossing
from planner.cost.groups import Groups
from planner.cost.layers import LayoutCosts, priced
from planner.cost.offload import is_offloading, refuse_unknown_hosts
from planner.cost.placement import (
    CommunicatorName,
    communicator_degrees,
    communicators,
    strides,
)
from planner.cost.pricing import LayerCost
from planner.cost.shared import shared_costs
from planner.cost.workload import Workload
from planner.errors import LayoutError, UnsupportedError
from planner.schedule import find
from planner.schedule.entry import no_copies
from planner.spec.cluster import Link
from planner.spec.layout import Layout
from planner.spec.profile import RecomputeMode

_KEPT = 4096
"""Prices of a node group's ranks that are kept."""
MIXED_SCHEDULES = ("gpipe", "1f1b")
"""Those of replicas that differ: dropping a replica's last micro-batches leaves their order."""


_Layers = tuple[dict[RecomputeMode, LayerCost], ...]


@dataclass(frozen=True, slots=True)
class Column:
    """Data-parallel ranks that act alike."""

    groups: tuple[int, ...]
    """Node group of every pipeline rank."""
    micro_batches: int
    data_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Sites:
    """Where every global rank stands."""

    groups: tuple[int, ...]
    domains: tuple[int, ...]
    """Ranks of one number reach each other by the links inside a node."""

    def around(self, ranks: Sequence[int]) -> Group:
        """A communicator of these ranks."""
        per_domain = Counter(self.domains[rank] for rank in ranks)
        return Group.over(per_domain.values())


def mixed_costs(work: Workload, layout: Layout) -> LayoutCosts:
    """Price a layout on several node groups, or with shares that differ.

    Raises:
        LayoutError: the degrees do not multiply to the devices, or a cell lies on two node groups.
        UnsupportedError: what the executor does not run where ranks differ.
    """
    layout.check_devices(work.devices)
    columns = columns_of(work, layout)
    check_mixed(work, layout, columns)
    if is_offloading(layout):
        refuse_unknown_hosts(work)
    pricing = _Pricing(work, layout, columns)
    made = tuple(pricing.column(column) for column in columns)
    least = _least(made)
    return replace(
        least,
        work=work,
        micro_batches=max(one.micro_batches for one in made),
        columns=made,
    )


def standings(work: Workload, layout: Layout) -> tuple[tuple[int, ...], ...] | None:
    """By data rank: node group of every pipeline rank; None where a cell lies on two node groups: (V1)."""
    sites, of = _sites(_sizes(work)), strides(layout)
    last = layout.context_parallel_degree * layout.tensor_parallel_degree - 1
    rows = []
    for data in range(layout.data_parallel_degree):
        first = [
            of.rank(pipeline, data, 0, 0)
            for pipeline in range(layout.pipeline_parallel_degree)
        ]
        if any(sites.groups[rank] != sites.groups[rank + last] for rank in first):
            return None
        rows.append(tuple(sites.groups[rank] for rank in first))
    return tuple(rows)


def columns_of(work: Workload, layout: Layout) -> tuple[Column, ...]:
    """Data ranks that act alike, in order of the first of each.

    Raises:
        LayoutError: a cell lies on two node groups.
    """
    rows = standings(work, layout)
    if rows is None:
        size = layout.context_parallel_degree * layout.tensor_parallel_degree
        raise LayoutError(
            f"ranks of one tensor- and context-parallel group of {size} would be in two node groups.",
            field="layout.tensor_parallel_degree",
            hint="choose a tensor_parallel_degree that divides the devices of every node group.",
        )
    alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for data, key in enumerate(
        zip(rows, layout.shares(work.job.global_batch_size), strict=True)
    ):
        alike.setdefault(key, []).append(data)
    return tuple(
        Column(groups, share, tuple(members))
        for (groups, share), members in alike.items()
    )


def check_mixed(work: Workload, layout: Layout, columns: Sequence[Column]) -> None:
    """Refuse what the executor does not run where ranks differ.

    Raises:
        UnsupportedError: names the field.
    """
    why = "on several node groups" if work.groups else "with micro_batch_shares"
    plain = {"sequence_chunks": 1}
    if len(columns) > 1:
        why = f"{why}, where replicas differ" if work.groups else why
        plain |= {"virtual_stages_per_rank": 1, "expert_parallel_degree": 1}
    if layout.folds_experts:
        raise UnsupportedError(
            f"experts cannot have a tensor-parallel degree of their own {why}.",
            field="layout.expert_tensor_parallel_degree",
            hint="remove it.",
        )
    for field, value in plain.items():
        if getattr(layout, field) != value:
            raise UnsupportedError(
                f"{field} must be {value} {why}.",
                field=f"layout.{field}",
                hint=f"give {value}.",
            )
    if not _takes_schedule(layout.schedule, columns):
        raise UnsupportedError(
            f"the schedule {layout.schedule!r} is not priced {why}.",
            field="layout.schedule",
            hint=f"use {' or '.join(MIXED_SCHEDULES)}.",
        )
    rows = dict(
        sorted(
            (data, column.groups) for column in columns for data in column.data_ranks
        )
    )
    if not shards_are_near(
        tuple(rows.values()), layout.context_parallel_degree, layout.zero_shard_degree
    ):
        raise UnsupportedError(
            f"groups of {layout.zero_shard_degree} data- and context-parallel ranks that share ZeRO's states would be "
            "in two node groups.",
            field="layout.zero_shard_degree",
            hint="choose a divisor of the replicas in every node group, or leave it out.",
        )
    if len(columns) > 1 and layout.zero_stage > 1:
        raise UnsupportedError(
            f"zero_stage must be 0 or 1 where replicas differ, since all of them would wait for the slowest in every "
            f"micro-batch, got {layout.zero_stage}.",
            field="layout.zero_stage",
            hint="give 1.",
        )


def _takes_schedule(name: str, columns: Sequence[Column]) -> bool:
    """Replicas that are alike run any schedule with one copy of every stage and an order of its own."""
    entry = find(name)
    has_one_copy = entry.replica_ranks is no_copies
    return name in MIXED_SCHEDULES or (
        len(columns) == 1 and has_one_copy and not entry.needs_durations
    )


def shards_are_near(
    rows: Sequence[tuple[int, ...]], context: int, shards: int | None
) -> bool:
    """Does every group of neighbours that share out ZeRO's states stand in one node group, stage by stage?

    Args:
        rows: node groups of every data rank, see `standings`.
        context: parallel degree: so many neighbours are of one data rank.
        shards: neighbours of a group; None: all of them share out the states, wherever they stand.
    """
    replicas = [row for row in rows for _ in range(context)]
    step = shards or 1
    return all(
        len(set(replicas[start : start + step])) == 1
        for start in range(0, len(replicas), step)
    )


def fair_shares(ticks: Sequence[int], micro_batches: int, fill: int) -> tuple[int, ...]:
    """Micro-batches of every data rank: equation (V7). The largest (share + fill) x ticks is as small as it can be.

    Args:
        ticks: of one micro-batch on every data rank.
        micro_batches: of all together.
        fill: micro-batches that the pipeline takes to fill.
    """
    shares = [0] * len(ticks)
    waiting = [((1 + fill) * each, data) for data, each in enumerate(ticks)]
    heapq.heapify(waiting)
    for _ in range(micro_batches):
        _, data = waiting[0]
        shares[data] += 1
        heapq.heapreplace(waiting, ((shares[data] + 1 + fill) * ticks[data], data))
    return tuple(shares)


class _Pricing:
    """Prices the ranks of one layout."""

    def __init__(
        self, work: Workload, layout: Layout, columns: Sequence[Column]
    ) -> None:
        self.work, self.layout, self.columns = work, layout, columns
        self.groups = work.groups or (work,)
        self.sites = _sites(_sizes(work))
        self.network = (
            _slowest([_network(group) for group in self.groups])
            if work.groups
            else None
        )
        self._communicators = _communicators(
            _sizes(work), communicator_degrees(layout), tuple(columns)
        )
        self._ranks: dict[
            tuple[tuple[int, tuple[int, ...], Groups], int], LayoutCosts
        ] = {}

    def column(self, column: Column) -> LayoutCosts:
        """A column: each of its pipeline ranks, and what is least of them."""
        ranks = tuple(
            self._rank(column, pipeline)
            for pipeline in range(self.layout.pipeline_parallel_degree)
        )
        links = self._boundaries(column)
        return replace(
            _least(ranks),
            work=self.work,
            micro_batches=column.micro_batches,
            ranks=ranks,
            boundary_links=links,
        )

    def _rank(self, column: Column, pipeline: int) -> LayoutCosts:
        """Equations (V2) and (V3)."""
        own = column.groups[pipeline]
        holders = tuple(sorted({each.groups[pipeline] for each in self.columns}))
        key = (
            own,
            holders,
            self._linked(
                self._communicators[self.columns.index(column)][pipeline], holders
            ),
        )
        if (key, column.micro_batches) not in self._ranks:
            found = replace(
                self._priced(*key),
                micro_batches=column.micro_batches,
                layout=self.layout,
            )
            self._ranks[key, column.micro_batches] = found
        return self._ranks[key, column.micro_batches]

    def _priced(
        self, own: int, holders: tuple[int, ...], groups: Groups
    ) -> LayoutCosts:
        """Kept with the node group's workload: most layouts of the same degrees ask for the same."""
        work, layout = self.groups[own], self.layout
        those = [self.groups[other] for other in holders]
        several_stages = layout.pipeline_parallel_degree > 1
        split = (
            layout.micro_batch_size,
            layout.sequence_parallel,
            layout.zero_stage,
            several_stages,
        )
        offloaded = (layout.activation_offload, layout.optimizer_offload)
        key = (
            split,
            offloaded,
            _shapes(groups),
            _figures(self.network),
            tuple(map(id, those)),
        )
        if key not in work.latest:
            if len(work.latest) >= _KEPT:
                work.latest.clear()
            work.latest[key] = self._priced_anew(work, those, groups)
        found: LayoutCosts = work.latest[key]
        return found

    def _priced_anew(
        self, work: Workload, holders: Sequence[Workload], groups: Groups
    ) -> LayoutCosts:
        costs = priced(work, self.layout, groups, network=self.network)
        if len(holders) == 1:
            return costs
        others = [
            priced(other, self.layout, groups, network=self.network)
            for other in holders
        ]
        layers = _waiting_for(costs.layers, [other.layers for other in others])
        return replace(
            costs,
            layers=layers,
            shared=shared_costs(work, self.layout, layers, self.network),
        )

    def _linked(self, groups: Groups, holders: tuple[int, ...]) -> Groups:
        """With the links of those that sum gradients over several node groups: equation (V3)."""
        if len(holders) == 1:
            return groups
        those = [self.groups[each] for each in holders]
        links = (
            _slowest([each.intra_node for each in those]),
            _slowest([_network(each) for each in those]),
        )
        names = ("data", "expert_data", "shard", "expert_shard", "copies")
        return replace(
            groups,
            **{name: replace(getattr(groups, name), links=links) for name in names},
        )

    def _boundaries(self, column: Column) -> tuple[Link, ...]:
        """Equation (V4): of `LayoutCosts.boundary_links`."""
        ranks = self.layout.pipeline_parallel_degree
        links = [self._link(column, rank, rank + 1) for rank in range(ranks - 1)]
        if len(self.columns) == 1 and ranks > 2:
            links.append(self._link(column, ranks - 1, 0))
        return tuple(links)

    def _link(self, column: Column, start: int, stop: int) -> Link:
        """From one pipeline rank to another."""
        here, there = (self.groups[column.groups[rank]] for rank in (start, stop))
        if here is not there:
            return _slowest([_network(each) for each in (here, there)])
        of, size = (
            strides(self.layout),
            self.layout.context_parallel_degree * self.layout.tensor_parallel_degree,
        )
        first = [of.rank(start, data, 0, 0) for data in column.data_ranks]
        ranks, far = (
            [begin + each for begin in first for each in range(size)],
            (stop - start) * of.pipeline,
        )
        crosses = any(
            self.sites.domains[rank] != self.sites.domains[rank + far] for rank in ranks
        )
        return here.inter_node if crosses and here.inter_node else here.intra_node


def _sizes(work: Workload) -> tuple[tuple[int, int], ...]:
    """Devices, and devices of a domain, of every node group."""
    return tuple(
        (group.devices, group.domain_devices) for group in work.groups or (work,)
    )


@lru_cache(maxsize=256)
def _sites(sizes: tuple[tuple[int, int], ...]) -> _Sites:
    groups: list[int] = []
    domains: list[int] = []
    for place, (devices, domain) in enumerate(sizes):
        first = domains[-1] + 1 if domains else 0
        groups += [place] * devices
        domains += [first + rank // domain for rank in range(devices)]
    return _Sites(tuple(groups), tuple(domains))


@lru_cache(maxsize=1024)
def _communicators(
    sizes: tuple[tuple[int, int], ...], layout: Layout, columns: tuple[Column, ...]
) -> tuple[tuple[Groups, ...], ...]:
    """By column and pipeline rank: of the column's ranks the widest of every kind that exchanges activations, and of
    the whole stage of those that sum gradients."""
    stages = range(layout.pipeline_parallel_degree)
    shards: tuple[CommunicatorName, ...] = (
        ("shard", "expert_shard", "copies") if layout.zero_shard_degree else ()
    )
    summing = [
        _widest_groups(sizes, layout, stage, ("data", "expert_data", *shards), None)
        for stage in stages
    ]
    near: tuple[CommunicatorName, ...] = ("tensor", "context", "expert")
    return tuple(
        tuple(
            _groups(_widest_groups(sizes, layout, stage, near, column) | summing[stage])
            for stage in stages
        )
        for column in columns
    )


def _widest_groups(
    sizes: tuple[tuple[int, int], ...],
    layout: Layout,
    stage: int,
    names: tuple[CommunicatorName, ...],
    column: Column | None,
) -> dict[str, Group]:
    """Of one stage, or of a column's ranks on it."""
    of, sites = strides(layout), _sites(sizes)
    cell = layout.context_parallel_degree * layout.tensor_parallel_degree
    mine = (
        {of.rank(stage, data, 0, 0) // cell for data in column.data_ranks}
        if column
        else None
    )
    alone = {
        name
        for name in names
        if name in _DEGREES and getattr(layout, _DEGREES[name]) == 1
    }

    def widest(name: CommunicatorName) -> Group:
        several = communicators(layout, name, stage)
        chosen = (
            ranks for ranks in several if mine is None or ranks[0] // cell in mine
        )
        return max(map(sites.around, chosen), key=crossing)

    return {name: _ALONE if name in alone else widest(name) for name in names}


_DEGREES = {
    "tensor": "tensor_parallel_degree",
    "context": "context_parallel_degree",
    "expert": "expert_parallel_degree",
}
"""By communicator: how many ranks it has; those of one rank need not be looked at."""


def _groups(found: dict[str, Group]) -> Groups:
    """With the data-parallel ranks as those that share out states, unless groups of them do."""
    every = {
        "shard": found["data"],
        "expert_shard": found["expert_data"],
        "copies": _ALONE,
    }
    return Groups(**{**every, **found})


def _shapes(groups: Groups) -> tuple[tuple[int, int, int, int], ...]:
    """How communicators lie on the nodes: with the node groups that they cross, this tells their links too."""
    near, shards = (
        (groups.tensor, groups.context, groups.expert),
        (groups.shard, groups.expert_shard, groups.copies),
    )
    several = (*near, groups.data, groups.expert_data, *shards)
    return tuple(
        (one.ranks, one.nodes, one.ranks_per_node, one.fewest_per_node)
        for one in several
    )


def _figures(link: Link | None) -> tuple[float, float] | None:
    return (link.latency_seconds, link.bandwidth_bytes_per_second) if link else None


_ALONE = Group(1, 1, 1)


def _network(work: Workload) -> Link:
    """How the devices of a node group reach those of others."""
    return work.inter_node or work.intra_node


def _slowest(links: Sequence[Link]) -> Link:
    """What is worst of every link; operations that were fitted apart are not known of such a mixture."""
    if len(set(links)) == 1:
        return links[0]
    return Link(
        latency_seconds=max(link.latency_seconds for link in links),
        bandwidth_bytes_per_second=min(
            link.bandwidth_bytes_per_second for link in links
        ),
    )


def _waiting_for(layers: _Layers, others: Sequence[_Layers]) -> _Layers:
    """The layers, updated no sooner than on the slowest device that holds them: equation (V3)."""

    def slowest(
        mode: RecomputeMode, several: Sequence[dict[RecomputeMode, LayerCost]]
    ) -> int:
        return max(options[mode].optimizer_ticks for options in several)

    known: dict[tuple[int, ...], dict[RecomputeMode, LayerCost]] = {}
    result = []
    for options, *same in zip(layers, *others, strict=True):
        key = tuple(map(id, (options, *same)))
        if key not in known:
            known[key] = {
                mode: cost._replace(optimizer_ticks=slowest(mode, same))
                for mode, cost in options.items()
            }
        result.append(known[key])
    return tuple(result)


_SMALLEST = (
    "forward_ticks",
    "backward_ticks",
    "reduction_ticks",
    "optimizer_ticks",
    "activation_bytes",
    "host_activation_bytes",
)
_PLACES = tuple(map(LayerCost._fields.index, _SMALLEST))
_WEIGHT = LayerCost._fields.index("backward_weight_ticks")


def _least(parts: Sequence[LayoutCosts]) -> LayoutCosts:
    """What no rank of several beats: for bounds, not for prices."""
    known: dict[tuple[int, ...], dict[RecomputeMode, LayerCost]] = {}
    layers = []
    distinct = {id(part.layers): part.layers for part in parts}.values()
    for several in zip(*distinct, strict=True) if len(distinct) > 1 else ():
        key = tuple(map(id, several))
        if key not in known:
            known[key] = {
                mode: _least_cost([options[mode] for options in several])
                for mode in several[0]
            }
        layers.append(known[key])
    dearest = [
        max(same, key=lambda one: one.tail_ticks)
        for same in zip(*(part.shared for part in parts), strict=True)
    ]
    return replace(
        parts[0],
        layers=tuple(layers) or parts[0].layers,
        shared=tuple(dearest),
        reduction_latency_ticks=min(part.reduction_latency_ticks for part in parts),
    )


def _least_cost(costs: Sequence[LayerCost]) -> LayerCost:
    """By place, not by name: a search asks for ten thousands."""
    if all(one is costs[0] for one in costs):
        return costs[0]
    fields: list[Any] = list(costs[0])
    others: Sequence[tuple[Any, ...]] = costs[1:]
    for one in others:
        for place in _PLACES:
            if one[place] < fields[place]:
                fields[place] = one[place]
        if one[_WEIGHT] > fields[_WEIGHT]:
            fields[_WEIGHT] = one[_WEIGHT]
    return LayerCost._make(fields)
