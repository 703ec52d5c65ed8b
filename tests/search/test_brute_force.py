"""The search against brute force: no slower plan, real alternatives, and the least memory of misses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.cost import (
    TICK_SECONDS,
    choose,
    evaluate,
    layout_costs,
    schedule_of,
    stage_memory,
    workload,
)
from planner.search import plan, predict
from planner.spec import Infeasible, Layout, Plan, canonical_json
from planner.spec.layout import PredictionLayout
from planner.spec.plan import Alternative
from tests.brute_force import PARTITIONED, Priced, facts, layouts, price, price_all
from tests.builders import request
from tests.strategies import Instance, instances


@st.composite
def tight_instances(draw: st.DrawFn) -> tuple[Instance, list[Priced]]:
    """A request whose devices hold exactly what some stage map needs, or a byte less; and all its stage maps."""
    instance = asking_for_all(draw(instances()))
    priced = price_all(instance.profile, instance.cluster, instance.job, ruled=False)
    peaks = sorted({one.peak for one in priced}) or [1000]
    memory = peaks[draw(st.integers(0, len(peaks) - 1))] - draw(
        st.sampled_from((0, 0, 0, 1))
    )
    tight = with_memory(instance, max(1, memory))
    return tight, priced + price_all(
        tight.profile, tight.cluster, tight.job, ruled=True
    )


def asking_for_all(instance: Instance) -> Instance:
    """The same request for short pieces of sequences too, which no measured run supports."""
    wishes = {"context_parallel_degree": (1, 2), "sequence_chunks": (1, 2, 4, 8)}
    job = instance.job.model_copy(update={"constraints": wishes})
    return replace(instance, job=job)


def with_memory(instance: Instance, memory_bytes: int) -> Instance:
    """The same request on devices of this size."""
    group = instance.cluster.node_groups[0]
    device = group.device.model_copy(update={"memory_bytes": memory_bytes})  # type: ignore[union-attr]
    smaller = instance.cluster.model_copy(
        update={"node_groups": (group.model_copy(update={"device": device}),)}
    )
    return Instance(instance.profile, smaller, instance.job)


def memory_of(instance: Instance) -> int:
    """Bytes of a device."""
    return instance.cluster.node_groups[0].device.memory_bytes  # type: ignore[union-attr]


def answer(instance: Instance, **options: int) -> Plan | Infeasible:
    """What the search says."""
    return plan(
        request(instance.profile, instance.cluster, instance.job, **options),
        instance.profile,
    )


def asked(layout: Layout) -> Layout:
    """The layout of the space that one in a plan came from: where recomputation is searched, its word is an answer."""
    is_searched = layout.schedule in PARTITIONED and not layout.has_uneven_shares
    return layout.model_copy(update={"recompute": "none"}) if is_searched else layout


@settings(max_examples=40)
@given(tight_instances())
def test_plan_is_the_optimum(case: tuple[Instance, list[Priced]]) -> None:
    """The plan is proven, and no slower than any stage map that fits; infeasible only if none does.

    It has more cuts and mixes of recompute modes than these stage maps.
    """
    instance, priced = case
    fitting = [one.nanoseconds for one in priced if one.peak <= memory_of(instance)]
    found = answer(instance, top=0)
    if isinstance(found, Infeasible):
        assert not fitting
        assert found.search is None or found.search.optimal
        return
    assert found.search.optimal
    assert check(found, instance.profile).problems == ()
    nanoseconds = round(found.prediction.step_seconds / TICK_SECONDS)
    assert nanoseconds <= min(fitting, default=nanoseconds)


@settings(max_examples=40)
@given(tight_instances())
def test_plan_of_searched_cuts_is_the_optimum(
    case: tuple[Instance, list[Priced]],
) -> None:
    """With schedules whose cuts are all evaluated, the plan takes exactly the least time of all that fit."""
    instance, priced = case
    wishes = {**instance.job.constraints, "schedule": PARTITIONED}
    step = instance.job.model_copy(update={"constraints": wishes})
    found = answer(Instance(instance.profile, instance.cluster, step), top=0)
    fitting = [
        one.nanoseconds
        for one in priced
        if one.peak <= memory_of(instance) and one.layout.schedule in PARTITIONED
    ]
    if not fitting:
        assert isinstance(found, Infeasible)
        return
    assert isinstance(found, Plan)
    if found.layout.has_uneven_shares:
        least = min(fitting) * TICK_SECONDS
        assert found.prediction.step_seconds <= least * (1 + 1e-12)
        return
    assert found.prediction.step_seconds == pytest.approx(
        min(fitting) * TICK_SECONDS, rel=1e-12
    )


def predicted_seconds(instance: Instance, one: Alternative) -> float:
    """The step that `predict` gives for an alternative's layout and cut."""
    layout = PredictionLayout(
        **one.layout.model_dump(), layers_per_stage=one.layers_per_stage
    )
    found = predict(instance.profile, instance.cluster, instance.job, layout)
    return found.prediction.step_seconds


@settings(max_examples=20)
@given(tight_instances())
def test_alternatives_are_real(case: tuple[Instance, list[Priced]]) -> None:
    """Every alternative is the step and memory of a partition of its own layout that fits, and they come in order.

    `predict`, which chooses what recomputes, is no slower for its layout and cut.
    """
    instance, priced = case
    found = answer(instance, top=3)
    if isinstance(found, Infeasible):
        return
    every = [found.layout, *(one.layout for one in found.alternatives)]
    plain = [asked(one) for one in every]
    assert len(set(map(canonical_json, plain))) == len(plain)
    for layout, one in zip(plain[1:], found.alternatives, strict=True):
        same = [
            each
            for each in priced
            if each.layout == layout and each.layers_per_stage == one.layers_per_stage
        ]
        figures = round(one.step_seconds / TICK_SECONDS), one.peak_bytes
        if layout.schedule in PARTITIONED and same:
            assert figures in {(each.nanoseconds, each.peak) for each in same}
        assert one.peak_bytes <= memory_of(instance)
        predicted = predicted_seconds(instance, one)
        assert predicted <= one.step_seconds * (1 + 1e-9)
    steps = [
        found.prediction.step_seconds,
        *(one.step_seconds for one in found.alternatives),
    ]
    assert steps == sorted(steps)


@settings(max_examples=15)
@given(tight_instances())
def test_misses_are_the_least_memory_of_their_layouts(
    case: tuple[Instance, list[Priced]],
) -> None:
    """A miss needs no more than any stage map of its layout, exactly the least of those that are searched, and the
    nearest comes first."""
    instance, priced = case
    tightest = with_memory(
        instance, max(1, min((one.peak for one in priced), default=2) - 1)
    )
    found = answer(tightest)
    assert isinstance(found, Infeasible)
    for miss in found.nearest:
        same = [one.peak for one in priced if one.layout == asked(miss.layout)]
        assert miss.needed_bytes <= min(same, default=miss.needed_bytes)
        is_searched = miss.layout.schedule in PARTITIONED
        if same and is_searched and not miss.layout.has_uneven_shares:
            assert miss.needed_bytes == min(same)
        assert miss.missing_bytes == miss.needed_bytes - memory_of(tightest) > 0
    misses = [miss.missing_bytes for miss in found.nearest]
    assert misses == sorted(misses)


@settings(max_examples=40)
@given(st.data())
def test_cost_model_and_validator_agree(data: st.DataObject) -> None:
    """Two programs written from the same equations give the same nanoseconds and bytes for any stage map."""
    instance = data.draw(instances())
    possible = list(layouts(instance.profile, instance.cluster, instance.job))
    if not possible:
        return
    layout = data.draw(st.sampled_from(possible))
    costs = layout_costs(
        workload(instance.profile, instance.cluster, instance.job), layout
    )
    schedule = schedule_of(costs)
    for one in price(facts(instance.profile, instance.cluster, instance.job, layout)):
        stages = choose(costs, one.stage_map)
        memory = stage_memory(costs, stages, schedule)
        assert evaluate(costs, schedule, stages).total_ticks == one.nanoseconds
        assert tuple(row.peak_bytes for row in memory) == one.peaks
