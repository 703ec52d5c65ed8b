"""Does every rank stand on a device of its own, and every coordinate of the device mesh on a rank?

(P1)  order of the ranks, innermost axis first: tensor, context, data, pipeline; or tensor, context, pipeline, data
(P2)  ranks fill nodes in order, group after group
(P3)  the ranks of one pipeline and data rank, a cell, stand in one node group
(P4)  experts: of the ranks of one pipeline rank, numbered in order, the first `expert_tensor_degree` have the first share
      of the experts, the next the second, and so on round and round
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise, product

from planner.spec.cluster import NodeGroup
from planner.spec.layout import Layout
from planner.spec.plan import Plan, RankPlacement
from planner.validate.communicators import place_of
from planner.validate.facts import Facts
from planner.validate.findings import Findings


def check_placement(plan: Plan, facts: Facts, findings: Findings) -> None:
    """The placement is the full grid of degrees in the order of the layout, experts go round the ranks of a pipeline
    rank, and ranks fill the devices node by node."""
    findings.equal(
        "placement: ranks",
        [row.rank for row in plan.placement],
        list(range(facts.devices)),
    )
    _check_grid(plan, findings)
    _check_devices(plan, facts, findings)
    _check_nodes(plan, facts, findings)
    findings.checked.append(
        "the placement is the full grid of degrees, each rank on a device of its own"
    )
    _check_order(plan, findings)
    _check_filled(plan.placement, facts, findings)
    _check_cells(plan.placement, facts, findings)
    findings.checked.append(
        "ranks are in the layout's order, fill node after node, and every cell is in one node group"
    )


def _check_grid(plan: Plan, findings: Findings) -> None:
    layout = plan.layout
    grid = product(
        range(layout.pipeline_parallel_degree),
        range(layout.data_parallel_degree),
        range(layout.tensor_parallel_degree),
        range(layout.context_parallel_degree),
    )
    found = Counter(
        (row.pipeline, row.data, row.tensor, row.context) for row in plan.placement
    )
    wanted = Counter(grid)
    for place in sorted((wanted - found).keys()):
        findings.wrong(
            "placement",
            f"no rank is at (pipeline, data, tensor, context) = {place}.",
        )
    for place, count in sorted((found - wanted).items()):
        findings.wrong(
            "placement",
            f"{count} rank(s) too many at (pipeline, data, tensor, context) = {place}.",
        )
    for row in plan.placement:
        share = place_of(layout, row) // layout.expert_tensor_degree
        findings.equal(
            f"placement[{row.rank}].expert",
            row.expert,
            share % layout.expert_parallel_degree,
        )


def _check_order(plan: Plan, findings: Findings) -> None:
    """Equation (P1)."""
    for row in plan.placement:
        findings.equal(
            f"placement[{row.rank}]: rank of its coordinates",
            row.rank,
            _rank(plan.layout, row),
        )


def _rank(layout: Layout, row: RankPlacement) -> int:
    if layout.rank_order == "tp-cp-dp-pp":
        cell = row.pipeline * layout.data_parallel_degree + row.data
    else:
        cell = row.data * layout.pipeline_parallel_degree + row.pipeline
    return (
        cell * layout.context_parallel_degree + row.context
    ) * layout.tensor_parallel_degree + row.tensor


def _check_filled(
    placement: Sequence[RankPlacement], facts: Facts, findings: Findings
) -> None:
    """Equation (P2)."""
    runs = [node for node, _ in groupby(row.node for row in placement)]
    groups = [
        place
        for place, _ in groupby(
            _group(node, facts.cluster.node_groups) for node in runs
        )
    ]
    if len(groups) > len(set(groups)):
        findings.wrong("placement", "ranks leave a node group, and come back to it.")
    for one, other in pairwise(runs):
        if one > other and _group(one, facts.cluster.node_groups) == _group(
            other, facts.cluster.node_groups
        ):
            findings.wrong("placement", f"node {other} is used after node {one}.")
    for node, rows in groupby(placement, key=lambda row: row.node):
        devices = [row.device for row in rows]
        if devices != list(range(len(devices))):
            findings.wrong(
                "placement", f"node {node} is filled in the order {devices}."
            )


def _check_cells(
    placement: Sequence[RankPlacement], facts: Facts, findings: Findings
) -> None:
    """Equation (P3)."""
    groups: dict[tuple[int, int], set[int | None]] = {}
    for row in placement:
        groups.setdefault((row.pipeline, row.data), set()).add(
            _group(row.node, facts.cluster.node_groups)
        )
    for (pipeline, data), found in sorted(groups.items()):
        if len(found) > 1:
            message = f"pipeline rank {pipeline} of data rank {data} is in {len(found)} node groups."
            findings.wrong("placement", message)


def _group(node: int, groups: Sequence[NodeGroup]) -> int | None:
    """Place of the node's group; None: the cluster has no such node."""
    first = 0
    for place, group in enumerate(groups):
        if first <= node < first + group.nodes:
            return place
        first += group.nodes
    return None


def _check_nodes(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Nodes are used whole; a plan on one node may leave some of its devices."""
    used = Counter(row.node for row in plan.placement)
    for node, devices in sorted(used.items()):
        place = _group(node, facts.cluster.node_groups)
        if len(used) > 1 and place is not None:
            each = facts.cluster.node_groups[place].devices_per_node
            if devices != each:
                findings.wrong(
                    "placement", f"{devices} of {each} devices of node {node} are used."
                )


def _check_devices(plan: Plan, facts: Facts, findings: Findings) -> None:
    groups = facts.cluster.node_groups
    nodes = sum(group.nodes for group in groups)
    used = Counter((row.node, row.device) for row in plan.placement)
    for row in plan.placement:
        where, place = f"placement[{row.rank}]", _group(row.node, groups)
        devices = (
            max(group.devices_per_node for group in groups)
            if place is None
            else groups[place].devices_per_node
        )
        if place is None or row.device >= devices:
            message = f"node {row.node}, device {row.device} of a cluster of {nodes} nodes with {devices} devices."
            findings.wrong(where, message)
        if used[row.node, row.device] > 1:
            findings.wrong(
                where,
                f"node {row.node}, device {row.device} holds {used[row.node, row.device]} ranks.",
            )
