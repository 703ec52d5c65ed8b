"""Determinism, limits, progress and words of the search."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from planner.check import check
from planner.cost import TICK_SECONDS
from planner.search import Callbacks, Progress, make_request, plan
from planner.spec import Infeasible, Layout, ModelProfile, Options, Plan
from planner.spec.units import seconds
from planner.spec.words import gibibytes
from tests.brute_force import facts, price
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

CLUSTER = cluster(8, nodes=2, intra=link(1e11, 2e-6), inter=link(1e9, 1e-5))


def rugged(layers: int = 12) -> ModelProfile:
    """Layers that no two cost the same, so that no partition is even."""
    parts = [
        layer(
            f"k{place}",
            forward=(1 + place * place % 7) * 1e-4,
            parameters=100_000 * (1 + place % 3),
            activation=300_000 * (1 + place % 4),
            kept=10_000,
            output=50_000,
            modes=("none", "full"),
        )
        for place in range(layers)
    ]
    return profile(*parts, sizes=(1, 2))


def solved(
    model: ModelProfile, step: Any = None, machines: Any = None, **options: Any
) -> Plan:
    """The plan."""
    found = plan(request(model, machines or CLUSTER, step or job(32), **options), model)
    assert isinstance(found, Plan)
    return found


def timeless(found: Plan) -> dict[str, Any]:
    """Everything of a plan but the seconds that it took to find."""
    document = found.to_json()
    document["search"].pop("seconds")
    return document


@pytest.mark.parametrize("make", [four_equal_layers, fat_embedding, rugged])
def test_same_request_same_plan(make: Any) -> None:
    """Everything of a plan is determined by its request, but the seconds of the search."""
    once, again = solved(make()), solved(make())
    assert timeless(once) == timeless(again)
    assert again.id == once.request.id


def test_id_depends_on_the_request_alone() -> None:
    """The same question in other words is the same plan; another question is another."""
    model = four_equal_layers()
    asked = make_request(model, CLUSTER, job())
    assert asked.id == make_request(model, CLUSTER, job(), Options()).id
    assert asked.id != make_request(model, CLUSTER, job(16)).id
    assert asked.id != make_request(model, CLUSTER, job(), Options(top=1)).id
    named = make_request(model, CLUSTER, job(), model="toy")
    assert (named.profile, named.profile_id) == (None, asked.profile_id)


def tight(model: ModelProfile) -> Any:
    """A cluster so small that most of the model must recompute."""
    whole = solved(model, job(32, pipeline_parallel_degree=8), cluster(8))
    return cluster(
        8,
        memory_bytes=int(0.8 * max(row.peak_bytes for row in whole.prediction.memory)),
    )


def test_optimum_is_proven_when_memory_is_tight() -> None:
    """Recomputation and partition are chosen together, and the proof stands."""
    model = rugged(9)
    found = solved(
        model, job(32, pipeline_parallel_degree=4, schedule="1f1b"), tight(model)
    )
    assert found.search.optimal
    assert found.search.gap == 0
    assert check(found, model).problems == ()


@pytest.mark.parametrize("calls", range(12))
def test_stopping_leaves_a_valid_answer(calls: int) -> None:
    """Stopped at any moment: a valid plan with its honest gap, or no claim that there is none."""
    model = rugged()
    left = iter([False] * calls)
    found = plan(
        request(model, CLUSTER, job(32)),
        model,
        callbacks=Callbacks(should_stop=lambda: next(left, True)),
    )
    if isinstance(found, Infeasible):
        assert found.search is not None
        assert not found.search.optimal
        assert "there may be one" in found.reasons[0]
        return
    assert check(found, model).problems == ()
    best = solved(model)
    assert best.search.optimal
    assert found.prediction.step_seconds >= best.prediction.step_seconds * (1 - 1e-12)
    assert found.search.lower_bound_seconds <= best.prediction.step_seconds * (
        1 + 1e-12
    )
    assert (
        not found.search.optimal
        or found.prediction.step_seconds == best.prediction.step_seconds
    )


def test_stopped_at_once_is_not_a_proof() -> None:
    """Without any time nothing is proven, not even that nothing fits."""
    model = rugged()
    found = plan(
        request(model, CLUSTER, job(32)),
        model,
        callbacks=Callbacks(should_stop=lambda: True),
    )
    assert isinstance(found, Infeasible)
    assert found.search is not None
    assert not found.search.optimal


def test_layouts_left_open_are_not_called_pruned() -> None:
    """A stopped search counts as pruned only what its bounds exclude; a proven one leaves nothing open."""
    model = rugged()
    proven = solved(model).search
    assert proven.layouts_pruned + proven.layouts_solved == proven.layouts_considered
    stopped = plan(
        request(model, CLUSTER, job(32)),
        model,
        callbacks=Callbacks(should_stop=lambda: True),
    )
    assert isinstance(stopped, Infeasible)
    assert stopped.search is not None
    assert stopped.search.layouts_solved == 0
    assert stopped.search.layouts_pruned < stopped.search.layouts_considered


def test_time_limit_is_a_stop() -> None:
    """The least time limit ends like a stop: an answer, and no false proof."""
    model = rugged(16)
    found = plan(request(model, CLUSTER, job(32), time_limit_seconds=1e-3), model)
    if isinstance(found, Plan):
        assert check(found, model).problems == ()
    else:
        assert found.search is not None
        assert not found.search.optimal


def told(model: ModelProfile, machines: Any, step: Any) -> list[Progress]:
    """All progress reports of a search."""
    seen: list[Progress] = []
    plan(
        request(model, machines, step),
        model,
        callbacks=Callbacks(on_progress=seen.append),
    )
    return seen


def test_progress_is_monotone() -> None:
    """Bounds rise, incumbents fall, work gets done, the clock runs, and the last report has no gap."""
    seen = told(rugged(), CLUSTER, job(32))
    assert seen
    for before, after in pairwise(seen):
        assert after.lower_bound_seconds >= before.lower_bound_seconds * (1 - 1e-12)
        assert (after.incumbent_seconds or 0) <= (
            before.incumbent_seconds or float("inf")
        )
        assert after.elapsed_seconds >= before.elapsed_seconds
        assert (
            after.layouts_considered == before.layouts_considered >= after.layouts_done
        )
    for one in seen:
        assert (one.gap is None) == (one.incumbent_seconds is None)
        if one.incumbent_seconds is not None:
            assert one.lower_bound_seconds <= one.incumbent_seconds * (1 + 1e-12)
    assert seen[-1].gap == 0


@pytest.mark.parametrize("top", [0, 1, 5])
def test_top_is_the_most_alternatives(top: int) -> None:
    """As many alternatives as asked for, each another layout than the plan."""
    found = solved(rugged(), top=top)
    assert len(found.alternatives) == top
    for one in found.alternatives:
        assert one.layout != found.layout
        assert one.slowdown >= 0
        assert "instead of" in one.reason
        assert "% step time" in one.reason


def test_alternatives_do_not_change_the_plan() -> None:
    """Asking for more alternatives finds the same plan."""
    few, many = solved(rugged(), top=0), solved(rugged(), top=5)
    assert few.stages == many.stages
    assert few.prediction == many.prediction


def test_explanation_has_the_plan_in_numbers() -> None:
    """The sentences tell degrees, step and proof."""
    found = solved(rugged())
    text = " ".join(found.explanation)
    assert f"pipeline {found.layout.pipeline_parallel_degree}" in text
    assert seconds(found.prediction.step_seconds) in text
    assert "proven" in text


def test_infeasible_tells_the_nearest() -> None:
    """Nothing fits: the reason names the capacity, and the nearest miss by how much it misses."""
    model = with_recompute(parameters=1_000_000)
    found = plan(request(model, cluster(4, memory_bytes=16_000_000), job()), model)
    assert isinstance(found, Infeasible)
    assert "15.25 MiB" in found.reasons[0]
    nearest = found.nearest[0]
    assert nearest.layout.pipeline_parallel_degree == 4
    assert f"{gibibytes(nearest.missing_bytes)} too much" in found.reasons[1]
    assert found.search is not None
    assert found.search.optimal


def test_pipeline_wins_when_the_model_does_not_fit() -> None:
    """64 MB of OGP on devices of 40 MB, none of it sharded: two stages at least, and memory says so on every rank."""
    model = profile(layer(parameters=1_000_000) * 4)
    found = solved(model, job(8, zero_stage=0), cluster(4, memory_bytes=40_000_000))
    assert found.layout.pipeline_parallel_degree >= 2
    assert all(row.peak_bytes <= row.capacity_bytes for row in found.prediction.memory)


def test_fat_embedding_leaves_room_for_work() -> None:
    """Layers are balanced by time, not by parameters: the embedding's stage takes more layers than the head's."""
    found = solved(
        fat_embedding(),
        job(16, pipeline_parallel_degree=2, virtual_stages_per_rank=1, schedule="1f1b"),
        cluster(2),
    )
    assert [len(stage.layers) for stage in found.stages] == [4, 2]


def test_slow_network_keeps_tensor_groups_on_the_node() -> None:
    """With exchanges in every layer, no tensor group crosses the slow network."""
    model = profile(layer(exchange=10**7, parameters=10**6) * 4, degrees=(1, 2, 4, 8))
    machines = cluster(8, nodes=2, intra=link(1e12), inter=link(1e9))
    assert solved(model, job(8), machines).layout.tensor_parallel_degree <= 4


@pytest.mark.parametrize("drift", [-9e-6, 9e-6])
def test_noise_between_recompute_rows_does_not_break_the_proof(drift: float) -> None:
    """The forward is the plain row's in every mode: no bound is above the optimum, which is found."""
    model = profile(
        layer(forward=10e-6, modes=("none", "full"), recompute=0.0, drift=drift) * 4
    )
    machines, step = cluster(2), job(8)
    layout = Layout(pipeline_parallel_degree=2, recompute="per-layer")
    least = min(one.nanoseconds for one in price(facts(model, machines, step, layout)))
    found = solved(model, job(8, pipeline_parallel_degree=2, schedule="1f1b"), machines)
    assert found.prediction.step_seconds == pytest.approx(least * TICK_SECONDS)
    assert found.search.optimal
    assert found.search.lower_bound_seconds == found.prediction.step_seconds


def test_many_temporaries_stay_exact() -> None:
    """Seventy temporaries, no two the same: the last byte decides what fits, also beside a larger one.

    The last layer fills its device; so all others must stand on the first stage: 69 000 bytes, and 16 x 31 of the 69th.
    """
    parts = [
        layer(f"k{place}", temporary=1000 * (place + 1), parameters=31 * (place == 68))
        for place in range(70)
    ]
    model = profile(*parts)
    machines, step = (
        cluster(2, memory_bytes=70_000),
        job(pipeline_parallel_degree=2, schedule="1f1b"),
    )
    found = plan(request(model, machines, step), model)
    assert isinstance(found, Plan)
    assert [row.peak_bytes for row in found.prediction.memory] == [69_496, 70_000]
