"""A node's part in an elastic run over several nodes.

Every node starts the same command, which calls `join_run`. `node_kinds` lists the kinds of
nodes that a cluster has: each kind needs a command of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.errors import DocumentError
from planner.executor.elastic.nodes import NodesPolicy, elastic_folder, run_node
from planner.executor.settings import RunSettings
from planner.replan.membership import ANY_GROUP, KnownPlans, group_of_node, kinds
from planner.replan.replanner import NodeReplanner
from planner.replan.searches import local_search
from planner.spec import MeasuredRun, Plan
from planner.spec.words import counted

RANK_COMMAND = ("-m", "planner.replan.node_rank")
NODE_RANGE = re.compile(r"(\d+):(\d+)")
RUN_ID_LENGTH = 12
"""Characters of the plan's id that name a run by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """How the nodes of a run find each other, and what this node contributes.

    None selects the default.
    """

    nodes: str
    """MIN:MAX, the number of nodes."""
    rendezvous: str | None = None
    """HOST:PORT of the store where the nodes meet."""
    run_id: str | None = None
    """The same on every node; the plan's by default."""
    devices: int | None = None
    """Of this node; by default as in the plan's cluster."""
    group: str | None = None
    """Node group of this node in the plan's cluster; by default that of its device."""
    address: str | None = None
    """Of this node, for the others."""
    service: str | None = None
    """Address of the service that finds the plans; by default each node searches."""
    restarts: int | None = None
    """After lost nodes or ranks, in all."""
    last_call_seconds: float | None = None
    join_seconds: float | None = None
    heartbeat_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes that start the same command."""

    group: str
    """Name of their node group; `ANY_GROUP` if all nodes are of one kind."""
    devices: int
    """Of each node."""
    states_devices: bool
    """Whether the command must state the number of devices."""

    def __str__(self) -> str:
        group = f"node group {self.group}, " if self.group else ""
        return f"nodes of {group}{counted(self.devices, 'device')} each"


@dataclass(frozen=True, slots=True)
class JoinedRun:
    """How a run ended that this node took part in."""

    measured: MeasuredRun
    plan: Plan
    """That the run ended with, if it is known; else the one that it began with."""
    had_first_rank: bool
    """Whether rank 0 was on this node."""


def join_run(
    plan: Plan,
    settings: RunSettings,
    options: NodeOptions,
    *,
    metrics: str | Path | None,
    log: Callable[[str], None],
    unfinished: Callable[[MeasuredRun], None] | None,
) -> JoinedRun:
    """Take part in an elastic run with this node's devices, until it ends.

    Args:
        plan: to begin with; the same on every node.
        settings: of the run; the same on every node.
        options: of this node.
        metrics: file for one JSON line per step, on the node of rank 0.
        log: called with every step and decision.
        unfinished: called with the report of a run that fails, before the error is raised.

    Raises:
        PlannerError: the options do not match the plan, or the run failed: see `run_node`.
    """
    check_replanning(plan, settings)
    group = _group_here(plan, options.group, settings.device)
    policy = node_policy(plan, group, options)
    measured, had_first_rank = run_node(
        plan, settings, policy, metrics=metrics, log=log, unfinished=unfinished
    )
    known_plans = KnownPlans(elastic_folder(settings, policy.run_id), plan)
    last_plan = known_plans.by_id(measured.plan_id) or plan
    return JoinedRun(measured, last_plan, had_first_rank)


def check_replanning(plan: Plan, settings: RunSettings) -> None:
    """Refuse a run that could not be planned again, before anything starts.

    Raises:
        DocumentError: node groups have the same name, or the optimizer lacks an option.
    """
    NodeReplanner(plan, local_search(plan))
    settings.optimizer_options.check(plan.request.job.optimizer)


def node_kinds(
    plan: Plan, settings: RunSettings, options: NodeOptions
) -> tuple[NodeKind, ...]:
    """Return the kinds of nodes that need a command of their own.

    Args:
        plan: to begin with.
        settings: of the run.
        options: of the run; group and devices restrict the answer to these nodes.

    Raises:
        DocumentError: the options do not match the plan, or the run has no checkpoints.
    """
    check_replanning(plan, settings)
    found = []
    for group in _groups(plan, options.group):
        sizes = _node_sizes(plan, group)
        if options.devices is not None:
            sizes = [options.devices]
        states_devices = options.devices is not None or len(sizes) > 1
        for devices in sizes:
            node_policy(plan, group, replace(options, devices=devices))
            found.append(NodeKind(group, devices, states_devices))
    elastic_folder(settings, run_id="")  # refuses a run without checkpoints
    return tuple(found)


def node_policy(plan: Plan, group: str, options: NodeOptions) -> NodesPolicy:
    """Return what the executor needs to know of a node.

    Args:
        plan: to begin with.
        group: of the node; `ANY_GROUP` if all nodes are of one kind.
        options: of the node.

    Raises:
        DocumentError: an option has a wrong value.
    """
    least, most = _node_range(options.nodes)
    service = () if options.service is None else ("--planner", options.service)
    chosen: dict[str, Any] = {
        "address": options.address,
        "restarts": options.restarts,
        "last_call_seconds": options.last_call_seconds,
        "join_seconds": options.join_seconds,
        "heartbeat_seconds": options.heartbeat_seconds,
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    return NodesPolicy(
        least=least,
        most=most,
        run_id=options.run_id or plan.id[:RUN_ID_LENGTH],
        devices=options.devices or _only_size(_node_sizes(plan, group)),
        group=group,
        ranks=(*RANK_COMMAND, *service),
        rendezvous=options.rendezvous or "",
        **given,
    )


def _node_range(text: str) -> tuple[int, int]:
    matched = NODE_RANGE.fullmatch(text)
    if matched is None:
        raise DocumentError(
            f"{text!r} is not a range.",
            field="--nnodes",
            hint="pass MIN:MAX, e.g. 2:4.",
        )
    return int(matched[1]), int(matched[2])


def _groups(plan: Plan, group: str | None) -> list[str]:
    """The node groups to list; `ANY_GROUP` alone if all nodes are of one kind."""
    cluster = plan.request.cluster
    if group is not None:
        return [group_of_node(cluster, group, None)]
    if len(kinds(cluster)) == 1:
        return [ANY_GROUP]
    return list(dict.fromkeys(each.name for each in cluster.node_groups))


def _group_here(plan: Plan, group: str | None, device: str | None) -> str:
    """The node group of this node: the given one, or else that of its device."""
    cluster = plan.request.cluster
    asks_device = group is None and len(kinds(cluster)) > 1 and device != "cpu"
    return group_of_node(cluster, group, _device_here() if asks_device else None)


def _device_here() -> str | None:
    """Catalogue id of this node's first device; None if it is unknown."""
    import torch

    from planner.profiler.local_devices import match_catalogue

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    known = match_catalogue(properties.name, properties.total_memory)
    return None if known is None else known.id


def _node_sizes(plan: Plan, group: str) -> list[int]:
    """Devices per node that occur in a group, largest first; `ANY_GROUP`: in any."""
    sizes = set()
    for each in plan.request.cluster.node_groups:
        if group in (each.name, ANY_GROUP):
            sizes.add(each.devices_per_node)
    return sorted(sizes, reverse=True)


def _only_size(sizes: list[int]) -> int:
    if len(sizes) > 1:
        listed = " or ".join(map(str, sizes))
        raise DocumentError(
            f"nodes of the plan's cluster have {listed} devices.",
            field="--nproc-per-node",
            hint="pass the number of this node's devices.",
        )
    return sizes[0]
