"""The plan's step is that of `predict` for its layout and its layers per stage."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost import TICK_SECONDS
from planner.search import plan, predict
from planner.spec import Cluster, ModelProfile, Plan
from planner.spec.layout import PredictionLayout
from tests.builders import (
    cluster,
    fat_embedding,
    four_equal_layers,
    job,
    layer,
    link,
    profile,
    request,
    with_recompute,
)
from tests.search.test_search import rugged

SLOW = cluster(8, nodes=2, intra=link(1e11, 2e-6), inter=link(1e9, 1e-5))
SMALL = cluster(4, memory_bytes=40_000_000)
TIGHT = cluster(4, memory_bytes=24_000_000)
HEAVY = profile(layer(parameters=1_000_000) * 6)
TENSOR = profile(layer(exchange=10**6, parameters=10**6) * 4, degrees=(1, 2, 4))

CASES: tuple[tuple[str, ModelProfile, Cluster, dict[str, Any]], ...] = (
    ("equal", four_equal_layers(), SLOW, {}),
    ("embedding", fat_embedding(), SLOW, {"pipeline_parallel_degree": 4}),
    ("rugged", rugged(), SLOW, {}),
    ("pipeline", rugged(9), SLOW, {"pipeline_parallel_degree": 4}),
    ("interleaved", rugged(), SLOW, {"schedule": "interleaved-1f1b"}),
    ("split", rugged(), SLOW, {"schedule": "zb-h1"}),
    ("memory", HEAVY, SMALL, {"zero_stage": 0}),
    ("states", HEAVY, SMALL, {}),
    ("recompute", with_recompute(parameters=1_000_000), TIGHT, {}),
    ("tensor", TENSOR, SLOW, {"tensor_parallel_degree": (2, 4)}),
    ("division", rugged(8), SLOW, {"layers_per_stage": "even"}),
)


@pytest.mark.parametrize(
    ("model", "machines", "fixed"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_prediction_of_a_plan_is_its_step(
    model: ModelProfile, machines: Cluster, fixed: dict[str, Any]
) -> None:
    """`predict` of the plan's own layout and cut gives its step to the nanosecond."""
    step = job(32, **fixed)
    found = plan(request(model, machines, step, top=0), model)
    assert isinstance(found, Plan)
    sizes = tuple(len(stage.layers) for stage in found.stages)
    layout = PredictionLayout(**found.layout.model_dump(), layers_per_stage=sizes)
    predicted = predict(model, machines, step, layout)
    assert predicted.fits
    nanoseconds = round(found.prediction.step_seconds / TICK_SECONDS)
    assert round(predicted.prediction.step_seconds / TICK_SECONDS) == nanoseconds
