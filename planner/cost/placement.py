"""Which global rank stands where: tensor innermost, then context, data, and pipeline outermost.

The order of Megatron-LM (Narayanan et al. 2021, section 3): the group that talks most lies on the fastest links.

    (P1)  rank = ((pipeline * data_parallel_degree + data) * context_parallel_degree + context)
                 * tensor_parallel_degree + tensor                                              -> placement()
          the expert-parallel group is a run of neighbours among the data and context ranks
    (P2)  ranks fill the nodes in order: node = rank // devices_per_node, device = the rest     -> placement()
    (P3)  ranks of one rank // domain_devices reach each other by the link inside a node: a domain is a node, or, where
          scale-up links join several nodes (NVIDIA GB200 NVL72), all of these                  -> widest_data_group()
"""

from __future__ import annotations

from functools import lru_cache

from planner.cost.communication import Group, group_of
from planner.spec.layout import Layout
from planner.spec.plan import RankPlacement


def placement(layout: Layout, devices_per_node: int) -> tuple[RankPlacement, ...]:
    """One row per global rank, in order."""
    rows = []
    for rank in range(layout.devices):
        rest, tensor = divmod(rank, layout.tensor_parallel_degree)
        above, context = divmod(rest, layout.context_parallel_degree)
        pipeline, data = divmod(above, layout.data_parallel_degree)
        node, device = divmod(rank, devices_per_node)
        rows.append(
            RankPlacement(
                rank=rank,
                node=node,
                device=device,
                pipeline=pipeline,
                data=data,
                tensor=tensor,
                context=context,
                expert=(data * layout.context_parallel_degree + context) % layout.expert_parallel_degree,
            )
        )
    return tuple(rows)


def stage_ranks(layout: Layout, pipeline: int) -> tuple[int, ...]:
    """Global ranks of one pipeline rank."""
    per_stage = ranks_per_stage(layout)
    return tuple(range(pipeline * per_stage, (pipeline + 1) * per_stage))


def ranks_per_stage(layout: Layout) -> int:
    """Devices of one pipeline rank."""
    return layout.data_parallel_degree * layout.context_parallel_degree * layout.tensor_parallel_degree


def widest_tensor_group(layout: Layout, domain_devices: int) -> Group:
    """The tensor-parallel group that crosses most nodes."""
    return _widest(layout.devices, domain_devices, 1, layout.tensor_parallel_degree)


def widest_context_group(layout: Layout, domain_devices: int) -> Group:
    """The context-parallel group that crosses most nodes."""
    return _widest(layout.devices, domain_devices, layout.tensor_parallel_degree, layout.context_parallel_degree)


def widest_expert_group(layout: Layout, domain_devices: int) -> Group:
    """The expert-parallel group that crosses most nodes."""
    return _widest(layout.devices, domain_devices, layout.tensor_parallel_degree, layout.expert_parallel_degree)


def widest_data_group(layout: Layout, domain_devices: int) -> Group:
    """The group that sums gradients, data- and context-parallel ranks, that crosses most nodes."""
    members = layout.data_parallel_degree * layout.context_parallel_degree
    return _widest(layout.devices, domain_devices, layout.tensor_parallel_degree, members)


def widest_expert_data_group(layout: Layout, domain_devices: int) -> Group:
    """The group that sums the gradients of one expert."""
    members = layout.data_parallel_degree * layout.context_parallel_degree // layout.expert_parallel_degree
    stride = layout.tensor_parallel_degree * layout.expert_parallel_degree
    return _widest(layout.devices, domain_devices, stride, max(1, members))


@lru_cache(maxsize=4096)
def _widest(devices: int, domain_devices: int, stride: int, members: int) -> Group:
    """Of all groups of `members` ranks, `stride` apart, the one that crosses most nodes."""
    if members == 1:
        return Group(1, 1, 1)
    span = stride * members
    starts = (first + offset for first in range(0, devices, span) for offset in range(stride))
    groups = {group_of(range(start, start + span, stride), domain_devices) for start in starts}
    return max(groups, key=_crossing)


def boundary_crosses_nodes(layout: Layout, boundary: int, domain_devices: int) -> bool:
    """Does any rank of stage `boundary` sit on another node (or domain) than its peer of the next stage?"""
    per_stage = ranks_per_stage(layout)
    first = boundary * per_stage
    return any(
        rank // domain_devices != (rank + per_stage) // domain_devices for rank in range(first, first + per_stage)
    )


def _crossing(group: Group) -> tuple[int, int]:
    return (group.nodes, -group.ranks_per_node)
