"""Which global rank stands where: tensor innermost, then context, then data and pipeline, as `Layout.rank_order` says.

The default is the order of Megatron-LM (Narayanan et al. 2021, section 3): the group that talks most lies on the
fastest links, and pipeline ranks, which talk least, lie furthest apart. The other order keeps every pipeline together
and spreads its replicas (Megatron-LM's --use-tp-pp-dp-mapping).

    (P1)  rank = ((pipeline * data_parallel_degree + data) * context_parallel_degree + context)
                 * tensor_parallel_degree + tensor                                              -> strides()
          or, under ``tp-cp-pp-dp``, with (data * pipeline_parallel_degree + pipeline) in front
          a group that shares out ZeRO's states (`zero_shard_degree`) is a run of neighbours among the data and context
          ranks, which thus lies on the fastest links
    (P4)  experts: the ranks of one pipeline rank, numbered i = (data * context_parallel_degree + context)
          * tensor_parallel_degree + tensor, are regrouped with the tensor-parallel degree t inside an expert innermost,
          then the expert degree e, then ranks with the same experts: i = (copy * e + expert) * t + part; t is the
          tensor-parallel degree unless the layout has another (Megatron-Core's parallel folding, Liu et al. 2025)
                                                                                                  -> expert_of()
    (P2)  ranks fill the nodes in order, which may have different numbers of devices            -> placement()
    (P3)  ranks of one rank // domain_devices reach each other by the link inside a node: a domain is a node, or, where
          scale-up links join several nodes (NVIDIA GB200 NVL72), all of these                  -> widest_data_group()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.communication import Group, crossing, group_of
from planner.spec.layout import Layout
from planner.spec.plan import RankPlacement

CommunicatorName = Literal[
    "tensor",
    "context",
    "expert",
    "data",
    "expert_data",
    "shard",
    "expert_shard",
    "copies",
]


@dataclass(frozen=True, slots=True)
class Strides:
    """By how much the global rank grows with each coordinate: equation (P1)."""

    pipeline: int
    data: int
    context: int
    tensor: int

    def rank(self, pipeline: int, data: int, context: int, tensor: int) -> int:
        """The global rank at these coordinates."""
        return (
            pipeline * self.pipeline
            + data * self.data
            + context * self.context
            + tensor * self.tensor
        )


def strides(layout: Layout) -> Strides:
    """Equation (P1)."""
    context = layout.tensor_parallel_degree
    inner = context * layout.context_parallel_degree
    if layout.rank_order == "tp-cp-pp-dp":
        return Strides(inner, inner * layout.pipeline_parallel_degree, context, 1)
    return Strides(inner * layout.data_parallel_degree, inner, context, 1)


def placement(
    layout: Layout, devices_of_nodes: Sequence[int]
) -> tuple[RankPlacement, ...]:
    """One row per global rank, in order.

    Args:
        layout: its degrees and the order of its ranks.
        devices_of_nodes: devices of every node, in the order in which ranks fill them: equation (P2).
    """
    places = [
        (node, device)
        for node, devices in enumerate(devices_of_nodes)
        for device in range(devices)
    ]
    of, rows = strides(layout), []
    for pipeline, data, context, tensor in product(
        range(layout.pipeline_parallel_degree),
        range(layout.data_parallel_degree),
        range(layout.context_parallel_degree),
        range(layout.tensor_parallel_degree),
    ):
        rank = of.rank(pipeline, data, context, tensor)
        node, device = places[rank]
        rows.append(
            RankPlacement(
                rank=rank,
                node=node,
                device=device,
                pipeline=pipeline,
                data=data,
                tensor=tensor,
                context=context,
                expert=expert_of(layout, data, context, tensor),
            )
        )
    return tuple(sorted(rows, key=lambda row: row.rank))


def expert_of(layout: Layout, data: int, context: int, tensor: int) -> int:
    """Return which share of the experts a rank has: equation (P4)."""
    replica = data * layout.context_parallel_degree + context
    place = replica * layout.tensor_parallel_degree + tensor
    return place // layout.expert_tensor_degree % layout.expert_parallel_degree


def stage_ranks(layout: Layout, pipeline: int) -> tuple[int, ...]:
    """Global ranks of one pipeline rank."""
    of = strides(layout)
    inner = range(layout.context_parallel_degree * layout.tensor_parallel_degree)
    first = [
        of.rank(pipeline, data, 0, 0) for data in range(layout.data_parallel_degree)
    ]
    return tuple(start + rank for start in first for rank in inner)


class _Runs(NamedTuple):
    """Communicators of a kind, by the places of their members among the ranks of one pipeline rank: equation (P4)."""

    groups: range
    """Where the first one of every group of communicators starts."""
    starts: int
    """How many start there, one rank after the other."""
    members: int
    step: int
    """From one member to the next."""

    def places(self) -> Iterator[range]:
        """Return the places of the members of every communicator."""
        for group in self.groups:
            for first in range(group, group + self.starts):
                yield range(first, first + self.members * self.step, self.step)


def _runs(layout: Layout, name: CommunicatorName) -> _Runs:
    tensor, replicas = layout.tensor_parallel_degree, layout.replicas
    contexts, experts = layout.context_parallel_degree, layout.expert_ranks
    expert_tensor = layout.expert_tensor_degree
    ranks = replicas * tensor
    shards = layout.zero_shard_degree or replicas
    neighbours = shards * tensor
    match name:
        case "tensor":
            return _Runs(range(0, ranks, tensor), 1, tensor, 1)
        case "context":
            return _Runs(range(0, ranks, contexts * tensor), tensor, contexts, tensor)
        case "expert":
            members = layout.expert_parallel_degree
            return _Runs(
                range(0, ranks, experts), expert_tensor, members, expert_tensor
            )
        case "data":
            return _Runs(range(1), tensor, replicas, tensor)
        case "expert_data":
            return _Runs(range(1), experts, ranks // experts, experts)
        case "shard":
            return _Runs(range(0, ranks, neighbours), tensor, shards, tensor)
        case "expert_shard":
            members = neighbours // experts
            return _Runs(range(0, ranks, neighbours), experts, members, experts)
        case "copies":
            return _Runs(range(1), neighbours, replicas // shards, neighbours)


def communicators(
    layout: Layout, name: CommunicatorName, pipeline: int
) -> Iterator[tuple[int, ...]]:
    """Global ranks of every communicator of a kind on one pipeline rank."""
    ranks = stage_ranks(layout, pipeline)
    for places in _runs(layout, name).places():
        yield tuple(ranks[place] for place in places)


def widest_tensor_group(layout: Layout, domain_devices: int) -> Group:
    """The tensor-parallel group that crosses most nodes."""
    return _widest(layout.devices, domain_devices, 1, layout.tensor_parallel_degree)


def widest_context_group(layout: Layout, domain_devices: int) -> Group:
    """The context-parallel group that crosses most nodes."""
    return _widest(
        layout.devices,
        domain_devices,
        layout.tensor_parallel_degree,
        layout.context_parallel_degree,
    )


def widest_expert_group(layout: Layout, domain_devices: int) -> Group:
    """The expert-parallel group that crosses most nodes."""
    return _widest_of(layout, "expert", domain_devices)


def widest_data_group(layout: Layout, domain_devices: int) -> Group:
    """The group that sums gradients, data- and context-parallel ranks, that crosses most nodes."""
    return _widest_of(layout, "data", domain_devices)


def widest_expert_data_group(layout: Layout, domain_devices: int) -> Group:
    """The group that sums the gradients of one expert."""
    return _widest_of(layout, "expert_data", domain_devices)


def widest_shard_group(layout: Layout, domain_devices: int) -> Group:
    """The group that shares out ZeRO's states, that crosses most nodes; without hybrid sharding the data group."""
    return _widest_of(layout, "shard", domain_devices)


def widest_expert_shard_group(layout: Layout, domain_devices: int) -> Group:
    """Those of such a group that have the same experts."""
    return _widest_of(layout, "expert_shard", domain_devices)


def widest_copies_group(layout: Layout, domain_devices: int) -> Group:
    """The ranks that have the same shard, one of every group that shares out the states."""
    return _widest_of(layout, "copies", domain_devices)


def _is_contiguous(layout: Layout) -> bool:
    """Do the data- and context-parallel ranks of a stage lie one tensor-parallel group behind the other?"""
    degrees = (layout.pipeline_parallel_degree, layout.data_parallel_degree)
    return layout.rank_order == "tp-cp-dp-pp" or 1 in degrees


def communicator_degrees(layout: Layout) -> Layout:
    """The layout as far as its communicators go, to be looked up by."""
    names = ("data", "tensor", "pipeline", "context", "expert", "expert_tensor")
    degrees = {
        f"{name}_parallel_degree": getattr(layout, f"{name}_parallel_degree")
        for name in names
    }
    return Layout.model_construct(
        **degrees,
        zero_shard_degree=layout.zero_shard_degree,
        rank_order=layout.rank_order,
    )


def _widest_of(layout: Layout, name: CommunicatorName, domain_devices: int) -> Group:
    """Of all communicators of a kind the one that crosses most nodes."""
    runs = _runs(layout, name)
    if _is_contiguous(layout):
        return _widest(layout.devices, domain_devices, runs.step, runs.members)
    inner = (layout.context_parallel_degree, layout.tensor_parallel_degree)
    shape = (layout.pipeline_parallel_degree, *inner)
    return _widest_run(strides(layout), shape, runs, domain_devices)


@lru_cache(maxsize=4096)
def _widest_run(
    of: Strides, shape: tuple[int, int, int], runs: _Runs, domain_devices: int
) -> Group:
    """Return the widest group where the data-parallel ranks of a stage do not lie one after the other.

    Communicators whose first members have the same place on a domain, and the same place among the ranks of a data
    rank, cross domains alike; one of each is looked at. Places repeat after as many data ranks, or stages, as a domain
    has devices.
    """
    if runs.members <= 1:
        return Group(1, 1, 1)
    stages, contexts, tensors = shape
    inner = contexts * tensors
    period = inner * domain_devices
    # Members that are whole tensor-parallel groups apart are so from every tensor rank.
    unit = tensors if runs.step % tensors == 0 else 1
    groups = np.asarray(runs.groups[:period])
    firsts = (groups[:, None] + np.arange(min(runs.starts, period))).ravel()
    starts = _ranks_at(of, firsts, inner)
    offsets = [of.rank(stage, 0, 0, 0) for stage in range(min(stages, domain_devices))]
    places = (starts[:, None] + np.unique(offsets)) % domain_devices
    keys = places * inner + (firsts % inner // unit)[:, None]
    _, chosen = np.unique(keys, return_index=True)
    found = set()
    for start, place in zip(*divmod(chosen, places.shape[1]), strict=True):
        members = firsts[start] + runs.step * np.arange(runs.members)
        ranks = _ranks_at(of, members, inner) - starts[start] + places[start, place]
        _, per_node = np.unique(ranks // domain_devices, return_counts=True)
        found.add(Group.over(per_node.tolist()))
    return max(found, key=crossing)


def _ranks_at(of: Strides, places: NDArray[np.int64], inner: int) -> NDArray[np.int64]:
    """Return the global ranks at places among the ranks of the first stage: (P4)."""
    ranks: NDArray[np.int64] = places // inner * of.data + places % inner
    return ranks


def widest_mirror_group(
    layout: Layout, name: CommunicatorName, domain_devices: int
) -> Group:
    """The group that crosses most nodes among those of two pipeline ranks r and P - 1 - r with the same stages."""
    ranks = layout.pipeline_parallel_degree
    groups = set()
    for pipeline in range(ranks // 2):
        here = communicators(layout, name, pipeline)
        there = communicators(layout, name, ranks - 1 - pipeline)
        for one, other in zip(here, there, strict=True):
            groups.add(group_of((*one, *other), domain_devices))
    return max(groups, key=crossing)


@lru_cache(maxsize=4096)
def _widest(devices: int, domain_devices: int, stride: int, members: int) -> Group:
    """Of all groups of `members` ranks, `stride` apart, the one that crosses most nodes."""
    if members <= 1:
        return Group(1, 1, 1)
    span = stride * members
    starts = (
        first + offset for first in range(0, devices, span) for offset in range(stride)
    )
    # Groups that start at the same place of a domain cross domains alike.
    distinct = {start % domain_devices for start in starts}
    groups = {
        group_of(range(start, start + span, stride), domain_devices)
        for start in distinct
    }
    return max(groups, key=crossing)


def boundary_crosses_nodes(layout: Layout, boundary: int, domain_devices: int) -> bool:
    """Does any rank of stage `boundary` sit on another node (or domain) than its peer of the next stage?"""
    of = strides(layout)
    if of.pipeline >= domain_devices:
        return True
    # Data ranks stand at the same places of domains again after as many as a domain has devices.
    replicas = range(min(layout.data_parallel_degree, domain_devices))
    inner = range(layout.context_parallel_degree * layout.tensor_parallel_degree)
    starts = [of.rank(boundary, data, 0, 0) for data in replicas]
    return any(
        (start + rank) % domain_devices + of.pipeline >= domain_devices
        for start in starts
        for rank in inner
    )
