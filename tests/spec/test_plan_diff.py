"""The difference of two plans."""

from __future__ import annotations

from typing import Any

import pytest

from planner.search import make_request
from planner.spec import Cluster, Job, Plan
from planner.spec.plan_diff import MOST_CHANGES, plan_diff
from tests.api.documents import cluster, four_equal_layers, job
from tests.api.fakes import plan_of


def planned(devices: int = 2, **changes: Any) -> Plan:
    """A plan on one rank."""
    profile = four_equal_layers()
    documents = (
        Cluster.model_validate(cluster(devices=devices)),
        Job.model_validate(job(**changes)),
    )
    return plan_of(make_request(profile, *documents), profile)


def test_equal_plans_have_no_changes() -> None:
    """The figures are there, with a change of zero."""
    plan = planned()
    found = plan_diff(plan, plan)
    assert (found.changes, found.left_out) == ((), 0)
    names = [figure.name for figure in found.figures]
    assert names == ["step_seconds", "tokens_per_second", "mfu", "peak_bytes"]
    assert [figure.change for figure in found.figures] == [0.0, 0.0, None, None]


def test_changed_fields_only() -> None:
    """Each has its path, and null where one of the plans has no such field."""
    plan = planned()
    other = planned(4, global_batch_size=16, constraints={"zero_stage": 1})
    layout = other.layout.model_copy(update={"tensor_parallel_degree": 2})
    prediction = other.prediction.model_copy(update={"step_seconds": 0.75})
    update = {"layout": layout, "micro_batches": 4, "prediction": prediction}
    found = plan_diff(plan, other.model_copy(update=update))
    changes = {each.field: (each.value, each.other) for each in found.changes}
    group = "request.cluster.node_groups[0]"
    assert changes == {
        "layout.tensor_parallel_degree": (1, 2),
        "micro_batches": (8, 4),
        f"{group}.devices_per_node": (2, 4),
        "request.job.global_batch_size": (8, 16),
        "request.job.constraints.zero_stage": (None, 1),
    }
    assert found.figures[0].value == 0.5
    assert found.figures[0].other == 0.75
    assert found.figures[0].change == pytest.approx(0.5)
    assert (found.plan_id, found.other_id) == (plan.id, other.id)


def test_a_group_that_only_one_plan_has() -> None:
    """Its fields are not taken apart."""
    plan = planned()
    groups = plan.request.cluster.node_groups
    second = groups[0].model_copy(update={"name": "second"})
    twice = Cluster(node_groups=(*groups, second))
    request = plan.request.model_copy(update={"cluster": twice})
    found = plan_diff(plan, plan.model_copy(update={"request": request}))
    (change,) = found.changes
    assert change.field == "request.cluster.node_groups[1]"
    assert change.value is None
    assert isinstance(change.other, dict)
    assert change.other["name"] == "second"


def test_many_changes_are_counted() -> None:
    """The list has a limit, and says what it leaves out."""
    plan = planned()
    groups = plan.request.cluster.node_groups
    many = [
        groups[0].model_copy(update={"name": f"{index}"})
        for index in range(MOST_CHANGES + 7)
    ]
    wide = Cluster(node_groups=tuple(many))
    request = plan.request.model_copy(update={"cluster": wide})
    found = plan_diff(plan, plan.model_copy(update={"request": request}))
    assert len(found.changes) == MOST_CHANGES
    assert found.left_out == 7
