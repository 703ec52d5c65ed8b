"""Which nodes take part in a run, and which of their devices play which rank of a plan. Torch-free.

A plan numbers nodes as its cluster does; the nodes that came are numbered as they found each other. The plan's node
that needs the most devices gets the node that has the most, and so on: equal nodes keep their order. Devices that the
plan does not need stay idle until the next plan.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.spec.cluster import Cluster
from planner.spec.document import read
from planner.spec.plan import Plan

Seat = tuple[int, int]
"""A node, as the nodes found each other, and a device of it."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The nodes that are there."""

    devices: tuple[int, ...]
    """Of every node."""

    @classmethod
    def of(cls, cluster: Cluster) -> Roster:
        """All nodes of a cluster."""
        return cls(tuple(group.devices_per_node for group in cluster.node_groups for _ in range(group.nodes)))

    @property
    def key(self) -> str:
        """The same for nodes in another order: ``4-4-2``."""
        return "-".join(map(str, sorted(self.devices, reverse=True)))

    def __str__(self) -> str:
        *others, last = sorted(set(self.devices), reverse=True)
        counts = f"{', '.join(map(str, others))} and {last}" if others else str(last)
        nodes, devices = len(self.devices), "device" if counts == "1" else "devices"
        return f"{nodes} {'node' if nodes == 1 else 'nodes'} of {counts} {devices}"


def seats(plan: Plan, roster: Roster) -> Mapping[Seat, int] | None:
    """Which rank of the plan every device plays; None: the plan needs more than there is."""
    needed: dict[int, int] = {}
    for row in plan.placement:
        needed[row.node] = max(needed.get(row.node, 0), row.device + 1)
    planned = sorted(needed, key=lambda node: (-needed[node], node))
    there = sorted(range(len(roster.devices)), key=lambda node: (-roster.devices[node], node))
    if len(planned) > len(there):
        return None
    pairs = dict(zip(planned, there, strict=False))
    if any(needed[node] > roster.devices[pairs[node]] for node in planned):
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
        return next((plan for plan in plans if plan is not None and plan.id == plan_id), None)

    def _read(self, path: Path) -> Plan | None:
        plan = read(Plan, path)
        ours, theirs = ((each.profile_id, each.job) for each in (self._request, plan.request))
        return plan if ours == theirs else None

    def _path(self, roster: Roster) -> Path:
        return self._folder / f"plan-{roster.key}.json"
