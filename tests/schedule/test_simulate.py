"""The simulation gives the earliest times that the rules allow, and names what is wrong with a schedule."""

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import LayoutError, ScheduleError
from planner.schedule import Action, Durations, Schedule, Simulation, build, simulate
from planner.schedule.graph import graph_of, make_graph

from .strategies import durations_of, recomputing, schedules, seconds_of, slow_ends


def written(
    *rows: str, stage_ranks: tuple[int, ...] = (0, 1), micro_batches: int = 2
) -> Schedule:
    """A schedule from text, one row of actions per rank."""
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("written", len(rows), micro_batches, 1, 1, stage_ranks, actions)


@given(st.data())
def test_times_are_the_earliest(data: st.DataObject) -> None:
    """Every action ends when a slow solver of the rules says so, and lasts its duration."""
    schedule = data.draw(schedules)
    durations = data.draw(
        durations_of(
            schedule.stages, data.draw(st.sampled_from((1, schedule.sequence_chunks)))
        )
    )
    made = simulate(schedule, durations)
    expected = slow_ends(schedule, durations)
    events = [event for row in made.events for event in row]
    assert {event.action: event.end_seconds for event in events} == expected
    assert all(
        event.end_seconds - event.start_seconds
        == seconds_of(schedule, event.action, durations)
        for event in events
    )
    assert made.makespan == max(expected.values())


@given(st.data())
def test_level_by_level_is_one_by_one(data: st.DataObject) -> None:
    """Wide graphs, whose times are found for all ranks at once, give what narrow ones give, as plain whole numbers."""
    schedule = data.draw(schedules)
    durations = data.draw(
        durations_of(
            schedule.stages, data.draw(st.sampled_from((1, schedule.sequence_chunks)))
        )
    )
    found = []
    for by_levels in (False, True):
        graph = make_graph(schedule, by_levels=by_levels)
        assert (graph.levels is not None) is by_levels
        made = Simulation(schedule, durations, graph, graph.earliest(durations))
        found.append(
            (
                made.start_seconds,
                made.finish_seconds,
                made.busy_seconds,
                made.span,
                made.critical_actions,
            )
        )
        assert all(
            type(seconds) is int for row in made.finish_seconds for seconds in row
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("lasting", [0.1, Fraction(1, 3), 2**60, 2**70])
def test_wide_graphs_stay_exact(lasting: float) -> None:
    """What does not add up within 64-bit whole numbers is added one by one, and comes out as it went in."""
    schedule = build("1f1b", ranks=16, micro_batches=64)
    durations = Durations.uniform(
        16, forward=lasting, backward_input=lasting, backward_weight=0
    )
    wide, narrow = (
        make_graph(schedule, by_levels=each).earliest(durations)[1]
        for each in (True, False)
    )
    assert max(wide) == max(narrow)
    assert type(max(wide)) is type(lasting)


def test_a_wide_pipeline() -> None:
    """64 ranks and 512 micro-batches of 1F1B take the closed form's time, and dead-locks are named there, too."""
    schedule = build("1f1b", ranks=64, micro_batches=512)
    assert graph_of(schedule).levels is not None
    assert simulate(schedule, Durations.uniform(64, forward=7)).makespan == (
        512 + 63
    ) * (7 + 2)
    first, *others = schedule.actions
    early = (first[0], first[64], *first[1:64], *first[65:])
    with pytest.raises(
        ScheduleError, match=r"dead-lock: 0B0 on rank 0 waits for 1B0, .* behind 1F1"
    ):
        simulate(
            dataclasses.replace(schedule, actions=(early, *others)),
            Durations.uniform(64),
        )


@given(st.data())
def test_busy_and_bubble_fill_the_makespan(data: st.DataObject) -> None:
    """The bubble fraction is the idle area of all ranks."""
    schedule = data.draw(schedules)
    durations = data.draw(durations_of(schedule.stages))
    made = simulate(schedule, durations)
    busy = [
        sum(
            seconds_of(schedule, action, durations)
            + recomputing(schedule, action, durations)
            for action in row
        )
        for row in schedule.actions
    ]
    assert made.busy_seconds == tuple(busy)
    area = schedule.ranks * made.makespan
    assert made.bubble_fraction == (pytest.approx(1 - sum(busy) / area) if area else 0)
    assert 0 <= made.span <= made.makespan


@given(st.data())
def test_slower_is_never_earlier(data: st.DataObject) -> None:
    """A longer duration moves no action to an earlier time."""
    schedule = data.draw(schedules)
    durations = data.draw(durations_of(schedule.stages))
    stage = data.draw(st.integers(0, schedule.stages - 1))
    slower = dataclasses.replace(
        durations,
        forward=tuple(
            time + (index == stage) for index, time in enumerate(durations.forward)
        ),
    )
    before, after = simulate(schedule, durations), simulate(schedule, slower)
    assert all(
        left <= right
        for lefts, rights in zip(before.start_seconds, after.start_seconds, strict=True)
        for left, right in zip(lefts, rights, strict=True)
    )


def test_exact_arithmetic_stays_exact() -> None:
    """Whole numbers and fractions come out as they went in."""
    schedule = build("1f1b", ranks=3, micro_batches=4)
    assert isinstance(simulate(schedule, Durations.uniform(3)).makespan, int)
    third = simulate(
        schedule,
        Durations.uniform(
            3, forward=Fraction(1, 3), backward_input=0, backward_weight=0
        ),
    )  # type: ignore[arg-type]
    assert third.makespan == Fraction(6, 3)


def test_recompute_lengthens_the_backward() -> None:
    """It runs inside B and inside I, never inside W."""
    durations = Durations.uniform(
        1, forward=1, backward_input=2, backward_weight=3, recompute=10
    )
    full = simulate(build("1f1b", ranks=1, micro_batches=1), durations)
    split = simulate(build("zb-h1", ranks=1, micro_batches=1), durations)
    assert [event.end_seconds for event in full.events[0]] == [1, 16]
    assert [event.end_seconds for event in split.events[0]] == [1, 13, 16]


def test_no_transfer_inside_a_rank() -> None:
    """Stages of one rank hand over at once: the turn of the V costs nothing."""
    schedule = build("zb-v", ranks=1, micro_batches=1)
    durations = Durations.uniform(2, transfer=100)
    assert simulate(schedule, durations).makespan == 6


def test_nothing_takes_no_time() -> None:
    """All durations zero: no makespan, no bubble."""
    made = simulate(
        build("gpipe", ranks=2, micro_batches=2),
        Durations.uniform(2, forward=0, backward_input=0, backward_weight=0),
    )
    assert (made.makespan, made.bubble_fraction) == (0, 0)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (("0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1"), "0B0 stands before 0F0 on rank 0"),
        (("0F0 0W0 0I0 0F1 0B1", "1F0 1B0 1F1 1B1"), "0W0 stands before 0I0 on rank 0"),
        (("0F0 0B0 0F1", "1F0 1B0 1F1 1B1"), "0B1 is missing, though 0F1 is there"),
        (("0F0 0B0 0F1 0I1", "1F0 1B0 1F1 1B1"), "0W1 is missing, though 0F1 is there"),
        (("0F0 0B0", "1F0 1B0 1F1 1B1"), "0F1 and 0B1 is missing"),
        (
            ("0F0 0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"),
            "0F0 and again 0F0 stand on rank 0",
        ),
        (("0F0 0B0 0W0 0F1 0B1", "1F0 1B0 1F1 1B1"), "0B0 is both full and split"),
        (
            ("0F0 1F0 0B0 0F1 0B1", "1B0 1F1 1B1"),
            "1F0 stands on rank 0, but stage 1 is on rank 1",
        ),
        (
            ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1"),
            "0F2 on rank 0, but there are 2 stages and 2 micro-batches",
        ),
        (("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "dead-lock: .*waits for .*behind"),
    ],
)
def test_wrong_schedules_are_named(rows: tuple[str, ...], says: str) -> None:
    """The error names the two actions that do not fit."""
    with pytest.raises(ScheduleError, match=says):
        simulate(written(*rows), Durations.uniform(2))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("0F1 0F0 0B1 0B0", "0F1 stands before 0F0 on rank 0"),
        ("0F0 0F1 0B0 0B1", "0B0 stands before 0B1 on rank 0"),
        ("0F0 0F1 0I0 0I1 0W0 0W1", "0I0 stands before 0I1 on rank 0"),
    ],
)
def test_chunks_out_of_sequence_are_named(row: str, says: str) -> None:
    """Chunks of a sequence run forward in order and backward in reverse."""
    actions = tuple(map(Action.parse, row.split()))
    with pytest.raises(ScheduleError, match=says):
        simulate(
            Schedule("written", 1, 1, 1, 2, (0,), (actions,)), Durations.uniform(1)
        )


def test_durations_of_other_chunks() -> None:
    """The numbers of sequence chunks must agree, unless there is one value for all."""
    schedule = build("seqpipe", ranks=1, micro_batches=2, sequence_chunks=2)
    each = Durations((1, 2, 3), (1, 1, 1), (1, 1, 1), sequence_chunks=3)
    with pytest.raises(LayoutError, match="3 sequence chunks for a schedule of 2"):
        simulate(schedule, each)
    with pytest.raises(LayoutError, match="3 values are not 2 for every stage"):
        Durations((1, 2, 3), (1, 1, 1), (1, 1, 1), sequence_chunks=2)


def test_later_chunks_last_longer() -> None:
    """Under causal attention: each chunk takes its own time."""
    schedule = build("seqpipe", ranks=1, micro_batches=2, sequence_chunks=2)
    each = Durations(
        forward=(1, 2),
        backward_input=(10, 20),
        backward_weight=(0, 0),
        sequence_chunks=2,
    )
    made = simulate(schedule, each)
    assert [str(event.action) for event in made.events[0]][:4] == [
        "0F0",
        "0F1",
        "0B1",
        "0F2",
    ]
    assert [event.end_seconds for event in made.events[0]][:4] == [1, 3, 23, 24]


def test_a_pair_cannot_save_more_than_it_lasts() -> None:
    """The error names the stage."""
    with pytest.raises(LayoutError, match=r"overlap\[0\].*cannot save 2"):
        Durations.uniform(1, overlap=2)


def test_dead_lock_names_both_sides() -> None:
    """Who waits, for what, and what stands in its way."""
    crossed = written("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError) as caught:
        simulate(crossed, Durations.uniform(2))
    assert any(
        text in str(caught.value)
        for text in ("0B0 on rank 0 waits for 1B0", "1F1 on rank 1 waits for 0F1")
    )


def test_a_rank_without_stages() -> None:
    """Every rank needs a stage and a list."""
    with pytest.raises(ScheduleError, match="2 ranks"):
        simulate(
            written("0F0 0B0", "", stage_ranks=(0,), micro_batches=1),
            Durations.uniform(1),
        )


def test_durations_of_other_stages() -> None:
    """The numbers of stages must agree."""
    with pytest.raises(LayoutError, match="3 stages for a schedule of 2"):
        simulate(build("1f1b", ranks=2, micro_batches=2), Durations.uniform(3))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("forward", (1.0, -1.0)),
        ("backward_input", (float("nan"), 1.0)),
        ("recompute", (1.0, float("inf"))),
        ("backward_weight", (1.0,)),
        ("backward_input", ()),
        ("transfer_forward", (1.0, 1.0)),
    ],
)
def test_durations_are_checked(field: str, value: tuple[float, ...]) -> None:
    """Lengths fit and times are finite and not negative; the error names the field."""
    with pytest.raises(LayoutError) as caught:
        dataclasses.replace(Durations.uniform(2), **{field: value})
    assert caught.value.problems[0].field.startswith(field)
