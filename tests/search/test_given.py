"""Plans of given layouts, which the search does not choose."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import LayoutError
from planner.executor.support import check_plan
from planner.schedule import build
from planner.search import plan_layout, predict
from planner.spec import Infeasible, ModelProfile, Plan
from planner.spec.layout import PredictionLayout
from tests.builders import cluster, four_equal_layers, job, request


def given(
    model: ModelProfile, memory_bytes: int = 10**10, **layout: Any
) -> Plan | Infeasible:
    """The plan of a layout for two pipeline ranks."""
    wanted = PredictionLayout(pipeline_parallel_degree=2, **layout)
    return plan_layout(
        request(model, cluster(wanted.devices, memory_bytes=memory_bytes), job(8)),
        model,
        wanted,
    )


@pytest.mark.parametrize(
    "schedule", ["interleaved-1f1b", "zb-v", "dualpipev", "looped-bfs"]
)
def test_stages_and_actions_stand_on_the_schedules_ranks(schedule: str) -> None:
    """The plan is one that the executor takes, with the prediction of `predict`."""
    model = four_equal_layers()
    layout = {
        "schedule": schedule,
        "virtual_stages_per_rank": 2,
        "layers_per_stage": (1, 1, 1, 1),
    }
    found = given(model, **layout)
    assert isinstance(found, Plan)
    ordered = build(schedule, ranks=2, micro_batches=8, virtual_stages=2)
    assert found.actions == ordered.to_text()
    assert tuple(stage.pipeline_rank for stage in found.stages) == ordered.stage_ranks
    assert check_plan(found).pipeline == 2
    told = predict(
        model,
        cluster(2),
        job(8),
        PredictionLayout(pipeline_parallel_degree=2, **layout),
    )
    assert found.prediction == told.prediction
    assert not found.search.optimal


def test_id_tells_the_layout_and_its_partition() -> None:
    """Two layouts of one request are two plans, and two partitions of one layout."""
    model = four_equal_layers()
    asked = [("zb-h1", (2, 2)), ("zb-h2", (2, 2)), ("zb-h1", (1, 3))]
    plans = [
        given(model, schedule=schedule, layers_per_stage=sizes)
        for schedule, sizes in asked
    ]
    assert all(isinstance(each, Plan) and each.id == each.request.id for each in plans)
    assert len({each.id for each in plans if isinstance(each, Plan)}) == 3


def test_what_does_not_fit_is_no_plan() -> None:
    """With the reason."""
    found = given(
        four_equal_layers(),
        memory_bytes=1000,
        schedule="zb-h1",
        layers_per_stage=(2, 2),
    )
    assert isinstance(found, Infeasible)
    assert "more than the" in found.reasons[0]


@pytest.mark.parametrize(
    "layout", [{"schedule": "zb-v"}, {"schedule": "1f1b", "virtual_stages_per_rank": 2}]
)
def test_stages_per_rank_that_the_schedule_does_not_have_are_refused(
    layout: dict[str, Any],
) -> None:
    """A V has two stages on every rank, 1f1b one."""
    with pytest.raises(LayoutError, match="does not put") as caught:
        given(four_equal_layers(), **layout)
    assert caught.value.problems[0].field == "layout.virtual_stages_per_rank"
