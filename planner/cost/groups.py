"""The communicators of a layout."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost.communication import Group
from planner.cost.placement import (
    widest_context_group,
    widest_copies_group,
    widest_data_group,
    widest_expert_data_group,
    widest_expert_group,
    widest_expert_shard_group,
    widest_shard_group,
    widest_tensor_group,
)
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
    """The communicators of a layout."""
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
