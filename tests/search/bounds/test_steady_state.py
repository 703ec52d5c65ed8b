"""What a short schedule tells about a long one is never more than what the long one takes, and mostly just that."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import LayoutCosts, StageMap, choose, evaluate, layout_costs
from planner.cost.workload import workload
from planner.schedule import build, find
from planner.schedule.in_flight import in_flight_vectors
from planner.search.bounds.steady_state import short_of, steady_ticks
from planner.search.layouts.orders import DEALT
from planner.search.stage_maps.dealt import layout_schedule
from planner.spec.layout import Layout
from tests import builders

REPEATING = tuple(name for name in DEALT if name not in ("looped-bfs", "zb-h1-fused"))
"""Whose rows for more micro-batches are those for fewer with periods put in. looped-bfs runs all forwards first, and
zb-h1-fused ends with weight gradients of its first micro-batches."""
TIMES = (1e-3, 2e-3, 3e-3)


def virtual_stages(name: str) -> list[int]:
    """Stages of a rank that a schedule takes, of one to four."""
    return [
        count
        for count in range(1, 5)
        if find(name).takes_virtual_stages(count) and (count != 3 or name != "hanayo")
    ]


def priced(
    name: str, ranks: int, rounds: int, drafts: list[builders.Draft], sizes: list[int]
) -> LayoutCosts:
    """A pipeline of so many micro-batches per rank."""
    machines = builders.cluster(
        ranks, intra=builders.link(20e9, 1e-5), memory_bytes=10**15
    )
    work = workload(builders.profile(drafts), machines, builders.job(ranks * rounds))
    layout = Layout(
        pipeline_parallel_degree=ranks,
        virtual_stages_per_rank=len(sizes) // ranks,
        micro_batch_size=1,
        schedule=name,
        recompute="none",
    )
    return layout_costs(work, layout)


def staged(sizes: list[int]) -> StageMap:
    """Stages of so many layers, of which none recomputes."""
    layers = iter(range(sum(sizes)))
    return tuple(tuple((next(layers), "none") for _ in range(size)) for size in sizes)


def both(costs: LayoutCosts, sizes: list[int]) -> tuple[int, int]:
    """The bound (E11), and what the step takes."""
    stages = choose(costs, staged(sizes))
    return steady_ticks(costs, stages), evaluate(
        costs, layout_schedule(costs), stages
    ).total_ticks


@settings(max_examples=60)
@given(st.data())
def test_no_step_is_faster_than_its_steady_state(data: st.DataObject) -> None:
    """(E11), with layers of any times."""
    name, ranks = data.draw(st.sampled_from(DEALT)), data.draw(st.integers(2, 4))
    virtual = data.draw(st.sampled_from(virtual_stages(name)))
    sizes = data.draw(
        st.lists(st.integers(1, 2), min_size=ranks * virtual, max_size=ranks * virtual)
    )
    times = st.sampled_from(TIMES) | st.floats(1e-4, 1e-2)
    drafts = [
        builders.Draft(
            forward=data.draw(times),
            backward_input=data.draw(times),
            backward_weight=data.draw(times),
            output=data.draw(st.sampled_from((0, 10**6, 10**8))),
        )
        for _ in range(sum(sizes))
    ]
    bound, ticks = both(
        priced(name, ranks, data.draw(st.integers(6, 12)), drafts, sizes), sizes
    )
    assert bound <= ticks


@pytest.mark.parametrize("name", REPEATING)
def test_stages_that_wait_for_each_other_are_bounded_by_their_pace(name: str) -> None:
    """The ranks' stages of one round differ: every repeating schedule's bound is all that its step takes."""
    virtual = virtual_stages(name)[-1]
    sizes = [1 + (stage % 3 == 0) for stage in range(4 * virtual)]
    drafts = [
        builders.Draft(
            forward=1e-3, backward_input=1e-3, backward_weight=1e-3, output=10**6
        )
    ] * sum(sizes)
    bound, ticks = both(priced(name, 4, 20, drafts, sizes), sizes)
    assert bound == ticks


@pytest.mark.parametrize("name", REPEATING)
@pytest.mark.parametrize(("ranks", "more"), [(2, 0), (3, 1), (4, 0)])
def test_ranks_hold_the_same_of_few_micro_batches_and_of_many(
    name: str, ranks: int, more: int
) -> None:
    """(E12): whenever they may hold most."""
    for virtual in virtual_stages(name):
        if more and virtual > 1:  # only some schedules take what does not divide
            continue
        short = short_of(name, ranks, 9 * ranks + more, virtual)
        assert short is not None
        long = build(
            name, ranks=ranks, micro_batches=9 * ranks + more, virtual_stages=virtual
        )
        assert in_flight_vectors(short.schedule) == in_flight_vectors(long)


@pytest.mark.parametrize(("name", "rounds"), [("looped-bfs", 20), ("zb-h1", 5)])
def test_what_repeats_nothing_or_too_little_is_not_bounded(
    name: str, rounds: int
) -> None:
    """All forwards come first, or the step is hardly longer than the short one."""
    sizes = [1] * 4
    drafts = [
        builders.Draft(forward=1e-3, backward_input=1e-3, backward_weight=1e-3)
    ] * 4
    assert both(priced(name, 4, rounds, drafts, sizes), sizes)[0] == 0
