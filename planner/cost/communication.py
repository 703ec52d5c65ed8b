"""Seconds of collectives over the links that a group really crosses.

Latency-bandwidth model of the ring (Thakur, Rabenseifner, Gropp 2005; Patarasuk, Yuan 2009). For S bytes, n ranks,
latency a and bandwidth b of one device and direction:

    (L1)  ring reduce-scatter or all-gather   (n - 1) a + (n - 1 + x)/n S/b, x steps that move nothing over a link:
                                              inside a node NCCL's kernel, which sets the pace there, copies once more
                                              (src/device/all_gather.h and reduce_scatter.h: n steps; all_reduce.h:
                                              2 n - 1), between nodes x = 0                 -> ring_seconds()
    (L2)  all-reduce                          reduce-scatter, then all-gather, the same x once -> collective_seconds()
    (L3)  over nodes with k members each      inside with S, then between the nodes with S / (1 + f (k - 1))
                                                                                            -> collective_seconds()
          (hierarchical; at f = 1 every member drives its own network adapter, at f = 0 a group one of them, as where
          the collectives' library knows no rails of the network); members unevenly spread over the nodes run one flat
          ring at the slower link
    (L4)  point to point, broadcast           a + S/b                                       -> transfer_seconds()
    (L5)  all-to-all                          (n - 1) a + (n - 1)/n S/b at the slowest link -> collective_seconds()
    (L6)  broadcast to n ranks, before its bytes: the a of every link of a chain through all of them, node by node
                                                                                            -> chain_seconds()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from planner.spec.cluster import Link
from planner.spec.profile import CollectiveName

_RING_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


@dataclass(frozen=True, slots=True)
class Group:
    """How the members of a communicator lie on the nodes; nodes that scale-up links join (NVL72) count as one."""

    ranks: int
    nodes: int
    ranks_per_node: int
    """On the fullest node."""
    links: tuple[Link, Link] | None = None
    """Inside and between nodes, where the members stand in several node groups; None: those of their own group."""

    @property
    def is_even(self) -> bool:
        """Every node has the same number of members."""
        return self.ranks == self.nodes * self.ranks_per_node


def group_of(ranks: Sequence[int], domain_devices: int) -> Group:
    """Members of a communicator, by global rank; ranks fill the nodes in order."""
    per_node = Counter(rank // domain_devices for rank in ranks)
    return Group(len(ranks), len(per_node), max(per_node.values()))


def ring_seconds(
    size_bytes: float,
    ranks: int,
    link: Link,
    *,
    passes: int = 1,
    copies: float = 0.0,
    latency: bool = True,
) -> float:
    """So many passes round the ring: equations (L1) and (L2)."""
    if ranks == 1:
        return 0.0
    hops = passes * (ranks - 1)
    moved = (hops + copies) / ranks * size_bytes / link.bandwidth_bytes_per_second
    return hops * link.latency_seconds + moved if latency else moved


def collective_seconds(
    operation: CollectiveName,
    size_bytes: float,
    group: Group,
    intra_node: Link,
    inter_node: Link | None,
    *,
    latency: bool = True,
    copies: float = 0.0,
    rails: float = 1.0,
) -> float:
    """Seconds of one collective on a full tensor of `size_bytes`: equations (L2) to (L5).

    Args:
        operation: which collective.
        size_bytes: of the full tensor.
        group: its members.
        intra_node: link inside a node.
        inter_node: link between nodes; None: there is one node.
        latency: False leaves the hops' fixed costs out, as of one among many that follow each other.
        copies: x of equation (L1).
        rails: f of equation (L3).
    """
    if group.ranks == 1 or size_bytes == 0:
        return 0.0
    intra_node, inter_node = group.links or (intra_node, inter_node)
    between = inter_node or intra_node
    if operation == "broadcast":
        return transfer_seconds(size_bytes, intra_node if group.nodes == 1 else between)
    passes = _RING_PASSES[operation]
    if group.nodes == 1:
        copies = 0.0 if operation == "all_to_all" else copies
        return ring_seconds(
            size_bytes,
            group.ranks,
            intra_node,
            passes=passes,
            copies=copies,
            latency=latency,
        )
    if operation == "all_to_all" or not group.is_even:
        return ring_seconds(
            size_bytes, group.ranks, between, passes=passes, latency=latency
        )
    members, each = group.ranks_per_node, passes * copies
    inside = ring_seconds(
        size_bytes, members, intra_node, passes=passes, copies=each, latency=latency
    )
    share = size_bytes / (1 + rails * (members - 1))
    return inside + ring_seconds(
        share, group.nodes, between, passes=passes, latency=latency
    )


def chain_seconds(group: Group, intra_node: Link, inter_node: Link | None) -> float:
    """Seconds until the last rank has the first byte: equation (L6)."""
    intra_node, inter_node = group.links or (intra_node, inter_node)
    within, across = group.ranks - group.nodes, group.nodes - 1
    return (
        within * intra_node.latency_seconds
        + across * (inter_node or intra_node).latency_seconds
    )


def transfer_seconds(size_bytes: float, link: Link) -> float:
    """Seconds from one rank to another: equation (L4)."""
    return link.latency_seconds + size_bytes / link.bandwidth_bytes_per_second
