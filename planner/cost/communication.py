"""Seconds of collectives over the links that a group really crosses.

Latency-bandwidth model of the ring (Thakur, Rabenseifner, Gropp 2005; Patarasuk, Yuan 2009). For S bytes, n ranks,
latency a and bandwidth b of one device and direction:

    (L1)  ring reduce-scatter or all-gather   (n - 1) a + (n - 1 + x)/n S/b, x steps that move nothing over a link:
                                              inside a node NCCL's kernel, which sets the pace there, copies once more
                                              (src/device/all_gather.h and reduce_scatter.h: n steps; all_reduce.h:
                                              2 n - 1), between nodes x = 0                 -> ring_seconds()
    (L2)  all-reduce                          reduce-scatter, then all-gather, the same x once -> collective_seconds()
    (L3)  over nodes with up to k members each      inside with k ranks and S, then between the nodes with
          S / (1 + f (j - 1)), j members on the node that has fewest                      -> collective_seconds()
          (hierarchical; at f = 1 every member drives its own network adapter, at f = 0 a group one of them, as where
          the collectives' library knows no rails of the network)
    (L4)  point to point, broadcast           a + S/b                                       -> transfer_seconds()
    (L5)  all-to-all among n ranks, k of them on a node: messages inside the node and through the network are in
          flight at the same time; the slower of
              inside    a + (k - 1)/n S/b          at the link inside the node
              between   a + c (n - j)/n S/b        at the network                    -> all_to_all_seconds()
          c = 1: every token is sent to every expert; c < 1: a token is sent to a node once (DeepEP, HybridEP) and
          forwarded inside it, so that (k - 1)/k of S pass the link inside
    (L7)  all-reduce of n > 2 ranks that the switch inside a node sums (NVLink SHARP), if faster than the ring: each
          device sends S once and the n-th part of the sum, at e of the bandwidth (`Link.switch_reduction`), after the
          fixed time that NCCL assumes               25 us + (n + 1)/n S/(e b)              -> switch_seconds()
    (L6)  broadcast to n ranks, before its bytes: the a of every link of a chain through all of them, node by node
                                                                                            -> chain_seconds()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from planner.spec.cluster import Link
from planner.spec.profile import CollectiveName

SWITCH_REDUCTION_SECONDS = 2.5e-5
"""Fixed time of an all-reduce by the switch (NCCL 2.30, src/graph/tuning.cc, hwLatencies of NVLS)."""
_RING_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True, slots=True)
class Group:
    """How the members of a communicator lie on the nodes; nodes that scale-up links join (NVL72) count as one."""

    ranks: int
    nodes: int
    ranks_per_node: int
    """On the fullest node."""
    links: tuple[Link, Link] | None = None
    """Inside and between nodes, where the members stand in several node groups; None: those of their own group."""
    fewest: int | None = None
    """Members on the node that has fewest; None: what is left if every other node is as full as the fullest."""

    @classmethod
    def over(
        cls, members: Collection[int], links: tuple[Link, Link] | None = None
    ) -> Group:
        """Return the group with these numbers of members, one number per node."""
        group = cls(sum(members), len(members), max(members), links)
        fewest = min(members)
        return (
            group if group.fewest_per_node == fewest else replace(group, fewest=fewest)
        )

    @property
    def fewest_per_node(self) -> int:
        """Return the number of members on the node that has fewest."""
        if self.fewest is not None:
            return self.fewest
        others = (self.nodes - 1) * self.ranks_per_node
        return max(1, self.ranks - others)


def group_of(ranks: Sequence[int], domain_devices: int) -> Group:
    """Members of a communicator, by global rank; ranks fill the nodes in order."""
    per_node = Counter(rank // domain_devices for rank in ranks)
    return Group.over(per_node.values())


def crossing(group: Group) -> tuple[int, int, int]:
    """Return how slow a communicator is among those with as many members: nodes, then fewest members on a node."""
    return (group.nodes, -group.fewest_per_node, group.ranks_per_node)


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
    copies_between: float = 1.0,
) -> float:
    """Return the seconds of one collective on a full tensor of `size_bytes`: equations (L2) to (L5).

    Args:
        operation: which collective.
        size_bytes: of the full tensor.
        group: its members.
        intra_node: link inside a node.
        inter_node: link between nodes; None: there is one node.
        latency: False leaves the hops' fixed costs out, as of one among many that follow each other.
        copies: x of equation (L1).
        rails: f of equation (L3).
        copies_between: c of equation (L5).
    """
    if group.ranks == 1 or size_bytes == 0:
        return 0.0
    intra_node, inter_node = group.links or (intra_node, inter_node)
    between = inter_node or intra_node
    if operation == "broadcast":
        return transfer_seconds(size_bytes, intra_node if group.nodes == 1 else between)
    if operation == "all_to_all":
        return all_to_all_seconds(
            size_bytes,
            group,
            intra_node,
            between,
            latency=latency,
            copies_between=copies_between,
        )
    passes = _RING_PASSES[operation]
    if group.nodes == 1:
        ring = ring_seconds(
            size_bytes,
            group.ranks,
            intra_node,
            passes=passes,
            copies=copies,
            latency=latency,
        )
        if operation != "all_reduce":
            return ring
        switch = switch_seconds(size_bytes, group.ranks, intra_node, latency=latency)
        return ring if switch is None else min(ring, switch)
    inside = ring_seconds(
        size_bytes,
        group.ranks_per_node,
        intra_node,
        passes=passes,
        copies=passes * copies,
        latency=latency,
    )
    share = size_bytes / (1 + rails * (group.fewest_per_node - 1))
    return inside + ring_seconds(
        share, group.nodes, between, passes=passes, latency=latency
    )


def switch_seconds(
    size_bytes: float, ranks: int, link: Link, *, latency: bool = True
) -> float | None:
    """Return the seconds of an all-reduce by the switch: equation (L7); None: no switch sums."""
    if link.switch_reduction is None or ranks <= 2:
        return None
    sent_bytes = (ranks + 1) / ranks * size_bytes
    reached = link.switch_reduction * link.bandwidth_bytes_per_second
    fixed = SWITCH_REDUCTION_SECONDS if latency else 0.0
    return fixed + sent_bytes / reached


def all_to_all_seconds(
    size_bytes: float,
    group: Group,
    intra_node: Link,
    inter_node: Link,
    *,
    latency: bool = True,
    copies_between: float = 1.0,
) -> float:
    """Return the seconds of an all-to-all of `size_bytes` per rank: equation (L5)."""
    ranks, neighbours = group.ranks, group.ranks_per_node - 1
    others = ranks - group.fewest_per_node if group.nodes > 1 else 0
    is_forwarded = copies_between < 1 and group.nodes > 1
    inside_part = neighbours / (group.ranks_per_node if is_forwarded else ranks)
    between_part = copies_between * others / ranks
    inside = inside_part * size_bytes / intra_node.bandwidth_bytes_per_second
    between = between_part * size_bytes / inter_node.bandwidth_bytes_per_second
    if latency:
        inside += intra_node.latency_seconds
        between += inter_node.latency_seconds if between else 0.0
    return max(inside, between)


def copies_between_nodes(
    experts_per_token: int, nodes: int, most_nodes: int | None = None
) -> float:
    """Return c of equation (L5) for tokens that go to a node once, whatever number of its experts they need.

    Args:
        experts_per_token: experts that a token is sent to, evenly likely on every node.
        nodes: nodes (scale-up domains) of the expert-parallel group.
        most_nodes: nodes that the router sends a token to at most (DeepSeek-V3: 4); None: all.
    """
    reached = nodes * (1 - (1 - 1 / nodes) ** experts_per_token)
    reached = min(reached, most_nodes or nodes)
    return min(1.0, reached / experts_per_token)


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
