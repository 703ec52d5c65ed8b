"""How an elastic run on one node survives lost ranks."""

from __future__ import annotations

from typing import Any

from planner.executor.elastic.supervisor import ElasticPolicy
from planner.replan.discovery import discover_with
from planner.replan.replanner import DeviceReplanner
from planner.replan.searches import make_search
from planner.spec import Plan


def elastic_policy(
    plan: Plan,
    *,
    service: str | None = None,
    restarts: int | None = None,
    cooldown: float | None = None,
    discover: str | None = None,
) -> ElasticPolicy:
    """Return the policy of an elastic run; None selects the executor's default.

    Args:
        plan: that the run begins with.
        service: address of the service that finds the plans; None: this process.
        restarts: after lost ranks, in all.
        cooldown: seconds until the device of a killed rank is used again.
        discover: command that prints the indices of usable devices.

    Raises:
        UnsupportedError: the plan's cluster has several nodes.
        DocumentError: a number out of its range.
    """
    chosen: dict[str, Any] = {}
    if restarts is not None:
        chosen["restarts"] = restarts
    if cooldown is not None:
        chosen["cooldown_seconds"] = cooldown
    if discover is not None:
        chosen["discover"] = discover_with(discover)
    planner = DeviceReplanner(plan, make_search(plan, service))
    return ElasticPolicy(planner=planner, **chosen)
