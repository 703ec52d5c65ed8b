"""Finds the plan of a changed cluster: with this process' own search, or a service's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.client import request_plan
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
    subject = _subject(plan)
    job = plan.request.job.model_dump(mode="json", exclude_none=True)
    options = {"top": 0, "time_limit_seconds": SEARCH_SECONDS}

    def search(cluster: Cluster) -> Plan | Infeasible:
        request = {
            **subject,
            "cluster": cluster.model_dump(mode="json"),
            "job": job,
            "options": options,
        }
        return request_plan(address, request, timeout_seconds=SERVICE_SECONDS)

    return search


def _subject(plan: Plan) -> dict[str, Any]:
    """The catalogue name of the plan's model, or its whole profile."""
    if plan.request.model:
        return {"model": plan.request.model}
    profile = profile_behind(plan, None)
    return {"profile": profile.model_dump(mode="json", by_alias=True)}
