"""Which ranks measure a link together: groups inside one node, and groups across nodes.

With N nodes of L ranks (global rank = node x L + place on the node), groups of one shape stand side by side, and all of
them work at the same time: so they do in training, where every group of a mesh axis communicates at once.

    inside a node     n consecutive ranks of one node, n = 2, 4, ... L                      nodes = 1
    across nodes      the ranks of one place on k nodes, k = 2, 4, ... N; L such groups     nodes = ranks
                      share the network cards of their nodes
    whole nodes       all ranks of k nodes: a hierarchy of the two                          1 < nodes < ranks
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.errors import RunError, SpecError


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a group, and the nodes that it spans."""

    ranks: int
    nodes: int


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The group of a shape that this rank stands in."""

    shape: Shape
    members: tuple[int, ...]
    """Global ranks; empty for a rank of the remainder that makes no whole group."""
    process_group: dist.ProcessGroup | None
    """None for a rank of the remainder."""

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return self.shape.ranks


def group_sizes(count: int) -> tuple[int, ...]:
    """2, 4, 8, ... and all.

    >>> group_sizes(6)
    (2, 4, 6)
    """
    powers = {
        1 << exponent
        for exponent in range(1, count.bit_length())
        if 1 << exponent <= count
    }
    return tuple(sorted(powers | {count})) if count > 1 else ()


def shapes(nodes: int, ranks_per_node: int) -> tuple[Shape, ...]:
    """All shapes that are measured: inside a node first, then across nodes.

    >>> shapes(2, 2)
    (Shape(ranks=2, nodes=1), Shape(ranks=2, nodes=2), Shape(ranks=4, nodes=2))
    """
    inside = [Shape(ranks, 1) for ranks in group_sizes(ranks_per_node)]
    places = sorted({1, ranks_per_node})
    across = [
        Shape(count * each, count) for count in group_sizes(nodes) for each in places
    ]
    return (*inside, *across)


def groups_of(
    shape: Shape, nodes: int, ranks_per_node: int
) -> tuple[tuple[int, ...], ...]:
    """Global ranks of all groups of a shape; ranks that make no whole group stand in none.

    >>> groups_of(Shape(2, 2), nodes=2, ranks_per_node=2)
    ((0, 2), (1, 3))
    """
    places = shape.ranks // shape.nodes
    return tuple(
        tuple(
            node * ranks_per_node + place
            for node in range(first_node, first_node + shape.nodes)
            for place in range(first_place, first_place + places)
        )
        for first_node in range(0, nodes - shape.nodes + 1, shape.nodes)
        for first_place in range(0, ranks_per_node - places + 1, places)
    )


def make_group(shape: Shape, nodes: int, ranks_per_node: int) -> RankGroup:
    """This rank's group of a shape; every rank must call it, because all take part in the making of every group."""
    mine = RankGroup(shape, (), None)
    for members in groups_of(shape, nodes, ranks_per_node):
        process_group = dist.new_group(list(members))
        if dist.get_rank() in members:
            mine = RankGroup(shape, members, process_group)
    return mine


def world_size() -> int:
    """Ranks of the default process group.

    Raises:
        RunError: there is no process group, or it has one rank.
    """
    if not dist.is_initialized():
        raise RunError(
            "there is no process group.",
            hint="call torch.distributed.init_process_group first.",
        )
    world = dist.get_world_size()
    if world < 2:
        raise RunError(
            "a link has two ends, but there is one rank.",
            field="ranks",
            hint="start at least 2 ranks with torchrun.",
        )
    return world


def find_nodes(ranks_per_node: int | None, device: torch.device) -> tuple[int, int]:
    """Nodes, and ranks on each; every rank must call it.

    Args:
        ranks_per_node: None: what torchrun started here (LOCAL_WORLD_SIZE); without torchrun, all ranks.
        device: of this rank's tensors.

    Raises:
        SpecError: the ranks do not make whole nodes.
        RunError: nodes of unequal numbers of ranks.
    """
    world = world_size()
    here = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % here:
        raise SpecError(
            f"{world} ranks do not make whole nodes of {here}.",
            field="ranks_per_node",
            hint="give a divisor of the number of ranks, or start equally many ranks on every node.",
        )
    bounds = torch.tensor([here, -here], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    most, least = bounds.tolist()
    if most != -least:
        raise RunError(
            f"one node has {-least} ranks, another has {most}.",
            field="ranks_per_node",
            hint="start equally many ranks on every node.",
        )
    return world // here, here
