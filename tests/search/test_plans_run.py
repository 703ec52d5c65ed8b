"""Whatever the search returns, the executor takes: it checks every plan before any process group starts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from planner.check import check
from planner.cost import workload
from planner.executor.support import check_plan
from planner.search import plan
from planner.search.engine.space import cuts_sequences, whole_space
from planner.search.engine.split_backward import forbids_recompute
from planner.search.engine.table import enumerate_table
from planner.spec import Plan
from planner.spec.layout import RecomputeWord
from planner.spec.recompute import EXECUTED
from tests.builders import cluster, job, layer, profile, request
from tests.strategies import Instance, instances, with_operations

PLAIN = profile(layer(parameters=1000, activation=5000, kept=100, modes=EXECUTED) * 8)
MODEL = PLAIN.model_copy(update={"layers": tuple(map(with_operations, PLAIN.layers))})
SEARCHED = whole_space(workload(MODEL, cluster(4), job(8))).schedules
ASKED = [
    (name, stage)
    for name in SEARCHED
    for stage in range(4)
    if stage < 2 or not cuts_sequences(name)
]
"""Schedule and ZeRO stage."""
WORDS: tuple[RecomputeWord, ...] = (*EXECUTED, "per-layer")


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
    fixed = {"pipeline_parallel_degree": 2, "schedule": name, "zero_stage": zero_stage}
    machines = cluster(4)
    work = workload(MODEL, machines, job(8, **fixed))
    table = enumerate_table(work, whole_space(work))
    stages = set(table.virtual_stages.tolist())
    assert stages
    for virtual in sorted(stages):
        for word in WORDS[:1] if forbids_recompute(name) else WORDS:
            more = {"virtual_stages_per_rank": virtual, "recompute": word}
            step = job(8, **fixed, **more)
            found = plan(request(MODEL, machines, step, top=0), MODEL)
            assert isinstance(found, Plan)
            layout = found.layout
            assert (layout.schedule, layout.zero_stage) == (name, zero_stage)
            assert layout.virtual_stages_per_rank == virtual
            assert layout.recompute == word or word == "per-layer"
            check_plan(found)
            assert check(found, MODEL).problems == ()
