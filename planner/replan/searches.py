"""Finds the plan of a changed cluster: with this process' own search, or a service's."""

from __future__ import annotations

from collections.abc import Callable

from planner.client import Client
from planner.profiler.resolve import profile_behind
from planner.spec import Cluster, Infeasible, Options, Plan

SEARCH_SECONDS = 20.0
"""Time limit of one search: the ranks are idle meanwhile."""
SERVICE_SECONDS = 2 * SEARCH_SECONDS
"""After which a search of the service is given up: it may start late."""

Search = Callable[[Cluster], Plan | Infeasible]
"""Finds the fastest plan of one job on a cluster."""


def make_search(plan: Plan, service: str | None) -> Search:
    """Return the service's search if there is a service, else this process' own.

    Args:
        plan: whose model and job the search is for.
        service: address of the service.
    """
    if service is None:
        return local_search(plan)
    return service_search(plan, service)


def local_search(plan: Plan) -> Search:
    """Return a search in this process, for the plan's profile and job."""
    profile = profile_behind(plan, None)
    job, model = plan.request.job, plan.request.model
    calibration = plan.request.calibration

    def search(cluster: Cluster) -> Plan | Infeasible:
        from planner.search import make_request
        from planner.search import plan as find_plan

        options = Options(top=0, time_limit_seconds=SEARCH_SECONDS)
        request = make_request(
            profile, cluster, job, options, model=model, calibration=calibration
        )
        return find_plan(request, profile)

    return search


def service_search(plan: Plan, address: str) -> Search:
    """Return a search by a planner's service, for the plan's profile and job."""
    options = Options(top=0, time_limit_seconds=SEARCH_SECONDS)

    def search(cluster: Cluster) -> Plan | Infeasible:
        changed = {"cluster": cluster, "options": options}
        request = plan.request.model_copy(update=changed)
        with Client(address) as client:
            return client.plan(request, timeout_seconds=SERVICE_SECONDS)

    return search
