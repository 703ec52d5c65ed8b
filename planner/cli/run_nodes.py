"""`planner run --elastic --nodes MIN:MAX`: a command that every node starts, and that takes part in the same run."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.cli.arguments import add_option, positive_int, positive_seconds, refuse
from planner.cli.console import STDOUT, check_output, words
from planner.errors import DocumentError
from planner.executor.elastic.nodes import (
    DEFAULT_HEARTBEAT_SECONDS,
    DEFAULT_JOIN_SECONDS,
    DEFAULT_LAST_CALL_SECONDS,
    NodesPolicy,
    elastic_folder,
    run_node,
)
from planner.executor.elastic.roster import ANY_GROUP, KnownPlans, group_of_node, kinds
from planner.executor.elastic.supervisor import DEFAULT_RESTARTS
from planner.executor.settings import RunSettings
from planner.spec import MeasuredRun, Plan

SHORTER = {"--timeout-seconds": "--timeout", "--grace-seconds": "--grace"}
"""Options of the ranks, as this command calls them."""
RANK = ("-m", "planner.cli.node_rank")
NODES = re.compile(r"(\d+):(\d+)")
ONE_NODE_ONLY = ("cooldown", "discover", "reference_steps")
"""Options of an elastic run on one node: with several, a lost rank's node begins anew with all of its devices."""
NODES_ONLY = (
    "rendezvous",
    "run_id",
    "group",
    "devices",
    "address",
    "last_call",
    "join",
    "heartbeat",
)
PRINTED = (
    "run_id",
    "last_call",
    "join",
    "heartbeat",
    "planner",
    "restarts",
    "report",
    "metrics",
    "output",
)
"""Options besides the settings that the printed command has too; every node has an address of its own."""


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """The options of several nodes."""
    add_option(
        parser,
        "--nodes",
        str,
        metavar="MIN:MAX",
        help="with --elastic: train on so many nodes, whichever are there; prints the command that each one starts",
    )
    add_option(
        parser,
        "--rendezvous",
        str,
        metavar="HOST:PORT",
        help="with --nodes: take part with this node; the store by which the nodes find each other is there",
    )
    add_option(
        parser,
        "--run-id",
        str,
        metavar="ID",
        help="with --nodes: the same on every node (default: the plan's)",
    )
    add_option(
        parser,
        "--devices",
        positive_int,
        metavar="N",
        help="with --nodes: of this node (default: as in the cluster)",
    )
    parser.add_argument(
        "--group",
        metavar="NAME",
        help="with --nodes: node group of the plan's cluster that this node is of (default: by its device, where "
        "that tells; needed where the cluster has several kinds of nodes)",
    )
    parser.add_argument(
        "--address",
        help="with --nodes: of this node, for the others (default: its name)",
    )
    for name, seconds, text in (
        (
            "--last-call",
            DEFAULT_LAST_CALL_SECONDS,
            "that the nodes wait for more of them than MIN",
        ),
        (
            "--join",
            DEFAULT_JOIN_SECONDS,
            "that a node waits for MIN of them, or to be let in",
        ),
        (
            "--heartbeat",
            DEFAULT_HEARTBEAT_SECONDS,
            "between signs of life: a node is lost when three are missing",
        ),
    ):
        add_option(
            parser,
            name,
            positive_seconds,
            metavar="SECONDS",
            help=f"with --nodes: seconds {text} (default: {seconds:g})",
        )


def check_node_options(arguments: argparse.Namespace) -> None:
    """Refuse options that would be ignored.

    Raises:
        DocumentError: naming one.
    """
    if arguments.nodes is None:
        refuse(
            arguments,
            NODES_ONLY,
            "means nothing without --nodes.",
            "give --nodes MIN:MAX too.",
        )
    else:
        refuse(
            arguments,
            ONE_NODE_ONLY,
            "means nothing with --nodes.",
            "leave OPTION out, or --nodes.",
        )


def train_nodes(
    plan: Plan,
    settings: dict[str, Any],
    arguments: argparse.Namespace,
    unfinished: Callable[[MeasuredRun], None] | None,
) -> tuple[MeasuredRun, Plan, bool]:
    """Take part; returns what happened, the plan that the run ended by if it is known, and whether rank 0 was on this
    node.

    Args:
        unfinished: takes the report of a run that fails for good, before the error is raised.
    """
    from planner.cli.replan import NodeReplanner, by_search

    for path in (arguments.output, arguments.metrics):
        check_output(path)
    NodeReplanner(
        plan, by_search(plan)
    )  # refuses what cannot be planned for, before anything starts
    cluster = plan.request.cluster
    asks_device = (
        arguments.group is None
        and len(kinds(cluster)) > 1
        and arguments.device != "cpu"
    )
    group = group_of_node(
        cluster, arguments.group, _device_here() if asks_device else None
    )
    chosen, policy = _chosen(plan, settings), _policy(plan, group, arguments)
    metrics = arguments.metrics
    measured, is_first = run_node(
        plan, chosen, policy, metrics=metrics, log=words, unfinished=unfinished
    )
    known = KnownPlans(elastic_folder(chosen, policy.run_id), plan)
    return measured, known.by_id(measured.plan_id) or plan, is_first


def _device_here() -> str | None:
    """Catalogue id of this node's first device; None: it is not known."""
    import torch

    from planner.profiler.local_devices import match_catalogue

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    known = match_catalogue(properties.name, properties.total_memory)
    return None if known is None else known.id


@dataclass(frozen=True, slots=True)
class KindCommand:
    """What to start on every node of one kind."""

    group: str
    """Name of their node group; `ANY_GROUP` where all nodes are of one kind."""
    devices: int
    """Of each."""
    text: str
    """Of the shell; RENDEZVOUS is for the shell to fill in."""

    def __str__(self) -> str:
        of = f" of {self.group}," if self.group else ""
        return f"on nodes{of} of {self.devices} {'device' if self.devices == 1 else 'devices'}"


def elastic_commands(
    plan: Plan, settings: dict[str, Any], arguments: argparse.Namespace
) -> tuple[KindCommand, ...]:
    """The command that every node of a kind starts."""
    from planner.cli.replan import NodeReplanner, by_search

    if arguments.plan == STDOUT:
        raise DocumentError(
            "every node reads the plan itself.",
            field="plan.json",
            hint="write it to a file that all of them have.",
        )
    NodeReplanner(plan, by_search(plan))
    chosen = _chosen(plan, settings)
    command = [
        "planner",
        "run",
        arguments.plan,
        *_spelt(chosen),
        "--elastic",
        "--nodes",
        arguments.nodes,
    ]
    for name in PRINTED:
        if getattr(arguments, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    found = []
    asked = _kinds_of_nodes(plan, arguments)
    for group, count in asked:
        _policy(
            plan, group, argparse.Namespace(**{**vars(arguments), "devices": count})
        )  # refuses what makes no sense
        told = ["--group", group] if group else []
        told += (
            ["--devices", str(count)]
            if arguments.devices is not None or _sizes(asked, group) > 1
            else []
        )
        # The one word that the shell must expand stays unquoted.
        found.append(
            KindCommand(
                group,
                count,
                f'{shlex.join([*command, *told])} --rendezvous "$RENDEZVOUS"',
            )
        )
    elastic_folder(chosen, "")  # refuses a run without checkpoints
    return tuple(found)


def _kinds_of_nodes(plan: Plan, arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """Node group and devices of the nodes that a command is for."""
    cluster = plan.request.cluster
    groups = (
        [ANY_GROUP]
        if len(kinds(cluster)) == 1
        else list(dict.fromkeys(each.name for each in cluster.node_groups))
    )
    if arguments.group is not None:
        groups = [group_of_node(cluster, arguments.group, None)]
    counts = {
        group: [arguments.devices]
        if arguments.devices is not None
        else _devices(plan, group)
        for group in groups
    }
    return [(group, count) for group in groups for count in counts[group]]


def _sizes(asked: list[tuple[str, int]], group: str) -> int:
    """In how many sizes the nodes of a group come."""
    return sum(name == group for name, _ in asked)


def _chosen(plan: Plan, settings: dict[str, Any]) -> RunSettings:
    """Settings, of which the job's optimizer has all options."""
    found = RunSettings(**settings)
    found.optimizer_options.check(plan.request.job.optimizer)
    return found


def _spelt(settings: RunSettings) -> list[str]:
    """As options of this command."""
    return [SHORTER.get(word, word) for word in settings.to_arguments()]


def _policy(plan: Plan, group: str, arguments: argparse.Namespace) -> NodesPolicy:
    found = NODES.fullmatch(arguments.nodes)
    if found is None:
        raise DocumentError(
            f"{arguments.nodes!r} is no range.",
            field="--nodes",
            hint="give MIN:MAX, e.g. 2:4.",
        )
    service = () if arguments.planner is None else ("--planner", arguments.planner)
    return NodesPolicy(
        least=int(found[1]),
        most=int(found[2]),
        run_id=arguments.run_id or plan.id[:12],
        devices=arguments.devices or _only(_devices(plan, group)),
        group=group,
        ranks=(*RANK, *service),
        rendezvous=arguments.rendezvous or "",
        address=arguments.address,
        restarts=DEFAULT_RESTARTS if arguments.restarts is None else arguments.restarts,
        last_call_seconds=arguments.last_call or DEFAULT_LAST_CALL_SECONDS,
        join_seconds=arguments.join or DEFAULT_JOIN_SECONDS,
        heartbeat_seconds=arguments.heartbeat or DEFAULT_HEARTBEAT_SECONDS,
    )


def _devices(plan: Plan, group: str) -> list[int]:
    """How many the nodes of a group have; `ANY_GROUP`: of the plan's cluster."""
    groups = plan.request.cluster.node_groups
    return sorted(
        {each.devices_per_node for each in groups if group in (each.name, ANY_GROUP)},
        reverse=True,
    )


def _only(devices: list[int]) -> int:
    if len(devices) > 1:
        raise DocumentError(
            f"nodes of the plan's cluster have {' or '.join(map(str, devices))} devices.",
            field="--devices",
            hint="give this node's.",
        )
    return devices[0]
