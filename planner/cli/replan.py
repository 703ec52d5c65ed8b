"""Plans for a run that has lost devices or got them back: by this process' own search, or by a service over HTTP."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from planner.cli.inputs import profile_behind
from planner.cli.rebalance import rebalanced
from planner.cli.service import WAIT_SECONDS, exchange
from planner.errors import RunError, UnsupportedError
from planner.executor.weigh import Rebalanced
from planner.spec import Cluster, Forecast, Infeasible, Job, ModelProfile, Options, Plan, parse

SEARCH_SECONDS = 20.0
"""For each number of devices: ranks stand still meanwhile."""

Search = Callable[[Cluster], Plan | Infeasible]


class Replanner:
    """Plans for what has become of the plan's one node; see `planner.executor.elastic.Planner`.

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
                mend="start the printed commands, which torchrun's rendezvous holds together.",
            )
        self._cluster = plan.request.cluster
        self._profile = profile_behind(plan, None)
        self._search = search

    def for_devices(self, devices: int) -> Plan | Infeasible:
        """The fastest plan on at most so many devices."""
        best: Plan | None = None
        first: Infeasible | None = None
        for found in self._answers(devices):
            if isinstance(found, Infeasible):
                first = first or found
            elif best is None or found.prediction.step_seconds < best.prediction.step_seconds:
                best = found
        return best or first or Infeasible(reasons=("there is no device.",))

    def busy_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Predicted seconds of every pipeline rank's actions in one step."""
        from planner.search import account

        forecast = Forecast(
            layout=plan.layout,
            micro_batches=plan.micro_batches,
            stages=plan.stages,
            prediction=plan.prediction,
            fits=True,
        )
        profile = plan.request.profile or self._profile
        found = account(profile, plan.request.cluster, plan.request.job, forecast)
        return tuple(rank.work_seconds for rank in found.ranks)

    def rebalance(self, plan: Plan, slowdown: Sequence[float]) -> Rebalanced | None:
        """A faster partition for ranks of unequal speed: see `planner.cli.rebalance`."""
        profile = plan.request.profile or self._profile
        return rebalanced(plan, profile, slowdown)

    def _answers(self, devices: int) -> Iterator[Plan | Infeasible]:
        found = False
        for count in range(devices, 0, -1):
            if found and 2 * count < devices:
                return
            answer = self._search(self._of(count))
            found = found or isinstance(answer, Plan)
            yield answer

    def _of(self, devices: int) -> Cluster:
        group = self._cluster.node_groups[0].model_copy(update={"devices_per_node": devices})
        return self._cluster.model_copy(update={"node_groups": (group,)})


def discovered_by(command: str) -> Callable[[], tuple[int, ...]]:
    """Runs a command that prints the indices of usable devices.

    Raises:
        RunError: when it is called, and the command fails or prints something else.
    """

    def discover() -> tuple[int, ...]:
        try:
            done = subprocess.run(
                shlex.split(command), capture_output=True, text=True, timeout=WAIT_SECONDS, check=True
            )
            return tuple(int(word) for word in done.stdout.split())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise RunError(
                f"{command!r} failed: {error}.", field="--discover", mend="print indices of devices, one per line."
            ) from None

    return discover


def by_search(plan: Plan) -> Search:
    """This process' own search, for the plan's profile and job."""
    profile, request = profile_behind(plan, None), plan.request

    def search(cluster: Cluster) -> Plan | Infeasible:
        from planner.search import make_request
        from planner.search import plan as find

        options = Options(top=0, time_limit_seconds=SEARCH_SECONDS)
        return find(make_request(profile, cluster, request.job, options, model=request.model), profile)

    return search


def by_service(plan: Plan, address: str) -> Search:
    """A planner's service, asked over HTTP."""
    profile, request = profile_behind(plan, None), plan.request

    def search(cluster: Cluster) -> Plan | Infeasible:
        return _ask(address.rstrip("/"), _question(profile, request.model, cluster, request.job))

    return search


def _question(profile: ModelProfile, model: str | None, cluster: Cluster, job: Job) -> dict[str, Any]:
    options = {"top": 0, "time_limit_seconds": SEARCH_SECONDS}
    behind = {"model": model} if model else {"profile": profile.model_dump(mode="json", by_alias=True)}
    documents = {"cluster": cluster.model_dump(mode="json"), "job": job.model_dump(mode="json", exclude_none=True)}
    return {**behind, **documents, "options": options}


def _ask(address: str, question: dict[str, Any]) -> Plan | Infeasible:
    status, headers, answer = exchange(f"{address}/v1/plans", question, Prefer=f"wait={WAIT_SECONDS:g}")
    until = time.monotonic() + 2 * SEARCH_SECONDS
    while status == 202 and time.monotonic() < until:
        time.sleep(float(headers.get("Retry-After", "1")))
        _, _, job = exchange(f"{address}{headers['Location']}")
        if job["status"] in ("succeeded", "infeasible"):
            status, _, answer = exchange(f"{address}/v1/plans/{job['plan_id']}")
        elif job["status"] not in ("queued", "running"):
            raise RunError(f"the service's search ended {job['status']}.", field=address)
    if status == 202:
        raise RunError(f"the service found no plan in {2 * SEARCH_SECONDS:g} seconds.", field=address)
    if answer.get("status") == "infeasible":
        return parse(Infeasible, answer, where=address)
    return parse(Plan, answer, where=address)
