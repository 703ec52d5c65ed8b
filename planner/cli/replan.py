"""Plans for a run that has lost devices or nodes, or got them back: by this process' own search, or by a service over
HTTP."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, product
from math import gcd
from typing import Any
from urllib.parse import urljoin

from planner.cli.inputs import profile_behind
from planner.cli.rebalance import rebalanced
from planner.cli.reshare import replica_seconds, reshared, stage_seconds
from planner.cli.service import WAIT_SECONDS, exchange
from planner.errors import PlannerError, RunError, UnsupportedError
from planner.executor.elastic.roster import Roster, check_groups
from planner.executor.elastic.weigh import Rebalanced
from planner.spec import (
    Cluster,
    Forecast,
    Infeasible,
    Job,
    ModelProfile,
    NodeGroup,
    Options,
    Plan,
    parse,
)
from planner.spec.job import DIVISION

SEARCH_SECONDS = 20.0
"""For each number of devices: ranks stand still meanwhile."""
PLANNING_SECONDS = 60.0
"""For all questions about nodes that are left: then the best plan so far is taken."""

Search = Callable[[Cluster], Plan | Infeasible]


class PlanRebalancer:
    """Partitions and shares for ranks of unequal speed; see `planner.executor.elastic.weigh.Rebalancer`.

    Args:
        plan: that the run began with.
    """

    def __init__(self, plan: Plan) -> None:
        self._profile = profile_behind(plan, None)
        self._division = plan.request.job.constraints.get(DIVISION)

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Predicted seconds of every pipeline rank's actions in one step."""
        from planner.search import account

        profile = plan.request.profile or self._profile
        if plan.replicas_differ:
            return stage_seconds(plan, profile)
        forecast = Forecast(
            layout=plan.layout,
            micro_batches=plan.micro_batches,
            stages=plan.stages,
            prediction=plan.prediction,
            actions=plan.actions,
            fits=True,
        )
        found = account(profile, plan.cluster, plan.request.job, forecast)
        return tuple(rank.work_seconds for rank in found.ranks)

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """A faster partition for ranks of unequal speed: see `planner.cli.rebalance`.

        Raises:
            UnsupportedError: the job that the run began with fixes the partition.
        """
        if self._division is not None:
            raise UnsupportedError(
                f"the job fixes {DIVISION}, so layers stay where they are.",
                field=f"request.job.constraints.{DIVISION}",
                hint="plan without it, if slow ranks shall hold fewer layers.",
            )
        return rebalanced(plan, plan.request.profile or self._profile, slowdown)

    def replica_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Predicted seconds of every data-parallel rank's actions in one step, the mean over its stages."""
        return replica_seconds(plan, plan.request.profile or self._profile)

    def reshare(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """Faster shares of the batch for replicas of unequal speed: see `planner.cli.reshare`."""
        return reshared(plan, plan.request.profile or self._profile, slowdown)


class Replanner(PlanRebalancer):
    """Plans for what has become of the plan's one node; see `planner.executor.elastic.supervisor.Planner`.

    Fewer devices than there are may be faster, for a batch divides by 2 and not by 3: all numbers from half of them on
    are asked for, and still fewer only while nothing fits.

    Args:
        plan: that the run began with.
        search: finds the plan of a cluster.

    Raises:
        UnsupportedError: the plan needs several nodes.
    """

    def __init__(self, plan: Plan, search: Search) -> None:
        groups = plan.request.cluster.node_groups
        if len(groups) > 1 or groups[0].nodes > 1:
            raise UnsupportedError(
                "the plan's cluster has several nodes, and one command cannot supervise them.",
                field="request.cluster",
                hint="give --nodes MIN:MAX too, for a command that every node starts.",
            )
        super().__init__(plan)
        self._cluster = plan.request.cluster
        self._search = search

    def for_devices(self, devices: int) -> Plan | Infeasible:
        """The fastest plan on at most so many devices."""
        return _best(self._answers(devices))

    def _answers(self, devices: int) -> Iterator[Plan | Infeasible]:
        found = False
        for count in range(devices, 0, -1):
            if found and 2 * count < devices:
                return
            answer = self._search(self._of(count))
            found = found or isinstance(answer, Plan)
            yield answer

    def _of(self, devices: int) -> Cluster:
        group = self._cluster.node_groups[0].model_copy(
            update={"devices_per_node": devices}
        )
        return self._cluster.model_copy(update={"node_groups": (group,)})


class NodeReplanner(PlanRebalancer):
    """Plans for the nodes that are there; see `planner.executor.elastic.nodes.NodePlanner`.

    Asked for are all of their devices, and parts of them: of nodes of one kind equal ones, so many nodes with so many
    devices each; of nodes of several kinds so many of every kind. Fewer may be faster, for a batch divides by 4 and not
    by 3. The most devices come first, then those that share the largest divisor with the batch; after
    `PLANNING_SECONDS` the best so far is taken.

    Args:
        plan: that the run began with.
        search: finds the plan of a cluster.

    Raises:
        DocumentError: two node groups of different kinds have one name.
    """

    def __init__(self, plan: Plan, search: Search) -> None:
        check_groups(plan.request.cluster)
        super().__init__(plan)
        self._cluster = plan.request.cluster
        self._batch = plan.request.job.global_batch_size
        self._search = search

    def for_nodes(self, roster: Roster) -> Plan | Infeasible:
        """The fastest plan on these nodes, or on a part of them."""
        return _best(self._answers(roster))

    def _answers(self, roster: Roster) -> Iterator[Plan | Infeasible]:
        until = time.monotonic() + PLANNING_SECONDS
        for number, nodes in enumerate(self._candidates(roster)):
            if number and time.monotonic() > until:
                return
            try:
                yield self._search(self._of(nodes))
            except PlannerError as error:
                yield Infeasible(reasons=(str(error),))

    def _candidates(self, roster: Roster) -> list[Roster]:
        """What to ask for, in order; at least half of the devices, unless nothing larger can be asked for."""
        parts = (
            _parts_of_kinds(roster)
            if len(set(roster.by_group)) > 1
            else _equal_parts(roster)
        )
        sizes = {part: sum(part.devices) for part in parts}
        asked = [
            part
            for part in parts
            if part.devices and 2 * sizes[part] >= max(sizes.values())
        ]
        whole = Roster.of_nodes(_sorted_nodes(roster))
        if len(set(whole.devices)) > 1 and whole not in asked:
            asked.append(whole)
        most = max((sum(part.devices) for part in asked), default=0)
        return sorted(
            asked,
            key=lambda part: (
                sum(part.devices) < most,
                -gcd(sum(part.devices), self._batch),
                -sum(part.devices),
                len(part.devices),
            ),
        )

    def _of(self, roster: Roster) -> Cluster:
        """A cluster of these nodes."""
        groups = tuple(
            self._group(name).model_copy(
                update={"nodes": devices.count(each), "devices_per_node": each}
            )
            for name in dict.fromkeys(roster.by_group)
            for devices in [roster.devices_of(name)]
            for each in sorted(set(devices), reverse=True)
        )
        return self._cluster.model_copy(update={"node_groups": groups})

    def _group(self, name: str) -> NodeGroup:
        groups = self._cluster.node_groups
        return next((group for group in groups if group.name == name), groups[0])


def _best(answers: Iterable[Plan | Infeasible]) -> Plan | Infeasible:
    """The fastest plan; where there is none, the first reason."""
    found = list(answers)
    plans = (each for each in found if isinstance(each, Plan))
    fastest = min(plans, key=lambda plan: plan.prediction.step_seconds, default=None)
    return fastest or next(iter(found), Infeasible(reasons=("there is no device.",)))


def _sorted_nodes(roster: Roster) -> list[tuple[int, str]]:
    """(devices, group) of every node: group by group, as they first come, the largest nodes first."""
    return [
        (each, group)
        for group in dict.fromkeys(roster.by_group)
        for each in roster.devices_of(group)
    ]


def _equal_parts(roster: Roster) -> list[Roster]:
    """So many nodes with so many devices each; of nodes of one kind."""
    there = sorted(roster.devices, reverse=True)
    group = roster.groups[:1]
    equal = {
        (each,) * count
        for count, most in enumerate(there, 1)
        for each in range(1, most + 1)
    }
    return [Roster(nodes, group * len(nodes)) for nodes in sorted(equal)]


def _parts_of_kinds(roster: Roster) -> list[Roster]:
    """So many nodes of every kind, those with most devices; a search leaves whole groups out by itself."""
    kinds = [
        [
            [(each, group) for each in devices[:count]]
            for count in range(len(devices), -1, -1)
        ]
        for group in dict.fromkeys(roster.by_group)
        for devices in [roster.devices_of(group)]
    ]
    return [Roster.of_nodes(chain.from_iterable(nodes)) for nodes in product(*kinds)]


def discovered_by(command: str) -> Callable[[], tuple[int, ...]]:
    """Runs a command that prints the indices of usable devices.

    Raises:
        RunError: when it is called, and the command fails or prints something else.
    """

    def discover() -> tuple[int, ...]:
        try:
            done = subprocess.run(
                shlex.split(command),
                capture_output=True,
                text=True,
                timeout=WAIT_SECONDS,
                check=True,
            )
            return tuple(int(word) for word in done.stdout.split())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise RunError(
                f"{command!r} failed: {error}.",
                field="--discover",
                hint="print indices of devices, one per line.",
            ) from None

    return discover


def by_search(plan: Plan) -> Search:
    """This process' own search, for the plan's profile and job."""
    profile, request = profile_behind(plan, None), plan.request

    def search(cluster: Cluster) -> Plan | Infeasible:
        from planner.search import make_request
        from planner.search import plan as find

        options = Options(top=0, time_limit_seconds=SEARCH_SECONDS)
        return find(
            make_request(profile, cluster, request.job, options, model=request.model),
            profile,
        )

    return search


def by_service(plan: Plan, address: str) -> Search:
    """A planner's service, asked over HTTP."""
    profile, request = profile_behind(plan, None), plan.request

    def search(cluster: Cluster) -> Plan | Infeasible:
        return _ask(
            address.rstrip("/"), _question(profile, request.model, cluster, request.job)
        )

    return search


def _question(
    profile: ModelProfile, model: str | None, cluster: Cluster, job: Job
) -> dict[str, Any]:
    options = {"top": 0, "time_limit_seconds": SEARCH_SECONDS}
    behind = (
        {"model": model}
        if model
        else {"profile": profile.model_dump(mode="json", by_alias=True)}
    )
    documents = {
        "cluster": cluster.model_dump(mode="json"),
        "job": job.model_dump(mode="json", exclude_none=True),
    }
    return {**behind, **documents, "options": options}


def _ask(address: str, question: dict[str, Any]) -> Plan | Infeasible:
    status, headers, answer = exchange(
        f"{address}/v1/plans", question, Prefer=f"wait={WAIT_SECONDS:g}"
    )
    until = time.monotonic() + 2 * SEARCH_SECONDS
    while status == 202 and time.monotonic() < until:
        time.sleep(float(headers.get("Retry-After", "1")))
        _, _, job = exchange(urljoin(f"{address}/", headers["Location"]))
        if job["status"] in ("succeeded", "infeasible"):
            status, _, answer = exchange(f"{address}/v1/plans/{job['plan_id']}")
        elif job["status"] not in ("queued", "running"):
            detail = (job.get("problem") or {}).get("detail", "it tells no reason.")
            raise RunError(
                f"the service's search ended {job['status']}: {detail}", field=address
            )
    if status == 202:
        raise RunError(
            f"the service found no plan in {2 * SEARCH_SECONDS:g} seconds.",
            field=address,
        )
    if answer.get("status") == "infeasible":
        return parse(Infeasible, answer, where=address)
    return parse(Plan, answer, where=address)
