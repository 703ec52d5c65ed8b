"""Parts of a cluster that a plan may use when it need not use all: whole nodes, else some devices of one node.

(J1)  of every node group its first n nodes, for every n; of one group alone also the first d devices of its first
      node, for every d                                                                            -> parts_of()
(J3)  of a heterogeneous cluster: any of its node groups, whole, in any order as long as they are at most
      `MOST_ORDERED`, else in the given order; ranks fill them in that order               -> arrangements()
(J2)  price of a token = step x price of the part's devices per second / tokens of a step          -> token_price()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from math import prod

from planner.errors import DocumentError, UnsupportedError
from planner.spec.cluster import Cluster, NodeGroup
from planner.spec.job import Job
from planner.spec.plan import RankPlacement

MOST_PARTS = 4096
"""Of one cluster: more choices of nodes are refused."""
MOST_ORDERED = 3
"""Node groups that are tried in every order."""
_HOUR_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a cluster's devices."""

    nodes: tuple[int, ...]
    """Numbers of its nodes, through all groups of the whole cluster, in the order in which ranks fill them."""
    cluster: Cluster
    """These devices alone."""
    groups: tuple[int, ...] = ()
    """Where it is whole node groups: which, in order."""

    @property
    def devices(self) -> int:
        """How many."""
        return self.cluster.devices

    @property
    def price_per_second(self) -> float:
        """Of all its devices; 0 where no price is known."""
        return (self.cluster.price_per_hour or 0.0) / _HOUR_SECONDS

    def place(self, rows: tuple[RankPlacement, ...]) -> tuple[RankPlacement, ...]:
        """Rows that number the part's own nodes, with the whole cluster's numbers."""
        if self.nodes == tuple(range(len(self.nodes))):
            return rows
        return tuple(
            row.model_copy(update={"node": self.nodes[row.node]}) for row in rows
        )


def whole(cluster: Cluster) -> Part:
    """All of a cluster."""
    return Part(
        tuple(range(sum(group.nodes for group in cluster.node_groups))), cluster
    )


def parts_of(cluster: Cluster) -> tuple[Part, ...]:
    """Every part by (J1), fewest devices first.

    Raises:
        UnsupportedError: there are too many to look at.
    """
    groups = cluster.node_groups
    count = prod(group.nodes + 1 for group in groups)
    if count > MOST_PARTS:
        raise UnsupportedError(
            f"{count - 1} choices of nodes are more than the {MOST_PARTS} that are looked at.",
            field="cluster.node_groups",
            hint="give fewer nodes or groups, or the objective step_time.",
        )
    starts = [
        sum(group.nodes for group in groups[:place]) for place in range(len(groups))
    ]
    found = [
        _part(
            cluster,
            {
                start + node: group.devices_per_node
                for start, group, used in rows
                for node in range(used)
            },
        )
        for counts in product(*(range(group.nodes + 1) for group in groups))
        if any(counts) and (rows := list(zip(starts, groups, counts, strict=True)))
    ]
    found += [
        _part(cluster, {start: devices})
        for start, group in zip(starts, groups, strict=True)
        for devices in range(1, group.devices_per_node)
    ]
    return tuple(sorted(found, key=lambda part: (part.devices, part.nodes)))


def arrangements(cluster: Cluster) -> tuple[Part, ...]:
    """What a plan may use of a cluster when nothing but its speed counts: (J3). All in the given order comes first."""
    groups = cluster.node_groups
    starts = [
        sum(group.nodes for group in groups[:place]) for place in range(len(groups))
    ]
    several = permutations if len(groups) <= MOST_ORDERED else combinations
    chosen = [
        order
        for count in range(len(groups), 0, -1)
        for order in several(range(len(groups)), count)
    ]
    return tuple(
        replace(_part(cluster, _whole_groups(groups, starts, order)), groups=order)
        for order in chosen
    )


def _whole_groups(
    groups: Sequence[NodeGroup], starts: Sequence[int], order: Sequence[int]
) -> dict[int, int]:
    """Devices of every node of these groups."""
    return {
        starts[place] + node: groups[place].devices_per_node
        for place in order
        for node in range(groups[place].nodes)
    }


def _part(cluster: Cluster, devices: dict[int, int]) -> Part:
    return Part(tuple(devices), cluster.part(devices))


def check_prices(cluster: Cluster) -> None:
    """Refuse a cluster some of whose devices have no price, saying where it belongs."""
    for place, group in enumerate(cluster.node_groups):
        if not group.device_price_per_hour:
            raise DocumentError(
                "the objective cost needs the price of one device and hour, above 0.",
                field=f"cluster.node_groups[{place}].price_per_hour",
                hint="give it, in any currency; the catalogue has no prices.",
            )


def token_price(cluster: Cluster, job: Job, step_seconds: float) -> float | None:
    """Of a token, or of a sample for models without a sequence: equation (J2); None: a price is not known."""
    price = cluster.price_per_hour
    if price is None:
        return None
    return (
        step_seconds
        * price
        / _HOUR_SECONDS
        / (job.global_batch_size * (job.sequence_length or 1))
    )
