"""Bounds that know transfers and memory, against every stage map of a layout, priced by the validator's equations."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.cost import layout_costs, workload
from planner.search.bounds.layout import BOUNDED
from planner.search.bounds.loads import bound_of, portions, priced_bound
from planner.search.layouts.space import Family, space_of
from planner.search.stage_maps.inside import NO_LIMIT, LayoutSearch, solve_layout
from planner.search.stage_maps.segments import choices
from planner.spec import Cluster, Job, Layout, ModelProfile, NodeGroup
from tests.brute_force_mixed import layouts, price_layout
from tests.builders import Draft, job, link, profile
from tests.check.mixed import as_counted, group

_BYTES_PER_SECOND = 1.0e9 + 7
_ROOM = 10**12


@dataclass(frozen=True)
class Case:
    """A layout of different layers on different devices that hold just what some stage map of it needs."""

    profile: ModelProfile
    cluster: Cluster
    job: Job
    layout: Layout
    nanoseconds: int
    """Of its fastest stage map that fits."""


def _layer(draw: random.Random) -> Draft:
    """Milliseconds forward and megabytes saved, each its own."""
    return Draft(
        forward=draw.uniform(0.5e-3, 3e-3),
        flops=draw.randint(50, 300) * 10**9,
        backward_input=1e-3,
        backward_weight=1e-3,
        parameters=draw.randint(1, 100) * 1000,
        activation=draw.randint(100, 900) * 1001,
        kept=draw.randint(1, 90) * 1001,
        output=draw.randint(1, 900) * 1003,
        temporary=draw.randint(1, 90) * 1000,
        modes=("none", "full"),
    )


def _layouts_of(part: Family) -> list[Layout]:
    return [
        part.layout(zero, order, rank_order)
        for zero, rank_order in part.ways
        for order in part.orders
    ]


def _sized(one: NodeGroup, memory_bytes: int) -> NodeGroup:
    assert not isinstance(one.device, str)
    return one.model_copy(
        update={"device": one.device.model_copy(update={"memory_bytes": memory_bytes})}
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to five layers with skips on two or three groups of devices, up to twelve micro-batches."""
    dice = random.Random(draw(st.integers(0, 10**9)))
    count = dice.choice((3, 4, 5))
    pairs = [
        sorted(dice.sample(range(count), 2)) for _ in range(dice.choice((0, 1, 2)))
    ]
    edges = [(first, last, dice.randint(1, 900) * 1003) for first, last in pairs]
    model = as_counted(
        profile(
            [_layer(dice) for _ in range(count)], sizes=(1,), degrees=(1,), edges=edges
        )
    )
    groups = tuple(
        group(
            dice.choice((1.0, 1.7, 3.1)),
            devices=dice.choice((1, 1, 2)),
            inter=link(dice.choice((1, 3)) * _BYTES_PER_SECOND, 1e-6),
            memory_bytes=_ROOM,
            reserved_bytes=0,
        )
        for _ in range(dice.choice((2, 2, 3)))
    )
    step = job(dice.choice((2, 4, 7, 12)), optimizer="adam")
    several = [
        (layout, rows)
        for layout, rows in layouts(model, Cluster(node_groups=groups), step)
        if layout.pipeline_parallel_degree > 1 and layout.schedule in BOUNDED
    ]
    assume(several)
    layout, rows = dice.choice(several)
    if layout.micro_batch_shares is None and len(set(rows)) == 1:
        layout = layout.model_copy(update={"recompute": "per-layer"})
    elif len(set(layout.micro_batch_shares or ())) == 1:
        layout = layout.model_copy(update={"micro_batch_shares": None})
    priced = list(price_layout(model, Cluster(node_groups=groups), step, layout))
    fullest = dice.choice(priced).peaks
    sized = Cluster(
        node_groups=tuple(
            _sized(each, fullest[place]) for place, each in enumerate(groups)
        )
    )
    return Case(
        model,
        sized,
        step,
        layout,
        min(one.nanoseconds for one in priced if one.fits(fullest)),
    )


@settings(max_examples=20)
@given(cases())
def test_no_bound_is_above_the_fastest_stage_map_that_fits(case: Case) -> None:
    """Neither that of a family before it is priced, nor that of a layout, nor that of its segments; the search inside
    the layout finds the stage map, whether it knows of a limit just above or not."""
    work = workload(case.profile, case.cluster, case.job)
    costs = layout_costs(work, case.layout)
    modes = choices(costs, ("per-layer",))
    assert priced_bound(costs, modes, NO_LIMIT) <= case.nanoseconds
    parts = [
        part
        for family in space_of(work).families
        for part in portions(work, family, NO_LIMIT)
    ]
    own = [bound for bound, part in parts if case.layout in _layouts_of(part)]
    again = [
        bound_of(work, part, case.nanoseconds + 1)
        for _, part in parts
        if part.ways_before is not None
        and not part.is_dealt
        and case.layout in _layouts_of(part)
    ]
    assert max(again, default=0) <= case.nanoseconds
    assert (
        max(own, default=0) <= case.nanoseconds
    )  # none where another order of the node groups stands for this one
    search = LayoutSearch(costs, modes)
    search.start()
    assert search.bound <= case.nanoseconds
    search.narrow()
    assert search.bound <= case.nanoseconds
    assert search.judged is not None
    assert search.judged[1].total_ticks >= case.nanoseconds
    for limit in (NO_LIMIT, case.nanoseconds + 1):
        found = solve_layout(costs, modes, limit_ticks=limit, seconds_left=lambda: 60.0)
        assert found.step is not None
        assert found.step.total_ticks == case.nanoseconds
