"""Orders with tails, with room in bytes and with full backwards: proven, bounded, and never worse than known ones."""

from __future__ import annotations

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
from planner.schedule.order_model import Effort
from planner.schedule.order_problem import OrderProblem
from planner.schedule.room import Room
from planner.schedule.synthesize import best_known, best_order, best_shape
from tests.schedule.orders import fits, simulated_orders

SHORT = Effort(deterministic=0.5)


@st.composite
def problems(
    draw: st.DrawFn, numbers: st.SearchStrategy[tuple[int, int, int]]
) -> OrderProblem:
    """(ranks, micro-batches, stages per rank) with times, sizes, room and tails of every kind."""
    ranks, micro_batches, virtual = draw(numbers)
    shape = best_shape(
        ranks, micro_batches, virtual, placement=draw(st.sampled_from(Placement))
    )

    def several(least: int, most: int, count: int) -> tuple[int, ...]:
        return draw(st.tuples(*[st.integers(least, most)] * count))

    durations = Durations(
        *(several(1, 5, shape.stages) for _ in range(3)),
        recompute=several(0, 3, shape.stages),
        transfer_forward=several(0, 2, shape.stages - 1),
        transfer_backward=several(0, 2, shape.stages - 1),
    )
    return OrderProblem(
        shape=shape,
        durations=durations,
        room=Room(
            several(1, 3, shape.stages), several(1, 4 * virtual * micro_batches, ranks)
        ),
        tails=several(0, 9, ranks),
        is_split=draw(st.booleans()),
        objective=draw(st.sampled_from(Objective)),
    )


@settings(max_examples=8, deadline=None)
@given(
    problems(st.sampled_from([(2, 2, 1), (2, 3, 1), (2, 1, 2), (3, 1, 1), (3, 2, 1)]))
)
def test_brute_force_agrees(problem: OrderProblem) -> None:
    """No order of those that fit is better than the one that is called best, tails included; none is bounded away."""
    # Orders out of turn are no better: tests/schedule/test_synthesize.py looks at all of them.
    orders = list(
        simulated_orders(
            problem.shape, problem.durations, problem.room, problem.kinds, in_turn=True
        )
    )
    known = best_known(problem)
    assert (known is None) == (not orders)
    if known is None:
        return
    least = min(map(problem.of, orders))
    assert problem.bound() <= least
    made = best_order(problem, known, SHORT)
    assert fits(made.schedule, problem.room)
    assert (
        made.lower_bound
        <= least
        <= made.value
        == problem.of(made.simulation)
        <= known.value
    )
    assert (
        made.optimal or problem.objective is Objective.SPAN
    )  # a rank may start late for its span


@settings(max_examples=15, deadline=None)
@given(problems(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 2))))
def test_never_worse_than_what_has_a_name(problem: OrderProblem) -> None:
    """Whatever the room, no schedule of the catalogue that fits is better, and all are above the bound."""
    known = best_known(problem)
    if known is None:
        assert not problem.room.is_enough(problem.shape)
        return
    made = best_order(problem, known, Effort(deterministic=0.02))
    kinds = {action.kind for row in made.schedule.actions for action in row}
    assert problem.is_split or kinds == {ActionKind.FORWARD, ActionKind.BACKWARD}
    numbers = {
        name: getattr(problem.shape, name)
        for name in ("ranks", "micro_batches", "virtual_stages")
    }
    for name in (
        "gpipe",
        "1f1b",
        "eager-1f1b",
        "interleaved-1f1b",
        "hanayo",
        "zb-h1",
        "zb-h2",
        "zb-v",
    ):
        try:
            schedule = build(name, **numbers)
        except LayoutError:
            continue
        is_whole = problem.is_split or not name.startswith("zb")
        if (
            schedule.stage_ranks == problem.shape.stage_ranks
            and is_whole
            and fits(schedule, problem.room)
        ):
            value = problem.of(simulate(schedule, problem.durations))
            assert problem.bound() <= value
            assert made.value <= value


def test_only_what_is_below_matters() -> None:
    """An order that has to be better than the best is not there: the limit is the bound."""
    shape = best_shape(4, 8)
    durations = Durations(
        (10, 15, 10, 10), (12, 18, 12, 12), (8, 12, 8, 8), (), (1,) * 3, (1,) * 3
    )
    problem = OrderProblem(shape, durations, Room.of_units(shape, 4))
    known = best_known(problem)
    assert known is not None
    assert (known.canonical, known.value) == ("zb-h1", 389)
    none = best_order(problem, known, SHORT, below=374)
    assert (none.value, none.lower_bound) == (389, 374)
    one = best_order(problem, known, SHORT, below=375)
    assert (one.value, one.lower_bound) == (374, 374)


def test_an_order_that_needs_no_proof_is_not_searched() -> None:
    """A single rank has nothing to wait for: the bound without a search proves it."""
    shape = best_shape(1, 3)
    known = best_known(
        OrderProblem(shape, Durations.uniform(1), Room.of_units(shape, 1), (5,))
    )
    assert known is not None
    assert known.optimal
    assert known.value == 14


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tails": (1,)}, "tails has 1 values, not 2"),
        ({"room": Room((1,), (1, 1))}, "sizes has 1 values, not 2"),
        ({"room": Room((1, 1), (1,))}, "capacities has 1 values, not 2"),
        ({"durations": Durations.uniform(3)}, "3 stages for a schedule of 2"),
    ],
)
def test_numbers_of_other_stages(changed: dict[str, Any], told: str) -> None:
    """Times, sizes, room and tails are of the same stages and ranks."""
    shape = best_shape(2, 2)
    problem = {
        "shape": shape,
        "durations": Durations.uniform(2),
        "room": Room.of_units(shape, 1),
    }
    with pytest.raises(LayoutError, match=told):
        OrderProblem(**{**problem, **changed})


def test_sizes_are_not_negative() -> None:
    """A unit that frees memory would let any order fit."""
    with pytest.raises(LayoutError, match="not negative, got -1"):
        Room((1, -1), (1, 1))
