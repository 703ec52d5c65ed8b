"""Synthesised orders are valid, within the memory limit, proven, and never worse than a canonical schedule."""

from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import LayoutError, ScheduleError
from planner.schedule import Action, ActionKind, Durations, Schedule, build, in_flight, simulate
from planner.schedule.synthesize import Synthesis, synthesize

SLOW_SECOND_STAGE = Durations(
    forward=(10, 15, 10, 10),
    backward_input=(12, 18, 12, 12),
    backward_weight=(8, 12, 8, 8),
    transfer_forward=(1, 1, 1),
    transfer_backward=(1, 1, 1),
)


def found(durations: Durations, **options: int) -> Synthesis:
    """A synthesis that has a result."""
    made = synthesize(durations, **options)  # type: ignore[arg-type]
    assert made is not None
    return made


def test_an_uneven_pipeline() -> None:
    """Stage 1 is 1.5 times slower: 374 is optimal, where the best canonical schedule takes 389."""
    made = found(SLOW_SECOND_STAGE, ranks=4, micro_batches=8, memory_limit=4)
    assert (made.simulation.makespan, made.lower_bound, made.optimal) == (374, 374, True)
    assert (made.canonical, made.canonical_makespan) == ("zb-h1", 389)
    assert max(made.simulation.peak_in_flight) <= 4


def test_the_same_order_every_time() -> None:
    """The search is deterministic."""
    once, again = (found(SLOW_SECOND_STAGE, ranks=4, micro_batches=8, memory_limit=4) for _ in range(2))
    assert once.schedule == again.schedule


def test_every_kind_runs_in_micro_batch_order() -> None:
    """The runtime counts losses by the last stage's forwards, so they come in order; so do all others."""
    made = found(SLOW_SECOND_STAGE, ranks=4, micro_batches=8, memory_limit=5)
    for stage, kind in product(range(4), ActionKind):
        units = [each.micro_batch for each in made.schedule.actions[stage] if each.kind is kind]
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
    third = Durations.uniform(2, forward=1 / 3, backward_input=2 / 7, backward_weight=1e-9 + 1 / 11)
    made = found(third, ranks=2, micro_batches=4)
    assert made.lower_bound <= made.simulation.makespan
    assert made.gap < 1e-4


def least_makespan(durations: Durations, micro_batches: int, limit: int) -> float:
    """Brute force over two ranks: every order of the first rank with every order of the second."""

    def orders(stage: int) -> list[tuple[Action, ...]]:
        def extend(done: tuple[Action, ...], counts: tuple[int, int, int]) -> list[tuple[Action, ...]]:
            forwards, inputs, weights = counts
            if weights == micro_batches:
                return [done]
            kinds = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
            may = (forwards < micro_batches, inputs < forwards, weights < inputs)
            rows = []
            for index, (kind, allowed) in enumerate(zip(kinds, may, strict=True)):
                if allowed:
                    following = tuple(count + (at == index) for at, count in enumerate(counts))
                    rows += extend((*done, Action(stage, kind, counts[index])), following)  # type: ignore[arg-type]
            return rows

        return extend((), (0, 0, 0))

    least = float("inf")
    for rows in product(orders(0), orders(1)):
        schedule = Schedule("any", 2, micro_batches, 1, 1, (0, 1), rows)
        if max(in_flight(schedule)) <= limit:
            with suppress(ScheduleError):  # orders that dead-lock are no orders
                least = min(least, simulate(schedule, durations).makespan)
    return least


@settings(max_examples=12, deadline=None)
@given(st.data(), st.integers(1, 2), st.integers(1, 3))
def test_brute_force_agrees(data: st.DataObject, micro_batches: int, limit: int) -> None:
    """On two ranks no order is shorter than the one that is called optimal."""
    times = st.tuples(st.integers(1, 5), st.integers(1, 5))
    link = st.tuples(st.integers(0, 2))
    durations = Durations(
        *(data.draw(times) for _ in range(3)),
        transfer_forward=data.draw(link),
        transfer_backward=data.draw(link),
    )
    made = found(durations, ranks=2, micro_batches=micro_batches, memory_limit=limit)
    assert made.optimal
    assert made.simulation.makespan == least_makespan(durations, micro_batches, limit)


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))
def test_never_worse_than_canonical(data: st.DataObject, ranks: int, micro_batches: int, limit: int) -> None:
    """Within the limit, no schedule of the catalogue is faster, even after hardly any time."""
    times = st.tuples(*[st.integers(1, 9)] * ranks)
    durations = Durations(*(data.draw(times) for _ in range(3)))
    made = synthesize(durations, ranks=ranks, micro_batches=micro_batches, memory_limit=limit, time_limit_seconds=0.2)
    assert made is not None
    assert max(made.simulation.peak_in_flight) <= limit
    assert made.lower_bound <= made.simulation.makespan
    for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"):
        try:
            canonical = simulate(build(name, ranks=ranks, micro_batches=micro_batches), durations)
        except LayoutError:
            continue
        if max(canonical.peak_in_flight) <= limit:
            assert made.simulation.makespan <= canonical.makespan


def test_uneven_stages_in_a_v() -> None:
    """Two stages per rank in a V: no worse than ZB-V, within its memory."""
    durations = Durations((5, 8, 5, 5), (6, 9, 6, 6), (4, 6, 4, 4))
    made = found(durations, ranks=2, micro_batches=4, virtual_stages=2, memory_limit=4, time_limit_seconds=3)
    canonical = simulate(build("zb-v", ranks=2, micro_batches=4), durations)
    assert made.schedule.stage_ranks == (0, 1, 1, 0)
    assert made.simulation.makespan <= canonical.makespan
    assert max(made.simulation.peak_in_flight) <= 4


def test_a_limit_below_one_unit_per_stage() -> None:
    """A rank with two stages holds two units of one micro-batch at once: no order keeps a limit of 1."""
    assert synthesize(Durations.uniform(4), ranks=2, micro_batches=4, virtual_stages=2, memory_limit=1) is None


def test_durations_of_other_stages() -> None:
    """The numbers of stages must agree."""
    with pytest.raises(LayoutError, match="3 stages and 1 sequence chunks for 2"):
        synthesize(Durations.uniform(3), ranks=2, micro_batches=2)
