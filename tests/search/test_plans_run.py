"""Whatever the search returns, the executor takes: it checks every plan before any process group starts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from planner.check import check
from planner.cost import workload
from planner.executor.support import check_plan
from planner.search import plan
from planner.search.layouts.chunks import CHUNKED
from planner.search.layouts.orders import SEARCHED
from planner.search.layouts.space import layouts
from planner.spec import Plan
from tests.builders import cluster, job, layer, profile, request
from tests.strategies import Instance, instances, with_operations

PLAIN = profile(
    layer(
        parameters=1000, activation=5000, kept=100, modes=("none", "selective", "full")
    )
    * 8
)
MODEL = PLAIN.model_copy(update={"layers": tuple(map(with_operations, PLAIN.layers))})
ASKED = [
    (name, stage)
    for name in SEARCHED
    for stage in range(4)
    if stage < 2 or name not in CHUNKED
]
"""Schedule and ZeRO stage."""


@settings(max_examples=30)
@given(instances())
def test_plans_of_any_request(instance: Instance) -> None:
    """The executor refuses no plan."""
    found = plan(
        request(instance.profile, instance.cluster, instance.job), instance.profile
    )
    if isinstance(found, Plan):
        check_plan(found)


@pytest.mark.parametrize(("name", "zero_stage"), ASKED)
def test_plans_of_every_schedule(name: str, zero_stage: int) -> None:
    """Of every schedule that the search chooses, with every ZeRO stage, at every number of stages per rank."""
    machines, step = (
        cluster(4),
        job(8, schedule=name, zero_stage=zero_stage, pipeline_parallel_degree=2),
    )
    possible = list(layouts(workload(MODEL, machines, step)))
    assert possible
    for virtual in {layout.virtual_stages_per_rank for layout in possible}:
        for recompute in {layout.recompute for layout in possible}:
            fixed = dict(step.constraints) | {
                "virtual_stages_per_rank": virtual,
                "recompute": recompute,
            }
            asked = step.model_copy(update={"constraints": fixed})
            found = plan(request(MODEL, machines, asked, top=0), MODEL)
            assert isinstance(found, Plan)
            assert (found.layout.schedule, found.layout.zero_stage) == (
                name,
                zero_stage,
            )
            check_plan(found)
            assert check(found, MODEL).problems == ()
