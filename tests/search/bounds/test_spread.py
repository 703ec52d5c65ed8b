"""The linear bound of columns whose ranks differ, against the linear programme as GLOP solves it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp

from planner.search.bounds.spread import RankLoad, Spread


@dataclass(frozen=True)
class Column:
    """Pipeline ranks with kinds of layers, and micro-batches."""

    ranks: tuple[RankLoad, ...]
    micro_batches: int

    @property
    def in_flight(self) -> list[int]:
        """Of 1f1b."""
        return [
            min(self.micro_batches, len(self.ranks) - place)
            for place in range(len(self.ranks))
        ]


@st.composite
def columns(draw: st.DrawFn) -> Column:
    """Up to five ranks of different speed and room, layers with one mode or two, memory from ample to too little."""
    drawn = np.random.default_rng(draw(st.integers(0, 10**6)))
    ranks, kinds = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    shape = (kinds, draw(st.integers(1, 2)))
    forward, backward = (
        drawn.integers(1, 10, (kinds, 1)) * np.ones(shape),
        drawn.integers(1, 20, shape),
    )
    ogp, activations = (
        drawn.integers(0, 50, (kinds, 1)) * np.ones(shape),
        drawn.integers(0, 30, shape),
    )
    room = (
        draw(st.sampled_from((0.6, 0.9, 1.2, 2.0, 5.0)))
        * (ogp.sum() + ranks * activations.sum())
        / ranks
    )
    loads = tuple(
        RankLoad(
            speed * forward,
            speed * backward,
            ogp,
            activations,
            int(room * drawn.uniform(0.7, 1.3)) + 1,
        )
        for speed in drawn.choice((1e6, 1.7e6, 3.1e6), ranks)
    )
    return Column(loads, draw(st.sampled_from((1, 3, 8, 64))))


def least_ticks(column: Column) -> float | None:
    """(U1), written out; None: there is no room."""
    count, solver = column.micro_batches, pywraplp.Solver.CreateSolver("GLOP")
    kinds, modes = column.ranks[0].forward.shape
    places = [
        (rank, kind, mode)
        for rank in range(len(column.ranks))
        for kind in range(kinds)
        for mode in range(modes)
    ]
    x = {place: solver.NumVar(0, 1, "") for place in places}
    step = solver.NumVar(0, solver.infinity(), "T")
    for kind in range(kinds):
        solver.Add(sum(part for place, part in x.items() if place[1] == kind) == 1)
    once = sum(
        (column.ranks[p].forward[k, m] + column.ranks[p].backward[k, m]) * x[p, k, m]
        for p, k, m in places
    )
    for rank, (load, units) in enumerate(
        zip(column.ranks, column.in_flight, strict=True)
    ):
        mine = [(x[place], place[1:]) for place in places if place[0] == rank]
        later = [
            (count - units) * load.forward[at] + (count - 1) * load.backward[at]
            for _, at in mine
        ]
        held = [
            load.ogp_bytes[at] + units * load.activation_bytes[at] for _, at in mine
        ]
        solver.Add(
            step
            >= once
            + sum(ticks * part for ticks, (part, _) in zip(later, mine, strict=True))
        )
        solver.Add(
            sum(size * part for size, (part, _) in zip(held, mine, strict=True))
            <= load.room_bytes
        )
    solver.Minimize(step)
    return (
        float(step.solution_value())
        if solver.Solve() == pywraplp.Solver.OPTIMAL
        else None
    )


@given(columns())
def test_bound_is_the_optimum_of_the_linear_programme(column: Column) -> None:
    """Never above it, and no more than a per cent below."""
    wanted = least_ticks(column)
    if wanted is not None:
        bound = Spread.of(column.ranks, column.micro_batches, column.in_flight).bound()
        assert 0.99 * wanted <= bound <= wanted * (1 + 1e-9)


def test_no_step_is_long_enough_where_there_is_no_room() -> None:
    """Twelve bytes of states do not fit two devices of five."""
    layers = np.full((4, 1), 3.0)
    rank = RankLoad(layers, layers, layers, layers, 5)
    assert Spread.of((rank, rank), 4, (2, 1)).bound() > 10**12


def test_what_exceeds_the_limit_is_not_told_more_exactly() -> None:
    """Two equal ranks share 10 ticks: a limit of 3 ends the search for prices early, with a bound of 3 or more."""
    layers = np.full((4, 1), 1e6)
    rank = RankLoad(layers, 1.5 * layers, layers, layers, 10**9)
    spread = Spread.of((rank, rank), 1, (1, 1))
    assert spread.bound() == pytest.approx(10e6, rel=2e-3)
    assert spread.bound(3_000_000) >= 3_000_000
