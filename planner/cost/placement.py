"""Which global rank stands where: tensor innermost, then data, then pipeline outermost.

The order of Megatron-LM (Narayanan et al. 2021, section 3): the group that talks most lies on the fastest links.

    (P1)  rank = (pipeline * data_parallel_degree + data) * tensor_parallel_degree + tensor     -> placement()
    (P2)  ranks fill the nodes in order: node = rank // devices_per_node, device = the rest     -> placement()
"""

from __future__ import annotations

from planner.cost.communication import Group, group_of
from planner.spec.layout import Layout
from planner.spec.plan import RankPlacement


def placement(layout: Layout, devices_per_node: int) -> tuple[RankPlacement, ...]:
    """One row per global rank, in order."""
    rows = []
    for rank in range(layout.devices):
        rest, tensor = divmod(rank, layout.tensor_parallel_degree)
        pipeline, data = divmod(rest, layout.data_parallel_degree)
        node, device = divmod(rank, devices_per_node)
        rows.append(RankPlacement(rank=rank, node=node, device=device, pipeline=pipeline, data=data, tensor=tensor))
    return tuple(rows)


def stage_ranks(layout: Layout, pipeline: int) -> tuple[int, ...]:
    """Global ranks of one pipeline rank."""
    per_stage = layout.data_parallel_degree * layout.tensor_parallel_degree
    return tuple(range(pipeline * per_stage, (pipeline + 1) * per_stage))


def widest_tensor_group(layout: Layout, devices_per_node: int) -> Group:
    """The tensor-parallel group that crosses most nodes."""
    degree = layout.tensor_parallel_degree
    starts = range(0, layout.devices, degree)
    return max((group_of(range(start, start + degree), devices_per_node) for start in starts), key=_crossing)


def widest_data_group(layout: Layout, devices_per_node: int) -> Group:
    """The data-parallel group that crosses most nodes."""
    tensor, per_stage = layout.tensor_parallel_degree, layout.data_parallel_degree * layout.tensor_parallel_degree
    starts = (
        pipeline * per_stage + offset for pipeline in range(layout.pipeline_parallel_degree) for offset in range(tensor)
    )
    groups = (group_of(range(start, start + per_stage, tensor), devices_per_node) for start in starts)
    return max(groups, key=_crossing)


def boundary_crosses_nodes(layout: Layout, boundary: int, devices_per_node: int) -> bool:
    """Does any rank of stage `boundary` sit on another node than its peer of the next stage?"""
    per_stage = layout.data_parallel_degree * layout.tensor_parallel_degree
    first = boundary * per_stage
    return any(
        rank // devices_per_node != (rank + per_stage) // devices_per_node for rank in range(first, first + per_stage)
    )


def _crossing(group: Group) -> tuple[int, int]:
    return (group.nodes, -group.ranks_per_node)
