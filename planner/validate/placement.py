"""Does every rank stand on a device of its own, and every coordinate of the device mesh on a rank?"""

from __future__ import annotations

from collections import Counter
from itertools import product

from planner.spec.plan import Plan
from planner.validate.facts import Facts
from planner.validate.findings import Findings


def check_placement(plan: Plan, facts: Facts, findings: Findings) -> None:
    """The placement is the full grid of degrees, experts go round the data and context ranks, and no device is used
    twice or does not exist."""
    findings.equal("placement: ranks", [row.rank for row in plan.placement], list(range(facts.devices)))
    _check_grid(plan, findings)
    _check_devices(plan, facts, findings)
    _check_nodes(plan, facts, findings)
    findings.checked.append("the placement is the full grid of degrees, each rank on a device of its own")


def _check_grid(plan: Plan, findings: Findings) -> None:
    layout = plan.layout
    grid = product(
        range(layout.pipeline_parallel_degree),
        range(layout.data_parallel_degree),
        range(layout.tensor_parallel_degree),
        range(layout.context_parallel_degree),
    )
    found = Counter((row.pipeline, row.data, row.tensor, row.context) for row in plan.placement)
    wanted = Counter(grid)
    for place in sorted((wanted - found).keys()):
        findings.wrong("placement", f"no rank stands at (pipeline, data, tensor, context) = {place}.")
    for place, count in sorted((found - wanted).items()):
        findings.wrong("placement", f"{count} rank(s) too many at (pipeline, data, tensor, context) = {place}.")
    for row in plan.placement:
        neighbour = row.data * layout.context_parallel_degree + row.context
        findings.equal(f"placement[{row.rank}].expert", row.expert, neighbour % layout.expert_parallel_degree)


def _check_nodes(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Nodes are used whole; a plan on one node may leave some of its devices."""
    used = Counter(row.node for row in plan.placement)
    for node, devices in sorted(used.items()):
        if len(used) > 1 and devices != facts.nodes.devices_per_node:
            findings.wrong("placement", f"{devices} of {facts.nodes.devices_per_node} devices of node {node} are used.")


def _check_devices(plan: Plan, facts: Facts, findings: Findings) -> None:
    nodes, per_node = facts.nodes.nodes, facts.nodes.devices_per_node
    used = Counter((row.node, row.device) for row in plan.placement)
    for row in plan.placement:
        where = f"placement[{row.rank}]"
        if row.node >= nodes or row.device >= per_node:
            findings.wrong(
                where, f"node {row.node}, device {row.device} of a cluster of {nodes} nodes with {per_node} devices."
            )
        if used[row.node, row.device] > 1:
            findings.wrong(where, f"node {row.node}, device {row.device} holds {used[row.node, row.device]} ranks.")
