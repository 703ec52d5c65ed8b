"""Which sets of nodes to plan for, when a run knows which nodes it has.

All devices are not always the best choice: a global batch divides by 4 and not by 3. So
the search also tries smaller sets, of at least half the devices:

- of identical nodes: so many nodes with so many devices each;
- of several kinds of nodes: so many nodes of each kind, those with the most devices.
"""

from __future__ import annotations

from itertools import product
from math import gcd

from planner.replan.membership import Membership

Node = tuple[int, str]
"""Number of devices, and name of the node group."""


def candidate_memberships(
    membership: Membership, global_batch_size: int
) -> list[Membership]:
    """Return the sets of nodes to plan for, in the order of the search.

    The sets with all devices come first, then those whose number of devices has the
    largest common divisor with the global batch size.
    """
    subsets = [subset for subset in _subsets(membership) if subset.devices]
    largest = max((sum(subset.devices) for subset in subsets), default=0)
    candidates = [each for each in subsets if 2 * sum(each.devices) >= largest]
    everything = Membership.of_nodes(_nodes(membership))
    if len(set(everything.devices)) > 1 and everything not in candidates:
        candidates.append(everything)
    most_devices = max((sum(each.devices) for each in candidates), default=0)

    def order(candidate: Membership) -> tuple[bool, int, int, int]:
        devices = sum(candidate.devices)
        common_divisor = gcd(devices, global_batch_size)
        is_smaller = devices < most_devices
        return is_smaller, -common_divisor, -devices, len(candidate.devices)

    return sorted(candidates, key=order)


def _subsets(membership: Membership) -> list[Membership]:
    if len(set(membership.by_group)) > 1:
        return _subsets_of_kinds(membership)
    return _uniform_subsets(membership)


def _uniform_subsets(membership: Membership) -> list[Membership]:
    """So many nodes with equally many devices each."""
    subsets = []
    group = membership.groups[:1]
    for count, smallest in enumerate(sorted(membership.devices, reverse=True), start=1):
        for devices in range(1, smallest + 1):
            subsets.append(Membership((devices,) * count, group * count))
    return subsets


def _subsets_of_kinds(membership: Membership) -> list[Membership]:
    """So many nodes of each kind, those with the most devices, all of them first."""
    choices_by_kind = []
    for group in dict.fromkeys(membership.by_group):
        nodes = [(devices, group) for devices in membership.devices_of(group)]
        choices = [nodes[:count] for count in range(len(nodes), -1, -1)]
        choices_by_kind.append(choices)
    subsets = []
    for choice in product(*choices_by_kind):
        nodes = [node for nodes_of_kind in choice for node in nodes_of_kind]
        subsets.append(Membership.of_nodes(nodes))
    return subsets


def _nodes(membership: Membership) -> list[Node]:
    """All nodes, group by group, the nodes with the most devices first."""
    nodes = []
    for group in dict.fromkeys(membership.by_group):
        for devices in membership.devices_of(group):
            nodes.append((devices, group))
    return nodes
