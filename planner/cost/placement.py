"""Which global rank stands where: tensor innermost, then context, then data and pipeline, as `Layout.rank_order` says.

The default is the order of Megatron-LM (Narayanan et al. 2021, section 3): the group that talks most lies on the
fastest links, and pipeline ranks, which talk least, lie furthest apart. The other order keeps every pipeline together
and spreads its replicas (Megatron-LM's --use-tp-pp-dp-mapping).

    (P1)  rank = ((pipeline * data_parallel_degree + data) * context_parallel_degree + context)
                 * tensor_parallel_degree + tensor                                              -> strides()
          or, under ``tp-cp-pp-dp``, with (data * pipeline_parallel_degree + pipeline) in front
          the expert-parallel group is a run of neighbours among the data and context ranks, and so is a group that
          shares out ZeRO's states (`zero_shard_degree`), which thus lies on the fastest links
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
        expert = (
            data * layout.context_parallel_degree + context
        ) % layout.expert_parallel_degree
        rows.append(
            RankPlacement(
                rank=rank,
                node=node,
                device=device,
                pipeline=pipeline,
                data=data,
                tensor=tensor,
                context=context,
                expert=expert,
            )
        )
    return tuple(sorted(rows, key=lambda row: row.rank))


def stage_ranks(layout: Layout, pipeline: int) -> tuple[int, ...]:
    """Global ranks of one pipeline rank."""
    of = strides(layout)
    inner = range(layout.context_parallel_degree * layout.tensor_parallel_degree)
    first = [
        of.rank(pipeline, data, 0, 0) for data in range(layout.data_parallel_degree)
    ]
    return tuple(start + rank for start in first for rank in inner)


def communicators(
    layout: Layout, name: CommunicatorName, pipeline: int
) -> Iterator[tuple[int, ...]]:
    """Global ranks of every communicator of a kind on one pipeline rank."""
    of, contexts = strides(layout), layout.context_parallel_degree
    tensors, replicas = (
        range(layout.tensor_parallel_degree),
        range(layout.data_parallel_degree * contexts),
    )
    expert, shards = (
        layout.expert_parallel_degree,
        layout.zero_shard_degree or layout.replicas,
    )
    runs: dict[str, list[Sequence[int]]] = {
        "tensor": [[replica] for replica in replicas],
        "context": [
            replicas[start : start + contexts] for start in replicas[::contexts]
        ],
        "expert": [replicas[start : start + expert] for start in replicas[::expert]],
        "data": [replicas],
        "expert_data": [replicas[start::expert] for start in range(expert)],
        "shard": [replicas[start : start + shards] for start in replicas[::shards]],
        "expert_shard": [
            replicas[start : start + shards : expert]
            for start in replicas
            if start % shards < expert
        ],
        "copies": [replicas[start::shards] for start in range(shards)],
    }
    for run in runs[name]:
        rows = [
            [of.rank(pipeline, *divmod(replica, contexts), tensor) for replica in run]
            for tensor in tensors
        ]
        yield from (
            [tuple(rank for row in rows for rank in row)]
            if name == "tensor"
            else map(tuple, rows)
        )


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
    if not _is_contiguous(layout):
        return _widest_apart(layout, "expert", domain_devices)
    return _widest(
        layout.devices,
        domain_devices,
        layout.tensor_parallel_degree,
        layout.expert_parallel_degree,
    )


def widest_data_group(layout: Layout, domain_devices: int) -> Group:
    """The group that sums gradients, data- and context-parallel ranks, that crosses most nodes."""
    if not _is_contiguous(layout):
        return _widest_apart(layout, "data", domain_devices)
    members = layout.data_parallel_degree * layout.context_parallel_degree
    return _widest(
        layout.devices, domain_devices, layout.tensor_parallel_degree, members
    )


def widest_expert_data_group(layout: Layout, domain_devices: int) -> Group:
    """The group that sums the gradients of one expert."""
    if not _is_contiguous(layout):
        return _widest_apart(layout, "expert_data", domain_devices)
    members = (
        layout.data_parallel_degree
        * layout.context_parallel_degree
        // layout.expert_parallel_degree
    )
    stride = layout.tensor_parallel_degree * layout.expert_parallel_degree
    return _widest(layout.devices, domain_devices, stride, max(1, members))


def _is_contiguous(layout: Layout) -> bool:
    """Do the data- and context-parallel ranks of a stage lie one tensor-parallel group behind the other?"""
    degrees = (layout.pipeline_parallel_degree, layout.data_parallel_degree)
    return layout.rank_order == "tp-cp-dp-pp" or 1 in degrees


def communicator_degrees(layout: Layout) -> Layout:
    """The layout as far as its communicators go, to be looked up by."""
    names = ("data", "tensor", "pipeline", "context", "expert")
    degrees = {
        f"{name}_parallel_degree": getattr(layout, f"{name}_parallel_degree")
        for name in names
    }
    return Layout.model_construct(
        **degrees,
        zero_shard_degree=layout.zero_shard_degree,
        rank_order=layout.rank_order,
    )


class _Runs(NamedTuple):
    """Communicators of a kind, by the replicas (data- and context-parallel ranks) that they consist of."""

    groups: range
    """Where the first one of every group of communicators starts."""
    starts: int
    """How many start there, one replica after the other."""
    members: int
    step: int
    """From one member to the next."""


def _runs(layout: Layout, name: CommunicatorName) -> _Runs:
    expert, replicas = layout.expert_parallel_degree, layout.replicas
    shards = layout.zero_shard_degree or replicas
    return {
        "expert": _Runs(range(0, replicas, expert), 1, expert, 1),
        "data": _Runs(range(1), 1, replicas, 1),
        "expert_data": _Runs(range(1), expert, replicas // expert, expert),
        "shard": _Runs(range(0, replicas, shards), 1, shards, 1),
        "expert_shard": _Runs(
            range(0, replicas, shards), expert, shards // expert, expert
        ),
        "copies": _Runs(range(1), shards, replicas // shards, shards),
    }[name]


def _widest_apart(layout: Layout, name: CommunicatorName, domain_devices: int) -> Group:
    """Of all communicators of a kind, whose members may lie unevenly apart, the one that crosses most nodes."""
    stages, contexts = layout.pipeline_parallel_degree, layout.context_parallel_degree
    shape = (stages, contexts, layout.tensor_parallel_degree)
    return _widest_run(strides(layout), shape, _runs(layout, name), domain_devices)


@lru_cache(maxsize=4096)
def _widest_run(
    of: Strides, shape: tuple[int, int, int], runs: _Runs, domain_devices: int
) -> Group:
    """Those that start at the same place of a domain, and at the same context rank, cross domains alike; so one of
    each is looked at, and where they start comes again after as many data ranks, or stages, as a domain has devices.
    """
    if runs.members <= 1:
        return Group(1, 1, 1)
    stages, contexts, tensors = shape
    period = contexts * domain_devices
    firsts = [
        group + start
        for group in runs.groups[:period]
        for start in range(min(runs.starts, period))
    ]
    others = {
        of.rank(stage, 0, 0, tensor)
        for stage in range(min(stages, domain_devices))
        for tensor in range(tensors)
    }
    found: dict[tuple[int, int], int] = {}
    for first in firsts:
        at = of.rank(0, *divmod(first, contexts), 0)
        found |= {
            ((at + other) % domain_devices, first % contexts): first for other in others
        }
    groups = set()
    for (place, _), first in found.items():
        replicas = range(first, first + runs.members * runs.step, runs.step)
        ranks = [of.rank(0, *divmod(replica, contexts), 0) for replica in replicas]
        groups.add(
            group_of([place + rank - ranks[0] for rank in ranks], domain_devices)
        )
    return max(groups, key=crossing)


def widest_shard_group(layout: Layout, domain_devices: int) -> Group:
    """The group that shares out ZeRO's states, that crosses most nodes; without hybrid sharding the data group."""
    if not _is_contiguous(layout):
        return _widest_apart(layout, "shard", domain_devices)
    members = layout.zero_shard_degree or layout.replicas
    return _widest(
        layout.devices, domain_devices, layout.tensor_parallel_degree, members
    )


def widest_expert_shard_group(layout: Layout, domain_devices: int) -> Group:
    """Those of such a group that hold the same experts."""
    if not _is_contiguous(layout):
        return _widest_apart(layout, "expert_shard", domain_devices)
    members = (
        layout.zero_shard_degree or layout.replicas
    ) // layout.expert_parallel_degree
    stride = layout.tensor_parallel_degree * layout.expert_parallel_degree
    return _widest(layout.devices, domain_devices, stride, max(1, members))


def widest_copies_group(layout: Layout, domain_devices: int) -> Group:
    """The ranks that hold the same shard, one of every group that shares out the states."""
    if not _is_contiguous(layout):
        return _widest_apart(layout, "copies", domain_devices)
    shards = layout.zero_shard_degree or layout.replicas
    stride = layout.tensor_parallel_degree * shards
    return _widest(
        layout.devices, domain_devices, stride, max(1, layout.replicas // shards)
    )


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
    if members == 1:
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
