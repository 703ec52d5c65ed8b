"""Which nodes take part in a run, and which of their devices play which rank of a plan. Torch-free.

A plan numbers nodes as its cluster does; the nodes that came are numbered as they found each other. The plan's node
that needs the most devices gets the node that has the most, and so on: equal nodes keep their order. Where nodes are of
several kinds, a plan's node is played by one of its own node group. Devices that the plan does not need stay idle until
the next plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from planner.errors import DocumentError, MismatchError
from planner.spec.cluster import Cluster, NodeGroup
from planner.spec.document import read
from planner.spec.plan import Plan
from planner.spec.words import counted

Seat = tuple[int, int]
"""A node, as the nodes found each other, and a device of it."""
ANY_GROUP = ""
"""Node group of every node, where all are of one kind."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The nodes that are there."""

    devices: tuple[int, ...]
    """Of every node."""
    groups: tuple[str, ...] = ()
    """Name of every node's group; empty: all are of one kind."""

    @classmethod
    def of(cls, cluster: Cluster) -> Roster:
        """All nodes of a cluster."""
        nodes = [group for group in cluster.node_groups for _ in range(group.nodes)]
        groups = tuple(group.name for group in nodes) if len(kinds(cluster)) > 1 else ()
        return cls(tuple(group.devices_per_node for group in nodes), groups)

    @classmethod
    def of_nodes(cls, nodes: Iterable[tuple[int, str]]) -> Roster:
        """Of (devices, node group) of every node."""
        brought = list(nodes)
        groups = tuple(group for _, group in brought)
        return cls(
            tuple(devices for devices, _ in brought), groups if any(groups) else ()
        )

    def __add__(self, other: Roster) -> Roster:
        """These nodes, then those."""
        return Roster.of_nodes(
            (devices, group)
            for nodes in (self, other)
            for devices, group in zip(nodes.devices, nodes.by_group, strict=True)
        )

    @property
    def by_group(self) -> tuple[str, ...]:
        """Name of every node's group; `ANY_GROUP` where all are of one kind."""
        return self.groups or (ANY_GROUP,) * len(self.devices)

    def devices_of(self, group: str) -> tuple[int, ...]:
        """Devices of every node of a group, the most first."""
        found = (
            count
            for count, name in zip(self.devices, self.by_group, strict=True)
            if name == group
        )
        return tuple(sorted(found, reverse=True))

    @property
    def key(self) -> str:
        """The same for nodes in another order: ``4-4-2``, or ``a100.4-h100.8-h100.8``; fit for the name of a file."""
        return "-".join(
            f"{quote(group, safe='').replace('-', '%2D')}.{count}"
            if group
            else str(count)
            for group in sorted(set(self.by_group))
            for count in self.devices_of(group)
        )

    def __str__(self) -> str:
        return " and ".join(
            _in_words(self.devices_of(group), group)
            for group in sorted(set(self.by_group))
        )


def _in_words(devices: tuple[int, ...], group: str) -> str:
    *others, last = sorted(set(devices), reverse=True)
    counts = f"{', '.join(map(str, others))} and {last}" if others else str(last)
    kind = f"{group} " if group else ""
    noun = "device" if counts == "1" else "devices"
    return f"{counted(len(devices), f'{kind}node')} of {counts} {noun}"


def kinds(cluster: Cluster) -> tuple[NodeGroup, ...]:
    """The first node group of every kind: groups that differ but in name, number of nodes and devices per node are of
    one."""
    found: dict[str, NodeGroup] = {}
    for group in cluster.node_groups:
        alike = group.model_copy(
            update={"name": "any", "nodes": 1, "devices_per_node": 1}
        )
        found.setdefault(alike.model_dump_json(), group)
    return tuple(found.values())


def check_groups(cluster: Cluster) -> None:
    """Refuse a cluster whose nodes cannot tell of which kind they are.

    Raises:
        DocumentError: two node groups of different kinds have one name.
    """
    of_name: dict[str, NodeGroup] = {}
    for group in cluster.node_groups:
        first = of_name.setdefault(group.name, group)
        if len(kinds(Cluster(node_groups=(first, group)))) > 1:
            raise DocumentError(
                f"{group.name!r} names node groups of different devices or links, and nodes tell their group by name.",
                field="request.cluster.node_groups",
                hint="give each a name of its own, and plan again.",
            )


def group_of_node(cluster: Cluster, told: str | None, device: str | None) -> str:
    """Name of the node group that a node is of; `ANY_GROUP` where all nodes are of one kind.

    Args:
        told: by whoever starts the node; None: nothing.
        device: catalogue id of the device that the node has; None: not known.

    Raises:
        DocumentError: the group was not told, and the device does not tell it either.
        MismatchError: no group has this name.
    """
    check_groups(cluster)
    names = list(dict.fromkeys(group.name for group in cluster.node_groups))
    listed = " or ".join(names)
    if told is not None and told not in names:
        raise MismatchError(
            f"the plan's cluster has no node group {told!r}.",
            field="group",
            hint=f"give {listed}.",
        )
    if len(kinds(cluster)) == 1:
        return ANY_GROUP
    if told is not None:
        return told
    fitting = {
        group.name
        for group in cluster.node_groups
        if device is not None
        and device
        == (group.device if isinstance(group.device, str) else group.device.id)
    }
    if len(fitting) == 1:
        return fitting.pop()
    raise DocumentError(
        "the plan's cluster has several kinds of nodes, and the device of this one does not tell which it is.",
        field="group",
        hint=f"give this node's: {listed}.",
    )


def seats(plan: Plan, roster: Roster) -> Mapping[Seat, int] | None:
    """Which rank of the plan every device plays; None: the plan needs more than there is."""
    needed: dict[int, int] = {}
    for row in plan.placement:
        needed[row.node] = max(needed.get(row.node, 0), row.device + 1)
    names = [
        group.name
        for group in plan.request.cluster.node_groups
        for _ in range(group.nodes)
    ]
    group_of = {node: names[node] if roster.groups else ANY_GROUP for node in needed}
    pairs: dict[int, int] = {}
    for group in set(group_of.values()):
        planned = sorted(
            (node for node in needed if group_of[node] == group),
            key=lambda node: (-needed[node], node),
        )
        there = [node for node, name in enumerate(roster.by_group) if name == group]
        there.sort(key=lambda node: (-roster.devices[node], node))
        if len(planned) > len(there):
            return None
        pairs |= zip(planned, there, strict=False)
    if any(needed[node] > roster.devices[pairs[node]] for node in needed):
        return None
    return {(pairs[row.node], row.device): row.rank for row in plan.placement}


class KnownPlans:
    """The plan of every roster that was planned for, in a folder that all nodes share: who comes back need not wait.

    Args:
        plan: that the run was begun with; plans of another model or job, from another run, do not count.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._request = plan.request

    def find(self, roster: Roster) -> Plan | None:
        """The plan for these nodes; None: nobody has asked for one yet."""
        path = self._path(roster)
        return self._read(path) if path.is_file() else None

    def keep(self, roster: Roster, plan: Plan) -> None:
        """Write it under another name first: another node may read at any time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(roster)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(plan.model_dump_json(by_alias=True), encoding="utf-8")
        os.replace(partial, path)

    def by_id(self, plan_id: str) -> Plan | None:
        """The plan of this id; None: it is not among them."""
        plans = map(self._read, sorted(self._folder.glob("plan-*.json")))
        return next(
            (plan for plan in plans if plan is not None and plan.id == plan_id), None
        )

    def _read(self, path: Path) -> Plan | None:
        plan = read(Plan, path)
        ours, theirs = (
            (each.profile_id, each.job) for each in (self._request, plan.request)
        )
        return plan if ours == theirs else None

    def _path(self, roster: Roster) -> Path:
        return self._folder / f"plan-{roster.key}.json"
