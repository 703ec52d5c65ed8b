"""The gap to the best order, against the orders of known schedules."""

from __future__ import annotations

import pytest

from planner.cost import choose, evaluate, schedule_of, workload
from planner.search.queries.explain import explanation, predictions
from planner.search.queries.orders import order_gap
from planner.search.queries.outcome import Outcome
from tests.builders import cluster, job, layer, profile
from tests.search.queries.outcomes import outcome_of

UNEVEN = profile(layer(forward=1e-3) * 3, layer(forward=3e-3) * 3)


def planned(schedule: str, ranks: int) -> Outcome:
    """The plan of a schedule on four devices."""
    step = job(8, schedule=schedule, pipeline_parallel_degree=ranks, recompute="none")
    return outcome_of(workload(UNEVEN, cluster(4), step))


@pytest.mark.parametrize("other", ["1f1b", "zb-h1", "zb-h2", "eager-1f1b"])
def test_no_known_order_saves_more_than_the_gap(other: str) -> None:
    """On the stages of a gpipe plan, another schedule saves at most the gap."""
    best = planned("gpipe", 4).best
    assert best is not None
    gap = order_gap(best)
    assert gap is not None
    costs = best.costs.under(best.costs.layout.model_copy(update={"schedule": other}))
    step = evaluate(costs, schedule_of(costs), choose(costs, best.stage_map))
    assert 1 - step.total_ticks / best.total <= gap + 1e-9 < 1


def test_the_explanation_has_the_gap() -> None:
    """A plan of several pipeline ranks says what another order may save."""
    outcome = planned("gpipe", 4)
    assert outcome.best is not None
    gap = order_gap(outcome.best)
    assert gap is not None
    sentences = explanation(outcome, predictions([outcome.best])[0])
    (sentence,) = [each for each in sentences if each.startswith("No order")]
    assert f"saves more than {100 * gap:.2g} % of the step" in sentence


def test_one_rank_has_no_order() -> None:
    """Without a pipeline nothing is said about orders."""
    outcome = planned("1f1b", 1)
    assert outcome.best is not None
    assert order_gap(outcome.best) is None
    sentences = explanation(outcome, predictions([outcome.best])[0])
    assert not any(each.startswith("No order") for each in sentences)
