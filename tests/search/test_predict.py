"""`predict`: a given layout priced as the search would price it, whether it fits or not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import TICK_SECONDS
from planner.errors import (
    LayoutError,
    MismatchError,
    UnknownNameError,
    UnsupportedError,
)
from planner.search import plan, predict
from planner.spec import Forecast, ModelProfile, Plan
from planner.spec.layout import PredictionLayout
from planner.spec.words import gibibytes
from tests.brute_force import PARTITIONED, facts, is_ruled, layouts, price
from tests.builders import (
    cluster,
    fat_embedding,
    four_equal_layers,
    job,
    layer,
    profile,
    request,
    with_recompute,
)
from tests.strategies import Instance, instances


def forecast(
    model: ModelProfile, machines: Any = None, step: Any = None, **layout: Any
) -> Forecast:
    """The prediction for a layout, by default on as many devices as it takes."""
    wanted = PredictionLayout(**layout)
    return predict(model, machines or cluster(wanted.devices), step or job(), wanted)


def test_plan_and_prediction_agree() -> None:
    """A plan's own layout and partition predict its own numbers."""
    model = fat_embedding()
    found = plan(request(model, cluster(4), job(16, pipeline_parallel_degree=2)), model)
    assert isinstance(found, Plan)
    given = found.layout.model_dump() | {
        "layers_per_stage": tuple(len(stage.layers) for stage in found.stages)
    }
    told = forecast(model, cluster(4), job(16), **given)
    assert told.prediction == found.prediction
    assert told.stages == found.stages
    assert told.micro_batches == found.micro_batches


@settings(max_examples=40)
@given(instances(), st.data())
def test_partition_left_open_is_the_best_one(
    instance: Instance, data: st.DataObject
) -> None:
    """Without layers_per_stage: the fastest stage map of the layout, with any mix of recomputation if so wished; under
    schedules that deal their layers, the dealt one."""
    every = layouts(instance.profile, instance.cluster, instance.job)
    possible = [layout for layout in every if not is_ruled(layout)]
    if not possible:
        return
    layout = data.draw(st.sampled_from(possible))
    least = min(
        one.nanoseconds
        for one in price(
            facts(instance.profile, instance.cluster, instance.job, layout)
        )
    )
    is_free = layout.schedule in PARTITIONED and not layout.has_uneven_shares
    free = {"recompute": "per-layer"} if is_free else {}
    wanted = PredictionLayout(**layout.model_dump() | free)
    told = predict(instance.profile, instance.cluster, instance.job, wanted)
    assert told.prediction.step_seconds == pytest.approx(
        least * TICK_SECONDS, rel=1e-12
    )
    assert told.fits


def test_given_partition_stands() -> None:
    """Layers per stage are kept, however bad."""
    told = forecast(
        four_equal_layers(), pipeline_parallel_degree=2, layers_per_stage=(1, 3)
    )
    assert [[one.name for one in stage.layers] for stage in told.stages] == [
        ["block0"],
        ["block1", "block2", "block3"],
    ]


def test_layout_that_does_not_fit_is_priced() -> None:
    """A prediction beyond the memory says by how much, rank by rank."""
    told = forecast(
        four_equal_layers(), cluster(2, memory_bytes=1000), pipeline_parallel_degree=2
    )
    assert not told.fits
    assert len(told.reasons) == 2
    for row, reason in zip(told.prediction.memory, told.reasons, strict=True):
        assert (
            f"needs {gibibytes(row.peak_bytes)}, {gibibytes(row.peak_bytes - 1000)} more than"
            in reason
        )


@pytest.mark.parametrize("word", ["none", "full"])
def test_recompute_word_is_kept(word: str) -> None:
    """Every layer runs in the mode that the layout names, with a given partition and without."""
    for partition in ({}, {"layers_per_stage": (2, 2)}):
        told = forecast(
            with_recompute(), pipeline_parallel_degree=2, recompute=word, **partition
        )
        assert {one.recompute for stage in told.stages for one in stage.layers} == {
            word
        }


def test_per_layer_recomputes_only_what_it_must() -> None:
    """With per-layer, a given partition recomputes nothing while everything fits, and just enough when it does not."""
    roomy = forecast(
        with_recompute(),
        pipeline_parallel_degree=2,
        recompute="per-layer",
        layers_per_stage=(2, 2),
    )
    assert {one.recompute for stage in roomy.stages for one in stage.layers} == {"none"}
    tight = forecast(
        with_recompute(),
        cluster(2, memory_bytes=3_500_000),
        pipeline_parallel_degree=2,
        recompute="per-layer",
        layers_per_stage=(2, 2),
    )
    assert tight.fits
    assert [one.recompute for one in tight.stages[1].layers] == ["none", "none"]
    assert "full" in [one.recompute for one in tight.stages[0].layers]


@pytest.mark.parametrize("partition", [{}, {"layers_per_stage": (2, 2)}])
def test_layers_without_the_wished_mode_keep_theirs(partition: dict[str, Any]) -> None:
    """A layer measured only with full recomputation recomputes, whatever the word says."""
    model = profile(layer(modes=("full",)) * 2, layer("plain") * 2)
    told = forecast(model, pipeline_parallel_degree=2, recompute="none", **partition)
    assert [one.recompute for stage in told.stages for one in stage.layers] == [
        "full",
        "full",
        "none",
        "none",
    ]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_is_priced_though_not_searched(zero: int) -> None:
    """`predict` prices ZeRO stages, which save memory on every replica."""
    model = fat_embedding()
    told = forecast(model, data_parallel_degree=4, zero_stage=zero)
    plain = forecast(model, data_parallel_degree=4)
    assert told.prediction.memory[0].peak_bytes < plain.prediction.memory[0].peak_bytes


@pytest.mark.parametrize("counts", [(1, 2), (4,), (0, 4), (1, 1, 2), (5, -1)])
def test_wrong_partitions_are_refused(counts: tuple[int, ...]) -> None:
    """Stages and layers must add up; the message shows both."""
    with pytest.raises(
        LayoutError,
        match=r"layers_per_stage .*pipeline_parallel_degree\(2\) and the model 4 layers",
    ):
        forecast(
            four_equal_layers(),
            cluster(2),
            pipeline_parallel_degree=2,
            layers_per_stage=counts,
        )


def test_more_stages_than_layers_are_refused() -> None:
    """No stage is empty."""
    with pytest.raises(
        LayoutError,
        match=r"pipeline_parallel_degree\(8\) is more than the model's 4 layers",
    ):
        forecast(four_equal_layers(), pipeline_parallel_degree=8)


@pytest.mark.parametrize(
    ("error", "layout"),
    [
        (LayoutError, {"data_parallel_degree": 3}),
        (MismatchError, {"tensor_parallel_degree": 4}),
        (UnknownNameError, {"schedule": "no-such-schedule", "data_parallel_degree": 4}),
        (UnsupportedError, {"context_parallel_degree": 2, "data_parallel_degree": 2}),
    ],
)
def test_layouts_that_cannot_be_priced_are_refused(
    error: type[Exception], layout: dict[str, Any]
) -> None:
    """Each with the error of its kind."""
    with pytest.raises(error):
        forecast(four_equal_layers(), cluster(4), **layout)
