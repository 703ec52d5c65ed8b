"""Synthesised orders are valid, within the memory limit, proven, and never worse than a canonical schedule."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.schedule import (
    ActionKind,
    Durations,
    Objective,
    Placement,
    build,
    simulate,
)
from planner.schedule.room import Room
from planner.schedule.synthesize import Synthesis, best_shape, synthesize
from tests.schedule.orders import simulated_orders

SLOW_SECOND_STAGE = Durations(
    forward=(10, 15, 10, 10),
    backward_input=(12, 18, 12, 12),
    backward_weight=(8, 12, 8, 8),
    transfer_forward=(1, 1, 1),
    transfer_backward=(1, 1, 1),
)


def found(durations: Durations, **options: Any) -> Synthesis:
    """A synthesis that has a result."""
    made = synthesize(durations, **options)
    assert made is not None
    return made


def test_an_uneven_pipeline() -> None:
    """Stage 1 is 1.5 times slower: 374 is optimal, where the best canonical schedule takes 389."""
    made = found(SLOW_SECOND_STAGE, ranks=4, micro_batches=8, memory_limit=4)
    assert (made.simulation.makespan, made.lower_bound, made.optimal) == (
        374,
        374,
        True,
    )
    assert (made.canonical, made.canonical_value) == ("zb-h1", 389)
    assert max(made.simulation.peak_in_flight) <= 4


def test_the_same_order_every_time() -> None:
    """The search is deterministic."""
    once, again = (
        found(SLOW_SECOND_STAGE, ranks=4, micro_batches=8, memory_limit=4)
        for _ in range(2)
    )
    assert once.schedule == again.schedule


def test_every_kind_runs_in_micro_batch_order() -> None:
    """The runtime counts losses by the last stage's forwards, so they come in order; so do all others."""
    made = found(SLOW_SECOND_STAGE, ranks=4, micro_batches=8, memory_limit=5)
    for stage, kind in product(range(4), ActionKind):
        units = [
            each.micro_batch
            for each in made.schedule.actions[stage]
            if each.kind is kind
        ]
        assert units == sorted(units)


def test_exact_fractions() -> None:
    """Decimal durations are scaled to whole ticks, and the optimum with them."""
    tenths = Durations(
        *(
            tuple(value / 10 for value in getattr(SLOW_SECOND_STAGE, name))
            for name in ("forward", "backward_input", "backward_weight", "recompute")
        ),
        transfer_forward=(0.1,) * 3,
        transfer_backward=(0.1,) * 3,
    )
    made = found(tenths, ranks=4, micro_batches=8, memory_limit=4)
    assert made.simulation.makespan == pytest.approx(37.4)
    assert made.optimal


def test_rounded_durations_keep_the_bound() -> None:
    """Durations that are no multiple of any sensible tick: the bound stays below the makespan, and close."""
    third = Durations.uniform(
        2, forward=1 / 3, backward_input=2 / 7, backward_weight=1e-9 + 1 / 11
    )
    made = found(third, ranks=2, micro_batches=4)
    assert made.lower_bound <= made.simulation.makespan
    assert made.gap < 1e-4


@settings(max_examples=12, deadline=None)
@given(
    st.data(),
    st.sampled_from(
        [
            (2, 2, 1, 1),
            (2, 1, 1, 2),
            (2, 1, 2, 1),
            (3, 1, 1, 1),
            (1, 2, 1, 1),
            (1, 1, 2, 1),
        ]
    ),
    st.integers(1, 3),
    st.sampled_from(Objective),
    st.sampled_from(Placement),
)
def test_brute_force_agrees(
    data: st.DataObject,
    numbers: tuple[int, int, int, int],
    limit: int,
    objective: Objective,
    placement: Placement,
) -> None:
    """No order is better than the one that is called optimal, micro-batches out of turn included."""
    ranks, micro_batches, virtual, chunks = numbers
    shape = best_shape(ranks, micro_batches, virtual, chunks, placement)
    times = st.tuples(*[st.integers(1, 5)] * (shape.stages * chunks))
    link = st.tuples(*[st.integers(0, 2)] * (shape.stages - 1))
    durations = Durations(
        *(data.draw(times) for _ in range(3)),
        transfer_forward=data.draw(link),
        transfer_backward=data.draw(link),
        sequence_chunks=chunks,
    )
    made = synthesize(
        durations,
        ranks=ranks,
        micro_batches=micro_batches,
        virtual_stages=virtual,
        sequence_chunks=chunks,
        placement=placement,
        objective=objective,
        memory_limit=limit,
    )
    orders = simulated_orders(shape, durations, Room.of_units(shape, limit))
    least = min(map(objective.of, orders), default=None)
    if made is None or least is None:
        assert made is None
        assert least is None
        return
    assert made.lower_bound <= least <= made.value
    assert (
        made.optimal or objective is Objective.SPAN
    )  # a rank may start late for its span; simulations start early


def test_the_least_span() -> None:
    """Stage 1 is 1.5 times slower, no barrier between steps: 363 within 1F1B's memory, 360 within ZB-H2's."""
    for limit, span, canonical in ((4, 363, ("zb-h1", 386)), (7, 360, ("zb-h2", 360))):
        made = found(
            SLOW_SECOND_STAGE,
            ranks=4,
            micro_batches=8,
            memory_limit=limit,
            objective=Objective.SPAN,
        )
        assert (made.simulation.span, made.lower_bound, made.optimal) == (
            span,
            span,
            True,
        )
        assert (made.canonical, made.canonical_value) == canonical


@pytest.mark.parametrize(("limit", "canonical"), [(4, "zb-h1"), (7, "zb-h2")])
def test_equal_stages_need_no_search(limit: int, canonical: str) -> None:
    """ZB-H1 and ZB-H2 are the best orders of equal stages within their memory, in makespan and in span."""
    durations = Durations.uniform(
        4, forward=10, backward_input=12, backward_weight=8, transfer=2
    )
    for objective in Objective:
        made = found(
            durations, ranks=4, micro_batches=8, memory_limit=limit, objective=objective
        )
        assert made.optimal
        assert (made.canonical, made.canonical_value) == (canonical, made.value)


def test_sequence_chunks() -> None:
    """Chunks that grow, as under causal attention: better than SeqPipe, within its memory, backwards in reverse."""
    forward = (4, 6, 6, 9, 4, 6)
    durations = Durations(forward, forward, forward, sequence_chunks=2)
    canonical = simulate(
        build("seqpipe", ranks=3, micro_batches=4, sequence_chunks=2), durations
    )
    made = found(
        durations,
        ranks=3,
        micro_batches=4,
        sequence_chunks=2,
        memory_limit=4,
        time_limit_seconds=3,
    )
    assert (made.canonical, made.canonical_value) == ("seqpipe", canonical.makespan)
    assert made.simulation.makespan < canonical.makespan
    assert max(made.simulation.peak_in_flight) <= max(canonical.peak_in_flight) == 4


def test_stages_in_a_loop() -> None:
    """On Megatron's placement the canonical orders are those of interleaved 1F1B and its kin."""
    options = {"ranks": 2, "micro_batches": 4, "virtual_stages": 2, "memory_limit": 5}
    made = found(Durations.uniform(4), placement=Placement.LOOP, **options)
    assert made.schedule.stage_ranks == (0, 1, 0, 1)
    canonical = simulate(
        build("interleaved-1f1b", ranks=2, micro_batches=4, virtual_stages=2),
        Durations.uniform(4),
    )
    assert max(canonical.peak_in_flight) <= 5
    assert made.simulation.makespan <= canonical.makespan


def test_pairs_are_not_searched() -> None:
    """What a pair would save is refused, not forgotten."""
    with pytest.raises(LayoutError, match="pairs no actions"):
        synthesize(Durations.uniform(2, overlap=1), ranks=2, micro_batches=2)


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))
def test_never_worse_than_canonical(
    data: st.DataObject, ranks: int, micro_batches: int, limit: int
) -> None:
    """Within the limit, no schedule of the catalogue is faster, even after hardly any time."""
    times = st.tuples(*[st.integers(1, 9)] * ranks)
    durations = Durations(*(data.draw(times) for _ in range(3)))
    made = synthesize(
        durations,
        ranks=ranks,
        micro_batches=micro_batches,
        memory_limit=limit,
        time_limit_seconds=0.2,
    )
    assert made is not None
    assert max(made.simulation.peak_in_flight) <= limit
    assert made.lower_bound <= made.simulation.makespan
    for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"):
        try:
            canonical = simulate(
                build(name, ranks=ranks, micro_batches=micro_batches), durations
            )
        except LayoutError:
            continue
        if max(canonical.peak_in_flight) <= limit:
            assert made.simulation.makespan <= canonical.makespan


def test_uneven_stages_in_a_v() -> None:
    """Two stages per rank in a V: no worse than ZB-V, within its memory."""
    durations = Durations((5, 8, 5, 5), (6, 9, 6, 6), (4, 6, 4, 4))
    made = found(
        durations,
        ranks=2,
        micro_batches=4,
        virtual_stages=2,
        memory_limit=4,
        time_limit_seconds=3,
    )
    canonical = simulate(build("zb-v", ranks=2, micro_batches=4), durations)
    assert made.schedule.stage_ranks == (0, 1, 1, 0)
    assert made.simulation.makespan <= canonical.makespan
    assert max(made.simulation.peak_in_flight) <= 4


def test_a_limit_below_one_unit_per_stage() -> None:
    """A rank with two stages holds two units of one micro-batch at once: no order keeps a limit of 1."""
    assert (
        synthesize(
            Durations.uniform(4),
            ranks=2,
            micro_batches=4,
            virtual_stages=2,
            memory_limit=1,
        )
        is None
    )


def test_durations_of_other_stages() -> None:
    """The numbers of stages must agree."""
    with pytest.raises(LayoutError, match="3 stages for a schedule of 2"):
        synthesize(Durations.uniform(3), ranks=2, micro_batches=2)
