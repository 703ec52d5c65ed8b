"""A plan to send and to read."""

from __future__ import annotations

import pytest

from planner.search import make_request
from planner.spec import Cluster, Job, Plan
from tests.api.documents import cluster, four_equal_layers, job
from tests.api.fakes import plan_of


@pytest.fixture
def plan() -> Plan:
    """A plan of four equal layers."""
    profile = four_equal_layers()
    documents = (Cluster.model_validate(cluster()), Job.model_validate(job()))
    return plan_of(make_request(profile, *documents), profile)
