"""Sensitivity against prices of changed documents: the change told is where the alternative overtakes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.search import plan, predict
from planner.search.answer.explain import sensitivity_text
from planner.search.answer.sensitivity import _between
from planner.spec import Cluster, Layout, ModelProfile, Plan, PredictionLayout
from planner.spec.plan import Overtaking, Sensitivity
from tests.builders import cluster, job, layer, link, profile, request

STEP = job(16, zero_stage=0)


def exchanging(scale: float = 1.0, *, spread: float | None = None) -> ModelProfile:
    """Layers that tensor-parallel ranks exchange much for, and that keep much; compute `scale` times as long."""
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
    """Two nodes of four, their links so many times as fast or slow."""
    return cluster(
        8,
        nodes=2,
        intra=link(5e10 * inside, 1e-5 * latency),
        inter=link(4e9 * between, 5e-5 * latency),
    )


def solved(**options: object) -> Plan:
    """The plan on the links as they are."""
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
    """Steps of the plan and of one of its alternatives, priced anew."""
    rival = found.alternatives[other]
    ours = predicted(
        model, there, found.layout, [len(stage.layers) for stage in found.stages]
    )
    return ours, predicted(model, there, rival.layout, rival.layers_per_stage)


def predicted(
    model: ModelProfile, there: Cluster, layout: Layout, counts: Sequence[int]
) -> float:
    """Seconds of a step."""
    asked = PredictionLayout(**layout.model_dump(), layers_per_stage=tuple(counts))
    return predict(model, there, STEP, asked).prediction.step_seconds


def changed(quantity: str, factor: float) -> tuple[ModelProfile, Cluster]:
    """The documents with one quantity so many times as large."""
    match quantity:
        case "compute_seconds":
            return exchanging(factor), machines()
        case "intra_node_bandwidth":
            return exchanging(), machines(inside=factor)
        case "inter_node_bandwidth":
            return exchanging(), machines(between=factor)
    return exchanging(), machines(latency=factor)


def test_every_change_told_is_where_the_alternative_overtakes() -> None:
    """With the change told the alternative is faster than the plan; with nine tenths of it the plan still wins."""
    found = solved()
    told = [(one.quantity, each) for one in found.sensitivity for each in one.overtakes]
    assert {quantity for quantity, _ in told} >= {
        "compute_seconds",
        "intra_node_bandwidth",
    }
    for quantity, each in told:
        ours, theirs = steps(
            found, each.alternative, *changed(quantity, 1 + each.change)
        )
        assert theirs < ours
        ours, theirs = steps(
            found, each.alternative, *changed(quantity, 1 + 0.9 * each.change)
        )
        assert theirs >= ours


def test_what_is_not_told_does_not_overtake() -> None:
    """An alternative without a change stays behind at the ends of the range, where those told may be ahead."""
    found = solved()
    for one in found.sensitivity:
        told = {each.alternative for each in one.overtakes}
        for other in set(range(len(found.alternatives))) - told:
            for factor in (4.0, 0.25):
                ours, theirs = steps(found, other, *changed(one.quantity, factor))
                assert theirs >= ours


def test_brief_tells_only_what_the_errors_reach() -> None:
    """Without `full` only what lies within the error to expect is looked for, and it is the same as with it."""
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
    """The spread of the rows and the residual of the links go before what is assumed."""
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


def test_without_alternatives_nothing_is_told() -> None:
    """There is nothing to be overtaken by."""
    assert solved(top=0).sensitivity == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [(-0.05, "wins; the expected error is 20 %: because"), (-0.5, "wins.")],
)
def test_words_say_what_wins(change: float, words: str) -> None:
    """The sentence names the change and the alternative, and whether that much error is to be expected."""
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


@given(
    place=st.floats(0.0, 0.999),
    bend=st.sampled_from((0.2, 0.5, 1.0, 2.0, 5.0)),
    far=st.sampled_from((1.1, 2.0, 0.9, 0.25)),
)
def test_an_overtaking_is_where_bisection_finds_it(
    place: float, bend: float, far: float
) -> None:
    """Whatever way the alternative comes nearer: the same factor as ten halvings, found with fewer questions."""
    asked: set[float] = set()

    def behind(factor: float) -> int:
        asked.add(factor)
        way = (factor - 1) / (far - 1)
        return round(1e9 * (place**bend - way**bend)) if way < 1 else -1

    lost, won = 1.0, far
    for _ in range(10):
        middle = (lost + won) / 2
        lost, won = (lost, middle) if behind(middle) < 0 else (middle, won)
    by_halving = len(asked)
    asked.clear()
    assert _between(behind, 1.0, far) == won
    assert by_halving == 10
    assert bend != 1.0 or len(asked) <= 8
