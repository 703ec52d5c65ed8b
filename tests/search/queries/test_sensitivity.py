"""Sensitivity against prices of changed documents."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from planner.search import plan, predict
from planner.search.queries.explain import sensitivity_text
from planner.spec import Cluster, Layout, ModelProfile, Plan, PredictionLayout
from planner.spec.plan import Overtaking, Sensitivity
from tests.builders import cluster, job, layer, link, profile, request

STEP = job(16, zero_stage=0)


def exchanging(scale: float = 1.0, *, spread: float | None = None) -> ModelProfile:
    """Layers with much tensor-parallel exchange; compute is `scale` times as long."""
    found = profile(
        layer(
            forward=1e-3 * scale,
            exchange=2_000_000,
            parameters=4_000_000,
            output=500_000,
            optimizer=1e-4 * scale,
        )
        * 8,
        degrees=(1, 2, 4),
        sizes=(1, 2),
    )
    layers = [
        one.model_copy(
            update={
                "measurements": tuple(
                    row.model_copy(update={"relative_spread": spread})
                    for row in one.measurements
                )
            }
        )
        for one in found.layers
    ]
    return found.model_copy(update={"layers": tuple(layers)})


def machines(
    inside: float = 1.0, between: float = 1.0, latency: float = 1.0
) -> Cluster:
    """Two nodes of four devices, with scaled links."""
    return cluster(
        8,
        nodes=2,
        intra=link(5e10 * inside, 1e-5 * latency),
        inter=link(4e9 * between, 5e-5 * latency),
    )


def solved(**options: object) -> Plan:
    """The plan on unchanged links."""
    found = plan(
        request(
            exchanging(), machines(), STEP, **{"explain": "full", "top": 5, **options}
        ),
        exchanging(),
    )
    assert isinstance(found, Plan)
    return found


def steps(
    found: Plan, other: int, model: ModelProfile, there: Cluster
) -> tuple[float, float]:
    """Steps of the plan and of one of its alternatives on changed documents."""
    other_plan = found.alternatives[other]
    ours = predicted(
        model, there, found.layout, [len(stage.layers) for stage in found.stages]
    )
    return ours, predicted(model, there, other_plan.layout, other_plan.layers_per_stage)


def predicted(
    model: ModelProfile, there: Cluster, layout: Layout, counts: Sequence[int]
) -> float:
    """Seconds of a step."""
    asked = PredictionLayout(**layout.model_dump(), layers_per_stage=tuple(counts))
    return predict(model, there, STEP, asked).prediction.step_seconds


def changed(quantity: str, factor: float) -> tuple[ModelProfile, Cluster]:
    """The documents with one quantity scaled."""
    match quantity:
        case "compute_seconds":
            return exchanging(factor), machines()
        case "intra_node_bandwidth":
            return exchanging(), machines(inside=factor)
        case "inter_node_bandwidth":
            return exchanging(), machines(between=factor)
    return exchanging(), machines(latency=factor)


def test_an_alternative_overtakes_at_its_change() -> None:
    """With the reported change the alternative is faster; with nine tenths of it the plan is."""
    found = solved()
    changes = [
        (one.quantity, each) for one in found.sensitivity for each in one.overtakes
    ]
    assert {quantity for quantity, _ in changes} >= {
        "compute_seconds",
        "intra_node_bandwidth",
    }
    for quantity, each in changes:
        ours, others = steps(
            found, each.alternative, *changed(quantity, 1 + each.change)
        )
        assert others < ours
        ours, others = steps(
            found, each.alternative, *changed(quantity, 1 + 0.9 * each.change)
        )
        assert others >= ours


def test_other_alternatives_do_not_overtake() -> None:
    """An alternative without a reported change is slower at both ends of the range."""
    found = solved()
    for one in found.sensitivity:
        reported = {each.alternative for each in one.overtakes}
        for other in set(range(len(found.alternatives))) - reported:
            for factor in (4.0, 0.25):
                ours, others = steps(found, other, *changed(one.quantity, factor))
                assert others >= ours


def test_brief_looks_only_within_the_expected_errors() -> None:
    """Without `full` the changes within the expected errors are reported, as with it."""
    full, brief = solved().sensitivity, solved(explain="brief").sensitivity
    for one, short in zip(full, brief, strict=True):
        assert (one.quantity, one.uncertainty, one.holds) == (
            short.quantity,
            short.uncertainty,
            short.holds,
        )
        near = {
            each.alternative
            for each in one.overtakes
            if abs(each.change) <= one.uncertainty
        }
        assert {each.alternative for each in short.overtakes} == near


def test_errors_are_those_measured() -> None:
    """The spread of measured rows and the residual of links replace assumed errors."""
    there = machines()
    group = there.node_groups[0]
    fitted = group.inter_node.model_copy(update={"relative_residual": 0.07})  # type: ignore[union-attr]
    there = there.model_copy(
        update={"node_groups": (group.model_copy(update={"inter_node": fitted}),)}
    )
    model = exchanging(spread=0.03)
    found = plan(request(model, there, STEP), model)
    assert isinstance(found, Plan)
    errors = {
        one.quantity: (one.uncertainty, one.reason.startswith("assumed"))
        for one in found.sensitivity
    }
    assert errors == {
        "compute_seconds": (0.03, False),
        "intra_node_bandwidth": (0.2, True),
        "inter_node_bandwidth": (0.07, False),
        "latency_seconds": (0.07, False),
    }


def test_without_alternatives_there_is_no_sensitivity() -> None:
    """Nothing can overtake the plan."""
    assert solved(top=0).sensitivity == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [(-0.05, "wins; the expected error is 20 %: because"), (-0.5, "wins.")],
)
def test_words_say_what_wins(change: float, words: str) -> None:
    """The sentence names the change, the alternative and the expected error."""
    found = solved()
    one = Sensitivity(
        quantity="inter_node_bandwidth",
        uncertainty=0.2,
        reason="because",
        overtakes=(Overtaking(alternative=0, change=change),),
        holds=abs(change) > 0.2,
    )
    text = sensitivity_text((one,), found.layout, found.alternatives)
    assert words in text[-1]
    assert f"With {100 * abs(change):.0f} % less bandwidth between nodes, " in text[-1]
    assert ("No alternative is faster" in text[0]) == one.holds
