"""Alternatives against brute force over the rows of small models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from planner.cost import Workload, choose, rank_memory, workload
from planner.search.engine.space import whole_space
from planner.search.engine.stop import AnyStop, GapStop, WorkStop
from planner.search.engine.table import enumerate_table
from planner.search.queries.alternatives import CLOSE, alternatives
from planner.search.queries.outcome import Outcome
from tests.search.engine.exact import Layouts, all_cuts, all_maps, step_of
from tests.search.engine.test_table import decoder
from tests.search.queries.outcomes import limits, outcome_of, stopped
from tests.strategies import Instance, instances

MOST_LAYOUTS = 120

Degrees = tuple[int, ...]


def small(instance: Instance) -> Outcome | None:
    """The outcome of a small model on one kind of device; None: it is too large."""
    work = workload(instance.profile, instance.cluster, instance.job)
    if work.groups:
        return None
    if len(enumerate_table(work, whole_space(work))) > MOST_LAYOUTS:
        return None
    found = outcome_of(work)
    return None if found.best is None else found


def fastest_by_degrees(outcome: Outcome) -> dict[Degrees, int]:
    """Least step of all rows, options, cuts and modes, by degrees."""
    layouts = Layouts(outcome.work, outcome.search.space)
    found: dict[Degrees, int] = {}
    for row in map(layouts.row, range(len(layouts.table))):
        for option in layouts.options.of(row):
            prices = layouts.prices(row, option)
            costs = layouts.pricing.costs(row, option)
            stages = row.pipeline * row.virtual_stages
            for sizes in all_cuts(len(prices.kind_of), stages):
                for stage_map in all_maps(prices, sizes):
                    step = step_of(costs, stage_map)
                    known = found.get(row[:5])
                    if step is not None and (known is None or step < known):
                        found[row[:5]] = step
    return found


@settings(max_examples=25, deadline=None)
@given(instances(most_layers=3))
def test_the_first_alternative_is_the_best_of_other_degrees(
    instance: Instance,
) -> None:
    """No layout with other degrees than the plan's is faster by more than 3 %."""
    outcome = small(instance)
    if outcome is None or outcome.best is None:
        return
    steps = fastest_by_degrees(outcome)
    others = {key: step for key, step in steps.items() if key != outcome.best.row[:5]}
    found = alternatives(outcome, 1, limits())
    if others:
        (one,) = found
        assert one.row[:5] in others
        assert min(others.values()) <= one.total <= CLOSE * min(others.values())
    else:
        assert all(one.row[:5] == outcome.best.row[:5] for one in found)


@settings(max_examples=25, deadline=None)
@given(instances(most_layers=4))
def test_alternatives_are_real(instance: Instance) -> None:
    """Every alternative fits, differs from all others, and is no faster than the plan."""
    outcome = small(instance)
    if outcome is None or outcome.best is None:
        return
    found = alternatives(outcome, 4, limits())
    everything = [outcome.best, *found]
    assert len({(one.row, one.option) for one in everything}) == len(everything)
    for one in found:
        assert one.total == step_of(one.costs, one.stage_map)
        assert one.total >= outcome.best.total
    assert [one.total for one in found] == sorted(one.total for one in found)


def work() -> Workload:
    """A decoder with many layouts."""
    return decoder("llama-3.1-8b", 16, 64, 8192)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """A search of the decoder that a work limit cut."""
    return outcome_of(work(), AnyStop((GapStop(0.05), WorkStop(400_000))))


def test_degrees_differ_first(outcome: Outcome) -> None:
    """All alternatives of a large space have degrees of their own."""
    assert outcome.best is not None
    found = alternatives(outcome, 5, limits())
    degrees = {one.row[:5] for one in (outcome.best, *found)}
    assert len(degrees) == 6
    for one in found:
        stages = choose(one.costs, one.stage_map)
        assert all(row.fits for row in rank_memory(one.costs, one.schedule, stages))


def test_the_best_stay_with_more_alternatives(outcome: Outcome) -> None:
    """The best of many alternatives is at least as fast as the best of few."""
    few = alternatives(outcome, 1, limits())
    many = alternatives(outcome, 6, limits())
    assert many[0].total <= few[0].total * CLOSE


def test_alternatives_are_reproducible(outcome: Outcome) -> None:
    """Equal searches have equal alternatives."""
    again = outcome_of(work(), AnyStop((GapStop(0.05), WorkStop(400_000))))
    first = [(one.layout, one.stage_map) for one in alternatives(outcome, 3, limits())]
    second = [(one.layout, one.stage_map) for one in alternatives(again, 3, limits())]
    assert first == second


def test_the_search_stays_as_it_is(outcome: Outcome) -> None:
    """A query leaves the progress and queue of the search unchanged."""
    before = (outcome.search.progress(), list(outcome.search.queue))
    alternatives(outcome, 2, limits())
    assert (outcome.search.progress(), list(outcome.search.queue)) == before


def test_a_search_that_used_its_time_has_alternatives(outcome: Outcome) -> None:
    """When the time is over some alternatives are found by a little work."""
    found = alternatives(outcome, 3, limits(seconds=-1.0))
    assert found
    assert all(one.total == step_of(one.costs, one.stage_map) for one in found)


def test_nothing_is_returned_to_a_caller_that_stops(outcome: Outcome) -> None:
    """Cancelled, or asked for none, there are no alternatives."""
    assert alternatives(outcome, 3, stopped()) == ()
    assert alternatives(outcome, 0, limits()) == ()


def test_other_schedules_follow_where_degrees_are_fixed() -> None:
    """With one set of degrees the alternatives differ in schedule or micro-batch size."""
    fixed = decoder(
        "gpt2", 4, 32, 1024, data_parallel_degree=2, tensor_parallel_degree=1,
        pipeline_parallel_degree=2, context_parallel_degree=1,
    )  # fmt: skip
    outcome = outcome_of(fixed, AnyStop((GapStop(0.02), WorkStop(400_000))))
    assert outcome.best is not None
    found = alternatives(outcome, 3, limits())
    choices = {
        (one.row.schedule, one.row.micro_batch_size) for one in (outcome.best, *found)
    }
    assert len(choices) == 4
