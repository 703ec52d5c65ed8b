"""A plan that a faulty cost model made is found to be wrong."""

from __future__ import annotations

import pytest

from planner.check import check
from planner.search import plan_layout
from planner.spec import Plan
from tests.builders import cluster, job, link, request
from tests.check.faults import COST_FAULTS, RICH, rich_model


def planned(zero: int) -> Plan:
    """Return a plan of the rich model, with this ZeRO stage."""
    model = rich_model()
    machines = cluster(
        8,
        nodes=2,
        intra=link(1e11, 3e-6),
        inter=link(1e10, 1e-5),
        reserved_bytes=1000,
        allocation_overhead=0.05,
    )
    layout = RICH.model_copy(update={"zero_stage": zero})
    found = plan_layout(request(model, machines, job(16)), model, layout)
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_correct_plan_passes(zero: int) -> None:
    """Without a fault the check has no objection."""
    assert check(planned(zero)).problems == ()


@pytest.mark.parametrize("name", COST_FAULTS)
def test_faults_in_the_cost_model_are_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction of a plan that was made with the fault is not the recomputed one."""
    inject, zero = COST_FAULTS[name]
    inject(monkeypatch)
    problems = check(planned(zero)).problems
    assert [one for one in problems if one.startswith("prediction.")], problems
