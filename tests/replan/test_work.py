"""Predicted seconds of work per rank, against the account of the same layout."""

from __future__ import annotations

from typing import Any

import pytest

from planner.replan.work import micro_batch_seconds, pipeline_rank_seconds
from planner.search import account, make_request, plan_layout, predict
from planner.spec import Plan, PredictionLayout
from tests.cli.support import tiny_cluster, tiny_job, tiny_profile

LAYER_SECONDS = 3e-3
"""Forward and backward of one layer of the tiny profile, per sample."""


def plan_of_layout(**fields: Any) -> Plan:
    """Plan eight layers on four pipeline ranks."""
    layout = PredictionLayout(pipeline_parallel_degree=4, micro_batch_size=1, **fields)
    profile = tiny_profile(layers=8)
    request = make_request(profile, tiny_cluster(), tiny_job())
    found = plan_layout(request, profile, layout)
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "1f1b"},
        {"schedule": "1f1b", "layers_per_stage": (1, 2, 3, 2)},
        {"schedule": "interleaved-1f1b", "virtual_stages_per_rank": 2},
    ],
)
def test_work_is_that_of_the_account(fields: dict[str, Any]) -> None:
    """Without transfers and waiting, as `planner predict --account` prints it."""
    plan = plan_of_layout(**fields)
    profile = tiny_profile(layers=8)
    layout = PredictionLayout(
        **plan.layout.model_dump(),
        layers_per_stage=[len(stage.layers) for stage in plan.stages],
    )
    forecast = predict(profile, tiny_cluster(), tiny_job(), layout)
    ranks = account(profile, tiny_cluster(), tiny_job(), forecast).ranks
    expected = [rank.work_seconds for rank in ranks]
    assert pipeline_rank_seconds(plan, profile) == pytest.approx(expected)


def test_a_bidirectional_schedule_works_as_long_as_others() -> None:
    """Each rank holds two stages, and runs half of the micro-batches on each."""
    plan = plan_of_layout(schedule="dualpipe")
    expected = [8 * 2 * LAYER_SECONDS] * 4
    seconds = pipeline_rank_seconds(plan, tiny_profile(layers=8))
    assert seconds == pytest.approx(expected, rel=0.05)


def test_replicas_have_a_row_each() -> None:
    """Replicas with other shares take equally long for one micro-batch."""
    layout = PredictionLayout(
        data_parallel_degree=2,
        pipeline_parallel_degree=2,
        micro_batch_size=1,
        schedule="1f1b",
        micro_batch_shares=(5, 3),
    )
    profile = tiny_profile(layers=4)
    request = make_request(profile, tiny_cluster(), tiny_job())
    plan = plan_layout(request, profile, layout)
    assert isinstance(plan, Plan)
    first, second = micro_batch_seconds(plan, profile)
    assert first == second
    assert first == pytest.approx([2 * LAYER_SECONDS] * 2, rel=0.05)
