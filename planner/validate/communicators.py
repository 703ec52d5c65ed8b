"""Who exchanges with whom, and over which links: the communicators of a cell.

A cell is the tensor- and context-parallel ranks of one pipeline rank and one data-parallel rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.spec.cluster import Link
from planner.spec.layout import Layout
from planner.spec.plan import RankPlacement
from planner.validate.node_groups import LinkPair, UsedGroup

Coordinate = tuple[int, ...]
Axis = Callable[[RankPlacement], Coordinate]
"""What the members of one communicator have in common."""


class Spread(NamedTuple):
    """How the members of one communicator lie on the nodes; nodes that scale-up links join count as one."""

    ranks: int
    nodes: int
    fullest: int
    """Members on the node that has most."""
    fewest: int
    """Members on the node that has fewest."""


class Communicator(NamedTuple):
    """The one of its kind that crosses most nodes."""

    spread: Spread
    links: LinkPair


@dataclass(frozen=True)
class Site:
    """Where a cell stands, as far as its prices depend on it."""

    group: UsedGroup
    communicators: Mapping[str, Communicator]
    """By name, see `near_axes` and `far_axes`."""
    tied: Link
    """Between stages that use the same parameters."""


def near_axes(layout: Layout) -> Mapping[str, Axis]:
    """Ranks that exchange activations; experts: equation (P4)."""
    experts, part = layout.expert_ranks, layout.expert_tensor_degree
    return {
        "tensor": lambda row: (row.pipeline, row.data, row.context),
        "context": lambda row: (row.pipeline, row.data, row.tensor),
        "expert": lambda row: (
            row.pipeline,
            place_of(layout, row) // experts,
            place_of(layout, row) % part,
        ),
    }


def far_axes(layout: Layout) -> Mapping[str, Axis]:
    """Ranks that sum gradients: data ranks (context ranks among them, whose gradients are of other tokens);
    expert_data are the ranks that have the same part of the same experts. ZeRO's states are shared out by shard, runs
    of neighbours among the data ranks, and their experts by expert_shard; copies have the same shard."""
    replicas = layout.data_parallel_degree * layout.context_parallel_degree
    shards = layout.zero_shard_degree or replicas
    neighbours = shards * layout.tensor_parallel_degree
    experts = layout.expert_ranks
    return {
        "data": lambda row: (row.pipeline, row.tensor),
        "expert_data": lambda row: (row.pipeline, place_of(layout, row) % experts),
        "shard": lambda row: (
            row.pipeline,
            row.tensor,
            place_of(layout, row) // neighbours,
        ),
        "expert_shard": lambda row: (
            row.pipeline,
            place_of(layout, row) // neighbours,
            place_of(layout, row) % experts,
        ),
        "copies": lambda row: (row.pipeline, place_of(layout, row) % neighbours),
    }


def place_of(layout: Layout, row: RankPlacement) -> int:
    """Place of a rank among those of its pipeline rank: equation (P4)."""
    replica = row.data * layout.context_parallel_degree + row.context
    return replica * layout.tensor_parallel_degree + row.tensor


def widest(
    rows: Sequence[RankPlacement], axis: Axis, domains: Mapping[int, Coordinate]
) -> Spread:
    """Of all communicators along an axis: most domains, then fewest members on one of them.

    Args:
        rows: ranks, of which each stands in one communicator.
        axis: what the members of one have in common.
        domains: of every rank.
    """
    members: dict[Coordinate, Counter[Coordinate]] = {}
    for row in rows:
        members.setdefault(axis(row), Counter())[domains[row.rank]] += 1
    return max(
        map(_spread, members.values()),
        key=lambda spread: (spread.nodes, -spread.fewest, spread.fullest),
    )


def _spread(ranks: Counter[Coordinate]) -> Spread:
    members = ranks.values()
    return Spread(ranks.total(), len(ranks), max(members), min(members))
