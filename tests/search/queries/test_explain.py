"""Sentences about a plan: their numbers are those of the documents."""

from __future__ import annotations

import pytest

from planner.cost import workload
from planner.search.queries.alternatives import alternatives
from planner.search.queries.explain import (
    described_alternatives,
    difference,
    explanation,
    predictions,
    proof_text,
    relaxations_text,
)
from planner.search.queries.outcome import Outcome
from planner.spec.plan import SearchReport
from planner.spec.words import counted
from tests.builders import cluster, four_equal_layers, job
from tests.search.queries.outcomes import limits, outcome_of

REPORT = SearchReport(
    layouts_considered=12,
    layouts_pruned=9,
    layouts_solved=3,
    seconds=1.0,
    lower_bound_seconds=2.0,
    gap=0.0,
    optimal=True,
)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """The proven plan of four equal layers on four devices."""
    return outcome_of(workload(four_equal_layers(), cluster(4), job(8)))


def test_the_proof_states_the_layouts(outcome: Outcome) -> None:
    """The last sentence has the number of layouts and whether the plan is proven."""
    assert outcome.best is not None
    (prediction,) = predictions([outcome.best])
    sentences = explanation(outcome, prediction)
    layouts = counted(outcome.report.layouts_considered, "layout")
    assert f"over {layouts}" in sentences[-1]
    assert "; proven: no plan in the search space is faster" in sentences[-1]
    assert all(sentence.endswith(".") for sentence in sentences)


def test_a_proof_over_some_cuts_states_the_gap_over_all() -> None:
    """Cuts that were not evaluated limit what is proven, and the gap says by how much."""
    some = REPORT.model_copy(update={"gap_all_cuts": 0.0123})
    text = proof_text(some, job(8))
    assert "proven over the evaluated cuts: no plan" in text
    assert text.endswith("; the gap over all cuts is 1.2 %.")
    assert "cuts" not in proof_text(REPORT, job(8))


def test_a_stopped_search_states_its_bound_and_open_layouts() -> None:
    """A plan without a proof comes with the bound, the gap and the open layouts."""
    fields = {"optimal": False, "gap": 0.25, "layouts_pruned": 5}
    text = proof_text(REPORT.model_copy(update=fields), job(8))
    assert "3 were solved, 5 excluded by their bounds, 4 left open" in text
    assert text.endswith("not proven: the lower bound is 2 s, 25 % below.")
    unbounded = {"optimal": False, "lower_bound_seconds": 0.0}
    text = proof_text(REPORT.model_copy(update=unbounded), job(8))
    assert text.endswith("not proven: the search ended before it had a bound.")


def test_the_breakdown_has_the_largest_parts(outcome: Outcome) -> None:
    """The named parts of the step are its largest, in percent."""
    assert outcome.best is not None
    (prediction,) = predictions([outcome.best])
    parts = prediction.breakdown.model_dump()
    largest = max(parts.values()) / prediction.step_seconds
    sentence = next(
        each
        for each in explanation(outcome, prediction)
        if each.startswith("Step time")
    )
    assert f": {100 * largest:.0f} % computation" in sentence


def test_alternatives_are_described_by_their_losses(outcome: Outcome) -> None:
    """Every alternative has its slowdown, and the reason names what differs."""
    assert outcome.best is not None
    candidates = (outcome.best, *alternatives(outcome, 3, limits()))
    priced = predictions(candidates)
    found = described_alternatives(candidates, priced)
    assert len(found) == len(candidates) - 1 > 0
    for one, candidate, prediction in zip(
        found, candidates[1:], priced[1:], strict=True
    ):
        slowdown = prediction.step_seconds / priced[0].step_seconds - 1
        assert one.slowdown == pytest.approx(slowdown)
        assert f"{100 * slowdown:+.1f} % step time" in one.reason
        assert one.layers_per_stage == tuple(map(len, candidate.stage_map))
        assert one.peak_bytes == max(row.peak_bytes for row in prediction.memory)


def test_a_difference_of_equal_layouts_is_the_stage_map(outcome: Outcome) -> None:
    """Equal layouts differ in nothing that a field of the layout states."""
    assert outcome.best is not None
    (prediction,) = predictions([outcome.best])
    layout = outcome.best.layout
    text = difference(layout, layout, prediction, prediction)
    assert text.startswith("another stage map: +0.0 % step time; its fullest device")
    assert text.endswith("as much as the plan's")


def test_no_relaxation_is_a_sentence() -> None:
    """Where nothing gains, one sentence says so."""
    (sentence,) = relaxations_text(())
    assert sentence.startswith("Neither more memory per device")
