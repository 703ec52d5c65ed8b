"""`predict`: a given layout priced as the search would price it, whether it fits or not."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.check.actions import parse_actions
from planner.check.price import Pricing
from planner.check.step import Step
from planner.cost import TICK_SECONDS
from planner.errors import (
    LayoutError,
    MismatchError,
    UnknownNameError,
    UnsupportedError,
)
from planner.schedule import build
from planner.search import plan, predict
from planner.spec import Forecast, Layout, ModelProfile, Plan
from planner.spec.layout import PredictionLayout
from planner.spec.profile import RecomputeMode
from planner.spec.words import gibibytes
from tests.brute_force import PARTITIONED, facts, layouts
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
from tests.search.engine.exact import all_cuts, with_memory
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


@settings(max_examples=60)
@given(instances(most_layers=6), st.data())
def test_stage_map_that_is_open_is_the_best_one(
    instance: Instance, data: st.DataObject
) -> None:
    """Without layers_per_stage: the fastest stage map that fits of all cuts, with the modes of the layout's word.

    If none fits, the fastest one of all; no layer recomputes then under ``per-layer``.
    """
    possible = list(layouts(instance.profile, instance.cluster, instance.job))
    assume(possible)
    layout = data.draw(st.sampled_from(possible))
    if layout.schedule in PARTITIONED and not layout.activation_offload:
        word = data.draw(st.sampled_from(("none", "selective", "full", "per-layer")))
        layout = layout.model_copy(update={"recompute": word})
    is_exact = layout.recompute != "per-layer" or is_simple(layout)
    priced = all_priced(instance, layout)
    peaks = sorted(peak for _, peak, _ in priced)
    memory = data.draw(st.sampled_from((10**9, *peaks)))
    fitting = [nanoseconds for nanoseconds, peak, _ in priced if peak <= memory]
    anyway = [nanoseconds for nanoseconds, _, least in priced if least]
    wanted = PredictionLayout(**layout.model_dump())
    machines = with_memory(instance, memory).cluster
    found = predict(instance.profile, machines, instance.job, wanted)
    nanoseconds = round(found.prediction.step_seconds / TICK_SECONDS)
    if not is_exact:
        assert not found.fits or nanoseconds >= min(fitting)
        return
    assert found.fits == bool(fitting)
    assert nanoseconds == min(fitting or anyway)


def is_simple(layout: Layout) -> bool:
    """Return whether ranks have one stage each and sequences are whole."""
    return layout.virtual_stages_per_rank == layout.sequence_chunks == 1


def all_priced(instance: Instance, layout: Layout) -> list[tuple[int, int, bool]]:
    """Return (nanoseconds, peak bytes, recomputes least) of every stage map of a layout."""
    known = facts(instance.profile, instance.cluster, instance.job, layout)
    cells = Pricing(known)
    schedule = build(
        layout.schedule,
        ranks=layout.pipeline_parallel_degree,
        micro_batches=known.micro_batches,
        virtual_stages=layout.virtual_stages_per_rank,
        sequence_chunks=layout.sequence_chunks,
    )
    actions = parse_actions(schedule.to_text())
    offered = [tuple(known.rows(one)) for one in known.profile.layers]
    word = layout.recompute
    mixtures: list[tuple[RecomputeMode, ...]]
    if word == "per-layer":
        mixtures = list(product(*offered))
    else:
        mixtures = [tuple(word if word in one else one[0] for one in offered)]
    fastest = fastest_modes(cells)
    found = []
    for sizes in all_cuts(len(offered), schedule.stages):
        for mixture in mixtures:
            layers = iter(enumerate(mixture))
            stage_map = tuple(tuple(islice(layers, size)) for size in sizes)
            step = Step(cells, stage_map, actions)
            peak = max(row.peak_bytes for row in step.memory())
            is_least = word != "per-layer" or mixture == fastest
            found.append((step.last.step_nanoseconds, peak, is_least))
    return found


def fastest_modes(cells: Pricing) -> tuple[RecomputeMode, ...]:
    """Return the mode of every layer whose backward is shortest, with fewest bytes."""
    prices = cells.prices(cells.sites.columns[0], 0)
    found = []
    for modes in prices.layers:
        keys = {
            mode: (one.whole_backward_input + one.backward_weight, one.saved_bytes)
            for mode, one in modes.items()
        }
        found.append(min(keys, key=lambda mode: keys[mode]))
    return tuple(found)


@pytest.mark.parametrize("word", ["per-layer", "selective", "full"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipev"])
def test_recomputation_under_split_backwards_is_refused(
    schedule: str, word: str
) -> None:
    """As the executor refuses it: the hint names what works, and that works."""
    layout = {"pipeline_parallel_degree": 2, "schedule": schedule}
    if schedule != "zb-h1":
        layout["virtual_stages_per_rank"] = 2
    with pytest.raises(UnsupportedError, match="splits backwards") as caught:
        forecast(with_recompute(), recompute=word, **layout)
    (problem,) = caught.value.problems
    assert problem.field == "layout.recompute"
    assert "give none" in problem.hint
    assert forecast(with_recompute(), **layout).fits
    works = {"schedule": "1f1b", "virtual_stages_per_rank": 1, "recompute": word}
    assert forecast(with_recompute(), **layout | works).fits


@pytest.mark.parametrize("schedule", ["dualpipe", "chimera", "torchgpipe"])
def test_recomputation_that_layers_cannot_choose_is_refused(schedule: str) -> None:
    """Stages on two ranks, and a schedule that decides which micro-batches recompute; all layers together may."""
    layout = {"pipeline_parallel_degree": 2, "schedule": schedule}
    with pytest.raises(UnsupportedError, match="not chosen per layer"):
        forecast(with_recompute(), recompute="per-layer", **layout)
    found = forecast(with_recompute(), recompute="full", **layout)
    assert {one.recompute for stage in found.stages for one in stage.layers} == {"full"}


@pytest.mark.parametrize(
    "schedule", ["dualpipe", "chimera", "1f1b-overlap", "pipedream"]
)
def test_schedules_that_are_only_priced_have_even_stages(schedule: str) -> None:
    """Four equal layers on two ranks are two each."""
    found = forecast(four_equal_layers(), pipeline_parallel_degree=2, schedule=schedule)
    assert [len(stage.layers) for stage in found.stages] == [2, 2]


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


def test_recompute_modes_that_a_runtime_lacks_are_refused() -> None:
    """Megatron-Core runs no linear layers again alone; our executor has no module mlp."""
    model = four_equal_layers()
    for runtime, mode in (("megatron-core", "linear"), ("planner", "mlp")):
        step = job().model_copy(update={"runtime": runtime})
        with pytest.raises(UnsupportedError, match=f"no recompute mode '{mode}'"):
            forecast(model, None, step, recompute=mode)


def test_recompute_modes_that_no_layer_has_are_refused() -> None:
    """Layers without norms and experts of their own have nothing that runs again."""
    step = job().model_copy(update={"runtime": "megatron-core"})
    with pytest.raises(UnsupportedError, match="no layer of this model"):
        forecast(four_equal_layers(), None, step, recompute="norms")
