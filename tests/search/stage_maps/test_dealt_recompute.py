"""The rule by which dealt layouts recompute layer by layer, its bounds, and what it gains."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.cost import choose, evaluate, layout_costs, stage_memory, workload
from planner.errors import UnsupportedError
from planner.search import plan, predict
from planner.search.bounds.first_gradient import layout_first_gradients
from planner.search.bounds.layout import Totals, any_order_bound
from planner.search.layouts.space import layouts
from planner.search.stage_maps.dealt import (
    layout_held,
    layout_schedule,
    layout_traits,
    ranks_of,
)
from planner.search.stage_maps.dealt_recompute import PerLayer, fewest_modes, in_parts
from planner.search.stage_maps.recompute import Held, fewest_ticks
from planner.search.stage_maps.segments import allowed_modes
from planner.spec import Plan
from planner.spec.layout import PredictionLayout
from tests.brute_force import is_ruled
from tests.builders import cluster, job, layer, profile, request
from tests.search.test_brute_force import tight_instances
from tests.strategies import Instance

MODE = st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 5))
FALLING = st.lists(MODE, min_size=1, max_size=3).map(
    lambda modes: tuple(sorted(modes, reverse=True))
)


@st.composite
def ranks_of_stages(draw: st.DrawFn) -> Held:
    """Up to three stages of up to three layers, of a few kinds."""
    kinds = draw(
        st.lists(
            st.one_of(FALLING, st.lists(MODE, min_size=1, max_size=3).map(tuple)),
            min_size=1,
            max_size=2,
        )
    )
    count = draw(st.integers(1, 3))
    stages = [
        tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2)))
        for _ in range(count)
    ]
    units = st.integers(0, 4)
    moment = st.tuples(*[units] * count).filter(any)  # some unit is always in flight
    moments = draw(st.lists(moment, min_size=1, max_size=3))
    if draw(st.booleans()):
        moments = [tuple(sorted(moment, reverse=True)) for moment in moments]
    others = tuple(draw(st.integers(0, 3)) for _ in stages)
    return Held(
        tuple(stages),
        tuple(moments),
        draw(st.integers(0, 120)),
        others,
        draw(st.sampled_from((1, 1, 2))),
    )


def fits(held: Held, chosen: list[tuple[tuple[int, int, int], ...]]) -> bool:
    """(R2), term by term."""
    pairs = zip(held.other_bytes, chosen, strict=True)
    units = [
        -(-(own + sum(mode[0] for mode in stage)) // held.chunks)
        for own, stage in pairs
    ]
    largest = max(mode[2] for stage in chosen for mode in stage)
    most = max(
        sum(n * unit for n, unit in zip(moment, units, strict=True))
        for moment in held.moments
    )
    return most + largest <= held.room_bytes


def lower(held: Held, stages: tuple[tuple[int, ...], ...]) -> int:
    """What (R4) makes least."""
    pairs = enumerate(zip(held.stages, stages, strict=True))
    kinds = [
        (place, kind, index)
        for place, each in pairs
        for kind, index in zip(*each, strict=True)
    ]
    return sum(
        place
        * sorted((-mode[0], number) for number, mode in enumerate(kind)).index(
            (-kind[index][0], index)
        )
        for place, kind, index in kinds
    )


@settings(max_examples=150)
@given(ranks_of_stages())
def test_no_choice_that_fits_takes_less(held: Held) -> None:
    """(R1) to (R5) against every combination of modes: the least ticks, of the lower stages where there are several."""
    every = []
    for stages in product(
        *(product(*(range(len(kind)) for kind in stage)) for stage in held.stages)
    ):
        pairs = zip(held.stages, stages, strict=True)
        modes = [
            tuple(kind[place] for kind, place in zip(*each, strict=True))
            for each in pairs
        ]
        if fits(held, modes):
            every.append(
                (sum(mode[1] for stage in modes for mode in stage), lower(held, stages))
            )
    found = fewest_ticks(held)
    if found is None:
        assert not every
        return
    ticks, stages = found
    assert (ticks, lower(held, stages)) == min(every)
    pairs = zip(held.stages, stages, strict=True)
    assert fits(
        held,
        [
            tuple(kind[place] for kind, place in zip(*each, strict=True))
            for each in pairs
        ],
    )


@settings(max_examples=20)
@given(tight_instances())
def test_bounds_of_layouts_by_the_rule_are_admissible(
    case: tuple[Instance, object],
) -> None:
    """No layout whose layers recompute by the rule fits, and is faster than (B6) and (E8) to (E10) say."""
    work = workload(case[0].profile, case[0].cluster, case[0].job)
    for layout in filter(is_ruled, layouts(work)):
        costs = layout_costs(work, layout)
        modes, ranks, schedule = (
            allowed_modes(costs, ("per-layer",)),
            ranks_of(costs),
            layout_schedule(costs),
        )
        layers = PerLayer.of(costs, modes)
        sizes = layers.dealt(ranks)
        stage_map = fewest_modes(costs, layers, sizes, schedule)
        first = layout_first_gradients(costs)
        least = layers.least_ticks(
            sizes, ranks, layout_traits(costs), layout_held(costs), first
        )
        if stage_map is None:
            continue
        stages = choose(costs, stage_map)
        ticks = evaluate(costs, schedule, stages).total_ticks
        assert all(row.fits for row in stage_memory(costs, stages, schedule))
        assert least is not None
        assert least <= ticks
        assert (
            any_order_bound(
                costs, Totals.of(costs, modes), (1,) * layout.pipeline_parallel_degree
            )
            <= ticks
        )


def test_work_is_told_in_parts_of_the_longest_layer() -> None:
    """(E6): 32 parts, rounded up, and exactly 32 of the longest, however long it is."""
    assert in_parts((3, 96, 0, 97)) == (1, 32, 0, 32)
    assert in_parts((10**15, 1)) == (32, 1)


WIDE = profile(
    layer(activation=1_000_000, kept=1000, modes=("none", "full"), recompute=5e-6) * 8
)
LOOP = {
    "schedule": "interleaved-1f1b",
    "virtual_stages_per_rank": 2,
    "pipeline_parallel_degree": 2,
}


def recomputed(memory_bytes: int, **layout: object) -> list[int]:
    """Layers of every stage that recompute, with devices of this size."""
    wanted = PredictionLayout(**LOOP, recompute="per-layer", **layout)  # type: ignore[arg-type]
    told = predict(WIDE, cluster(2, memory_bytes=memory_bytes), job(8), wanted)
    assert told.fits
    return [
        sum(one.recompute == "full" for one in stage.layers) for stage in told.stages
    ]


def test_as_few_layers_recompute_as_the_memory_asks() -> None:
    """Two ranks of two stages: none with room, then of the first rank, which holds more, in its first stage."""
    assert recomputed(100_000_000) == [0, 0, 0, 0]
    assert recomputed(9_000_000) == [1, 0, 0, 0]
    assert recomputed(6_000_000) == [2, 0, 0, 0]
    assert recomputed(3_000_000) == [2, 2, 1, 0]
    assert recomputed(6_000_000, layers_per_stage=(1, 2, 3, 2)) == [1, 0, 1, 0]


def test_search_finds_it_and_the_validator_agrees() -> None:
    """The best interleaved plan of equal stages recomputes some layers on a tight device, and `predict` gives the same
    for its layout; a job that wants all layers alike gets a slower one."""
    fields = {**LOOP, "micro_batch_size": 1, "layers_per_stage": (2, 2, 2, 2)}
    found = plan(
        request(WIDE, cluster(2, memory_bytes=9_000_000), job(8, **fields)), WIDE
    )
    assert isinstance(found, Plan)
    assert (found.layout.recompute, found.search.optimal) == ("per-layer", True)
    assert check(found, WIDE).problems == ()
    told = predict(
        WIDE,
        found.cluster,
        found.request.job,
        PredictionLayout(**found.layout.model_dump()),
    )
    assert told.prediction.step_seconds == found.prediction.step_seconds
    for expected, stage in zip(told.stages, found.stages, strict=True):
        modes = sorted(one.recompute for one in stage.layers)
        assert modes == sorted(one.recompute for one in expected.layers)
    alike = request(WIDE, found.cluster, job(8, **fields, recompute="full"))
    slower = plan(alike, WIDE)
    assert isinstance(slower, Plan)
    assert slower.prediction.step_seconds > found.prediction.step_seconds


@pytest.mark.parametrize(("schedule", "virtual"), [("dualpipe", 1), ("torchgpipe", 1)])
def test_what_the_rule_cannot_choose_is_refused(schedule: str, virtual: int) -> None:
    """Stages on two ranks, and schedules that say themselves which micro-batches recompute."""
    wanted = PredictionLayout(
        schedule=schedule,
        pipeline_parallel_degree=2,
        virtual_stages_per_rank=virtual,
        recompute="per-layer",
    )
    with pytest.raises(UnsupportedError, match="not chosen per layer") as caught:
        predict(WIDE, cluster(2), job(8), wanted)
    assert caught.value.problems[0].field == "layout.recompute"
