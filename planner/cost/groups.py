"""The communicators of a layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.cost.communication import Group
from planner.cost.placement import (
    widest_context_group,
    widest_copies_group,
    widest_data_group,
    widest_expert_data_group,
    widest_expert_group,
    widest_expert_shard_group,
    widest_mirror_group,
    widest_shard_group,
    widest_tensor_group,
)
from planner.schedule import find
from planner.schedule.entry import no_copies
from planner.spec.layout import Layout


@dataclass(frozen=True, slots=True)
class Groups:
    """The communicators of a layout, each the one that crosses most nodes."""

    tensor: Group
    context: Group
    expert: Group
    data: Group
    """Whose ranks sum gradients: data- and context-parallel ones."""
    expert_data: Group
    """Those of them that hold the same experts."""
    shard: Group
    """Those of `data` that share out ZeRO's states: all of them, or neighbours."""
    expert_shard: Group
    """Those of them that hold the same experts."""
    copies: Group
    """Ranks that hold the same shard, of experts too."""


def groups_of(layout: Layout, domain_devices: int) -> Groups:
    """The communicators of a layout.

    Under a schedule with two copies of every stage the ranks that sum the gradients of a stage, or of a ZeRO shard of
    it, are those of both pipeline ranks that have it.
    """
    groups = _of_one_pipeline_rank(layout, domain_devices)
    if not has_two_copies(layout):
        return groups
    data = widest_mirror_group(layout, "data", domain_devices)
    expert_data = widest_mirror_group(layout, "expert_data", domain_devices)
    copies = widest_mirror_group(layout, "copies", domain_devices)
    return replace(groups, data=data, expert_data=expert_data, copies=copies)


def has_two_copies(layout: Layout) -> bool:
    """Whether the layout's schedule runs two copies of every stage (chimera, dualpipe)."""
    return find(layout.schedule).replica_ranks is not no_copies


def _of_one_pipeline_rank(layout: Layout, domain_devices: int) -> Groups:
    return Groups(
        tensor=widest_tensor_group(layout, domain_devices),
        context=widest_context_group(layout, domain_devices),
        expert=widest_expert_group(layout, domain_devices),
        data=widest_data_group(layout, domain_devices),
        expert_data=widest_expert_data_group(layout, domain_devices),
        shard=widest_shard_group(layout, domain_devices),
        expert_shard=widest_expert_shard_group(layout, domain_devices),
        copies=widest_copies_group(layout, domain_devices),
    )
