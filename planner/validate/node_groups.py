"""The node groups that a plan uses: their nodes by number, their devices, and the links that join them.

(P2)  ranks fill the nodes in order, group after group; node numbers go on through all groups   -> used_groups()
(V2)  a communicator over several groups is as slow as the slowest links of them, field by field      -> slowest()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from planner.spec.calibration import Constants, constants_for
from planner.spec.cluster import Cluster, DeviceSpec, Link, NodeGroup
from planner.spec.devices import catalogue, domain_of, find_device, links_of
from planner.spec.plan import RankPlacement


class LinkPair(NamedTuple):
    """Links inside a domain, and between domains, as collectives reach them: equation (K3)."""

    intra_node: Link
    inter_node: Link


@dataclass(frozen=True)
class UsedGroup:
    """One of the cluster's node groups, with as many of its nodes and devices as the plan uses."""

    whole: NodeGroup
    """As the cluster has it."""
    used: NodeGroup
    first_node: int
    """Number of the whole group's first node, through all groups."""
    device: DeviceSpec
    links: LinkPair
    constants: Constants

    def has(self, node: int) -> bool:
        """Is the node of this number one of the group's?"""
        return 0 <= node - self.first_node < self.whole.nodes

    def domain(self, node: int) -> int:
        """Number of the domain that a node stands in: its own, unless scale-up links join several nodes."""
        return (node - self.first_node) // self._domain_nodes

    @cached_property
    def _domain_nodes(self) -> int:
        return domain_of(self.used) // self.used.devices_per_node

    @property
    def devices(self) -> int:
        """That the plan uses."""
        return self.used.nodes * self.used.devices_per_node


def used_groups(
    cluster: Cluster,
    placement: Sequence[RankPlacement],
    constants: Constants | None = None,
) -> tuple[UsedGroup, ...]:
    """In the order in which the ranks use them; all groups, when no rank stands on a node of the cluster.

    Args:
        cluster: of the request.
        placement: in the order of the ranks.
        constants: of every group; None: those of its device's architecture for our own executor.

    Raises:
        UnknownNameError, DocumentError: a device or link that neither the cluster nor the catalogue tells.
    """
    ranks = Counter(row.node for row in placement)
    starts = (0, *accumulate(group.nodes for group in cluster.node_groups))
    order: dict[int, dict[int, int]] = {}
    for node in ranks:
        for place, group in enumerate(cluster.node_groups):
            if 0 <= node - starts[place] < group.nodes:
                order.setdefault(place, {})[node] = ranks[node]
    nodes = order or {place: {} for place in range(len(cluster.node_groups))}
    return tuple(
        _used_group(cluster, place, starts[place], some, len(nodes) == 1, constants)
        for place, some in nodes.items()
    )


def _used_group(
    cluster: Cluster,
    place: int,
    start: int,
    ranks: Mapping[int, int],
    is_alone: bool,
    constants: Constants | None,
) -> UsedGroup:
    whole, field = cluster.node_groups[place], f"request.cluster.node_groups[{place}]"
    devices = min(
        whole.devices_per_node, max(ranks.values(), default=whole.devices_per_node)
    )
    used = whole.model_copy(
        update={"nodes": len(ranks) or whole.nodes, "devices_per_node": devices}
    )
    device = find_device(whole.device, field=f"{field}.device")
    known = catalogue().get(device.id)
    fitted = constants or constants_for(
        "planner",
        known.architecture if known else "",
        has_intra_node=whole.intra_node is not None,
        has_inter_node=whole.inter_node is not None,
    )
    intra_node, inter_node = links_of(used, field=field, is_alone=is_alone)
    links = LinkPair(
        _slowed(intra_node, fitted.intra_node_fraction),
        _slowed(inter_node, fitted.inter_node_fraction) if inter_node else intra_node,
    )
    return UsedGroup(whole, used, start, device, links, fitted)


def _slowed(link: Link, fraction: float) -> Link:
    bandwidth = link.bandwidth_bytes_per_second * fraction
    return (
        link.model_copy(update={"bandwidth_bytes_per_second": bandwidth})
        if fraction != 1
        else link
    )


def slowest(links: Iterable[Link]) -> Link:
    """Most latency and least bandwidth of some links; a sum by the switch is known only of equal links."""
    every = list(links)
    if all(link == every[0] for link in every):
        return every[0]
    return Link(
        latency_seconds=max(link.latency_seconds for link in every),
        bandwidth_bytes_per_second=min(
            link.bandwidth_bytes_per_second for link in every
        ),
    )
