"""Closed forms of the catalogue agree with built schedules, and bounds with simulated ones."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.schedule import (
    Durations,
    Schedule,
    ScheduleEntry,
    find,
    in_flight,
    in_flight_per_stage,
    names,
    simulate,
)
from planner.schedule.entry import Shape
from planner.schedule.fill import StageTimes

from .strategies import durations_of, named_schedules

GRID = list(product(range(1, 8), range(1, 17), range(1, 5), range(1, 5)))
WITH_FORMS = [name for name in names() if find(name).forms is not None]
TIGHT = ["gpipe", "1f1b", "eager-1f1b", "torchgpipe", "zb-h1", "zb-h2", "seqpipe"]


def built(entry: ScheduleEntry, shape: Shape) -> Schedule | None:
    """Build a schedule; None where the shape is refused."""
    try:
        return entry.build(shape)
    except LayoutError:
        return None


def stage_times(durations: Durations) -> StageTimes:
    """Convert durations to one row; recomputation is part of the input gradient."""
    size = 1, durations.stages, durations.sequence_chunks
    recompute = np.reshape(durations.recompute, size)
    return StageTimes(
        forward=np.reshape(durations.forward, size),
        backward_input=np.reshape(durations.backward_input, size) + recompute,
        backward_weight=np.reshape(durations.backward_weight, size),
        transfer_forward=np.reshape(durations.transfer_forward, (1, -1)),
        transfer_backward=np.reshape(durations.transfer_backward, (1, -1)),
        overlap=np.reshape(durations.overlap, size),
    )


def least_makespan(schedule: Schedule, durations: Durations) -> float:
    """Return the bound of a schedule's shape."""
    bound = find(schedule.name).least_makespan(
        schedule.ranks,
        schedule.micro_batches,
        schedule.virtual_stages,
        schedule.sequence_chunks,
        stage_times(durations),
    )
    assert bound is not None
    return float(bound[0])


def without_recompute(durations: Durations) -> Durations:
    """Remove recomputation from durations."""
    return Durations(
        durations.forward,
        durations.backward_input,
        durations.backward_weight,
        transfer_forward=durations.transfer_forward,
        transfer_backward=durations.transfer_backward,
        overlap=durations.overlap,
        sequence_chunks=durations.sequence_chunks,
    )


def test_every_runnable_schedule_has_forms() -> None:
    """A schedule that the executor runs can be bounded."""
    assert set(names(runnable_only=True)) - {"synthesized"} <= set(WITH_FORMS)


@pytest.mark.parametrize("name", names(fixed_only=True))
def test_valid_is_whether_build_accepts(name: str) -> None:
    """`valid` of many shapes at once is whether each of them can be built."""
    entry = find(name)
    accepted = [
        built(entry, Shape(*numbers)) is not None for numbers in GRID[:: len(name)]
    ]
    ranks, micro_batches, virtual_stages, chunks = np.transpose(GRID[:: len(name)])
    valid = entry.valid(ranks, micro_batches, virtual_stages, chunks)
    assert valid.tolist() == accepted


def test_nothing_is_valid_without_durations() -> None:
    """A schedule whose order follows from durations cannot be built from numbers."""
    assert not find("synthesized").valid(2, 4, 1, 1)


@pytest.mark.parametrize("name", WITH_FORMS)
def test_held_is_in_flight(name: str) -> None:
    """Resident units at the peak, per rank and per stage, are those of the built schedule."""
    entry = find(name)
    checked = 0
    for numbers in GRID[1::5] + [
        (p, m, 2, 1) for p in range(1, 8) for m in range(1, 17)
    ]:
        schedule = built(entry, Shape(*numbers))
        if schedule is None:
            continue
        ranks = np.arange(schedule.ranks)
        held = entry.held(*numbers, ranks)
        assert held is not None
        assert tuple(held) == in_flight(schedule), numbers
        per_stage = np.array(in_flight_per_stage(schedule))
        for local in range(schedule.virtual_stages):
            stages = [schedule.stages_of(rank)[local] for rank in ranks.tolist()]
            by_stage = entry.held_by_stage(*numbers, ranks, local)
            assert by_stage is not None
            assert by_stage.tolist() == per_stage[stages].tolist(), (numbers, local)
        checked += 1
    assert checked


def test_held_takes_many_shapes_at_once() -> None:
    """Shapes with different numbers of stages per rank share one call."""
    entry = find("interleaved-1f1b")
    ranks, micro_batches, stages = np.array([[4, 2, 4], [8, 6, 4], [2, 3, 4]])
    held = entry.held(ranks, micro_batches, stages, 1, 0)
    assert held is not None
    shapes = [Shape(4, 8, 2), Shape(2, 6, 3), Shape(4, 4, 4)]
    one_by_one = [in_flight(entry.build(shape))[0] for shape in shapes]
    assert held.tolist() == one_by_one


@given(st.data())
def test_bound_is_never_above_the_simulation(data: st.DataObject) -> None:
    """Unequal stages and chunks, transfers, recomputation and pairs: the bound is admissible."""
    schedule = data.draw(
        named_schedules().filter(lambda drawn: drawn.name in WITH_FORMS)
    )
    chunks = schedule.sequence_chunks
    durations = data.draw(durations_of(schedule.stages, chunks))
    makespan = simulate(schedule, durations).makespan
    if schedule.recompute_stop is not None:
        durations = without_recompute(durations)
    assert least_makespan(schedule, durations) <= makespan


@pytest.mark.parametrize("name", WITH_FORMS)
def test_bound_of_random_rows(name: str) -> None:
    """Many stage maps of one shape share one call, and none is bounded above its simulation."""
    entry, random = find(name), np.random.default_rng(30)
    virtual = max(entry.least_virtual_stages, min(4, entry.most_virtual_stages or 4))
    chunks = 2 if entry.takes_sequence_chunks else 1
    schedule = entry.build(Shape(4, 8, virtual, chunks))
    rows = 20
    size = rows, schedule.stages, chunks
    forward, gradient, weight = (
        random.integers(0, 100, size).astype(float) for _ in range(3)
    )
    down, up = (
        random.integers(0, 20, (rows, schedule.stages - 1)).astype(float)
        for _ in range(2)
    )
    times = StageTimes(forward, gradient, weight, down, up)
    bounds = entry.least_makespan(4, 8, virtual, chunks, times)
    assert bounds is not None
    for row in range(rows):
        durations = Durations(
            tuple(forward[row].ravel().tolist()),
            tuple(gradient[row].ravel().tolist()),
            tuple(weight[row].ravel().tolist()),
            transfer_forward=tuple(down[row].tolist()),
            transfer_backward=tuple(up[row].tolist()),
            sequence_chunks=chunks,
        )
        makespan = simulate(schedule, durations).makespan
        assert makespan / 3 < bounds[row] <= makespan


@pytest.mark.parametrize("name", TIGHT)
@pytest.mark.parametrize("micro_batches", [8, 12])
def test_bound_of_the_even_cut_is_exact(name: str, micro_batches: int) -> None:
    """With f = i = w of every stage the bound is the simulated makespan."""
    schedule = find(name).build(Shape(4, micro_batches))
    durations = Durations.uniform(4)
    assert least_makespan(schedule, durations) == simulate(schedule, durations).makespan


@pytest.mark.parametrize(
    "name", ["interleaved-1f1b", "interleaved-memory-optimised", "looped-bfs", "seqvpp"]
)
@pytest.mark.parametrize("virtual_stages", [2, 3, 4])
def test_bound_of_even_virtual_stages_is_exact(name: str, virtual_stages: int) -> None:
    """With several stages per rank, too, where the micro-batches are a multiple of the ranks."""
    schedule = find(name).build(Shape(4, 12, virtual_stages))
    durations = Durations.uniform(4 * virtual_stages)
    assert least_makespan(schedule, durations) == simulate(schedule, durations).makespan
