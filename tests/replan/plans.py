"""Plans of the tiny model, found by this process' own search."""

from __future__ import annotations

from typing import Any

from planner.search import make_request
from planner.search import plan as find_plan
from planner.spec import Cluster, ModelProfile, Plan
from tests.cli.support import tiny_cluster, tiny_job, tiny_profile


def plan_of(
    profile: ModelProfile | None = None, cluster: Cluster | None = None, **fixed: Any
) -> Plan:
    """Plan the tiny job, with some fields of the layout fixed.

    Args:
        profile: the tiny profile by default.
        cluster: the tiny cluster by default.
        fixed: constraints of the job.
    """
    profile = profile or tiny_profile()
    job = tiny_job().model_copy(update={"constraints": fixed})
    request = make_request(profile, cluster or tiny_cluster(), job)
    found = find_plan(request, profile)
    assert isinstance(found, Plan)
    return found
