"""Plans for a run whose devices or nodes have changed.

A `DeviceReplanner` serves a run on one node, a `NodeReplanner` a run on several: see
`planner.executor.elastic.supervisor.Planner` and `planner.executor.elastic.nodes.NodePlanner`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from planner.errors import PlannerError, UnsupportedError
from planner.executor.elastic.weigh import Rebalanced
from planner.profiler.resolve import profile_behind
from planner.replan.candidates import candidate_memberships
from planner.replan.membership import Membership, check_groups
from planner.replan.rebalance import rebalance_layers
from planner.replan.reshare import reshare_batch
from planner.replan.searches import Search
from planner.replan.work import data_rank_seconds, pipeline_rank_seconds
from planner.spec import Cluster, Infeasible, ModelProfile, NodeGroup, Plan
from planner.spec.job import DIVISION

PLANNING_SECONDS = 60.0
"""After which a `NodeReplanner` starts no further search."""

Answer = Plan | Infeasible


class PlanRebalancer:
    """Partitions and shares for ranks of unequal speed.

    Implements `planner.executor.elastic.weigh.Rebalancer`.

    Args:
        plan: that the run began with.
    """

    def __init__(self, plan: Plan) -> None:
        self._first_plan = plan
        self._first_profile = profile_behind(plan, None)

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Return the predicted seconds that each pipeline rank works in one step."""
        return pipeline_rank_seconds(plan, self._profile_of(plan))

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """Return a faster partition; None if there is none.

        Args:
            plan: in use.
            slowdown: of each pipeline rank.

        Raises:
            UnsupportedError: the job that the run began with fixes the partition.
        """
        if self._first_plan.request.job.constraints.get(DIVISION) is not None:
            raise UnsupportedError(
                f"the job fixes {DIVISION}, so no layer may move.",
                field=f"request.job.constraints.{DIVISION}",
                hint=f"plan without {DIVISION} to let slow ranks have fewer layers.",
            )
        return rebalance_layers(plan, self._profile_of(plan), slowdown)

    def replica_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Return the predicted seconds that each data-parallel rank works in one step."""
        return data_rank_seconds(plan, self._profile_of(plan))

    def reshare(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """Return faster shares of the batch; None if there are none.

        Args:
            plan: in use.
            slowdown: of each data-parallel rank.

        Raises:
            UnsupportedError: the layout does not support unequal shares.
        """
        return reshare_batch(plan, self._profile_of(plan), slowdown)

    def _profile_of(self, plan: Plan) -> ModelProfile:
        return plan.request.profile or self._first_profile


class DeviceReplanner(PlanRebalancer):
    """Plans for the devices that one node has left.

    Args:
        plan: that the run began with.
        search: finds the plan of a cluster.

    Raises:
        UnsupportedError: the plan's cluster has several nodes.
    """

    def __init__(self, plan: Plan, search: Search) -> None:
        groups = plan.request.cluster.node_groups
        if len(groups) > 1 or groups[0].nodes > 1:
            raise UnsupportedError(
                "the plan's cluster has several nodes; one command supervises only one.",
                field="request.cluster",
                hint="pass --nnodes MIN:MAX, and start the command on every node.",
            )
        super().__init__(plan)
        self._cluster = plan.request.cluster
        self._search = search

    def for_devices(self, devices: int) -> Answer:
        """Return the fastest plan on at most this many devices.

        Fewer devices may be faster: a batch divides by 2 and not by 3. So the search
        tries every number down to half of the devices, and goes further down only until
        a plan fits.
        """
        answers: list[Answer] = []
        for count in range(devices, 0, -1):
            has_plan = any(isinstance(answer, Plan) for answer in answers)
            if has_plan and 2 * count < devices:
                break
            answers.append(self._search(self._cluster_of(count)))
        return _fastest(answers)

    def _cluster_of(self, devices: int) -> Cluster:
        (group,) = self._cluster.node_groups
        smaller = group.model_copy(update={"devices_per_node": devices})
        return self._cluster.model_copy(update={"node_groups": (smaller,)})


class NodeReplanner(PlanRebalancer):
    """Plans for the nodes that take part in a run.

    Args:
        plan: that the run began with.
        search: finds the plan of a cluster.

    Raises:
        DocumentError: two node groups of different kinds have the same name.
    """

    def __init__(self, plan: Plan, search: Search) -> None:
        check_groups(plan.request.cluster)
        super().__init__(plan)
        self._cluster = plan.request.cluster
        self._batch = plan.request.job.global_batch_size
        self._search = search

    def for_nodes(self, membership: Membership) -> Answer:
        """Return the fastest plan on these nodes, or on some of them.

        No search starts after `PLANNING_SECONDS`: the best plan so far is the answer.
        """
        deadline = time.monotonic() + PLANNING_SECONDS
        answers: list[Answer] = []
        for candidate in candidate_memberships(membership, self._batch):
            if answers and time.monotonic() > deadline:
                break
            answers.append(self._answer(candidate))
        return _fastest(answers)

    def _answer(self, membership: Membership) -> Answer:
        try:
            return self._search(self._cluster_of(membership))
        except PlannerError as error:
            return Infeasible(reasons=(str(error),))

    def _cluster_of(self, membership: Membership) -> Cluster:
        """The cluster of these nodes: a node group for each size of a group's nodes."""
        groups = []
        for name in dict.fromkeys(membership.by_group):
            sizes = membership.devices_of(name)
            for size in sorted(set(sizes), reverse=True):
                nodes = {"nodes": sizes.count(size), "devices_per_node": size}
                groups.append(self._group(name).model_copy(update=nodes))
        return self._cluster.model_copy(update={"node_groups": tuple(groups)})

    def _group(self, name: str) -> NodeGroup:
        """The plan's node group of this name; the first if all nodes are of one kind."""
        groups = self._cluster.node_groups
        for group in groups:
            if group.name == name:
                return group
        return groups[0]


def _fastest(answers: Sequence[Answer]) -> Answer:
    """The fastest plan; without any, the first reason."""
    plans = [answer for answer in answers if isinstance(answer, Plan)]
    if plans:
        return min(plans, key=lambda plan: plan.prediction.step_seconds)
    if answers:
        return answers[0]
    return Infeasible(reasons=("there is no device.",))
