"""The schedules of sequence chunks, pairs, two directions and waves have the step time and memory that they claim."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.schedule import Durations, Simulation, build, find, names, simulate

times = st.integers(1, 9)
few = st.integers(1, 6)
three_times = st.tuples(times, times, times)


def uniform(
    name: str,
    ranks: int,
    micro_batches: int,
    lasting: tuple[int, int, int],
    **more: int,
) -> Simulation:
    """A schedule with the same F, I and W on every stage."""
    schedule = build(name, ranks=ranks, micro_batches=micro_batches, **more)  # type: ignore[arg-type]
    forward, backward_input, backward_weight = lasting
    durations = Durations.uniform(
        schedule.stages,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
    )
    return simulate(schedule, durations)


@given(few, st.integers(1, 12), st.integers(1, 4), three_times)
def test_seqpipe(
    ranks: int, micro_batches: int, chunks: int, lasting: tuple[int, int, int]
) -> None:
    """One stage per rank: (M Q + P - 1)(f + b), and P - r + Q - 1 units in flight."""
    made = uniform("seqpipe", ranks, micro_batches, lasting, sequence_chunks=chunks)
    units = micro_batches * chunks
    assert made.makespan == (units + ranks - 1) * sum(lasting)
    assert made.peak_in_flight == tuple(
        min(units, ranks - rank + chunks - 1) for rank in range(ranks)
    )


@given(few, st.integers(1, 3), st.integers(2, 3), st.integers(1, 3), three_times)
def test_seqpipe_of_virtual_stages(
    ranks: int, rounds: int, virtual: int, chunks: int, lasting: tuple[int, int, int]
) -> None:
    """The bubble is divided by V Q; in flight is one more than the warm-up 2 (P - 1 - r) + (V - 1) P Q + Q - 1."""
    made = uniform(
        "seqpipe",
        ranks,
        rounds * ranks,
        lasting,
        sequence_chunks=chunks,
        virtual_stages=virtual,
    )
    units = rounds * ranks * virtual * chunks
    ahead = (virtual - 1) * ranks * chunks + chunks
    assert made.makespan == (units + ranks - 1) * sum(lasting)
    assert made.peak_in_flight == tuple(
        min(units, 2 * (ranks - 1 - rank) + ahead) for rank in range(ranks)
    )


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(2, 3),
    three_times,
)
def test_seqvpp_and_seqsmartvpp(
    chunks: int,
    times_chunks: int,
    rounds: int,
    virtual: int,
    lasting: tuple[int, int, int],
) -> None:
    """The bubble of seqpipe with Q times smaller groups, and once or twice P - 1 - r units ahead."""
    ranks = 2 * chunks * times_chunks
    micro_batches = 2 * times_chunks * rounds
    units = micro_batches * chunks * virtual
    for name, bias in (("seqvpp", 2), ("seqsmartvpp", 1)):
        made = uniform(
            name,
            ranks,
            micro_batches,
            lasting,
            sequence_chunks=chunks,
            virtual_stages=virtual,
        )
        ahead = (virtual - 1) * ranks + chunks
        assert made.makespan == (units + ranks - 1) * sum(lasting)
        assert made.peak_in_flight == tuple(
            min(units, bias * (ranks - 1 - rank) + ahead) for rank in range(ranks)
        )


@given(few, st.integers(1, 12), three_times, times)
def test_torchgpipe(
    ranks: int, micro_batches: int, lasting: tuple[int, int, int], recompute: int
) -> None:
    """(M + P - 1)(F + B) and a recomputation for each micro-batch that recomputes, all others being hidden."""
    recompute = min(recompute, lasting[1] + lasting[2])
    forward, backward_input, backward_weight = lasting
    durations = Durations.uniform(
        ranks,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        recompute=recompute,
    )
    for mode, recomputed in (
        ("always", micro_batches),
        ("except_last", micro_batches - 1),
        ("never", 0),
    ):
        schedule = build(
            "torchgpipe", ranks=ranks, micro_batches=micro_batches, recompute=mode
        )
        made = simulate(schedule, durations)
        assert (
            made.makespan
            == (micro_batches + ranks - 1) * sum(lasting) + recomputed * recompute
        )
        assert made.peak_in_flight == (micro_batches,) * ranks


def test_torchgpipe_recomputes_all_but_the_last_by_default() -> None:
    """As torchgpipe's checkpoint mode does."""
    assert build("torchgpipe", ranks=2, micro_batches=4).recompute_stop == 3


def test_unknown_recompute_mode() -> None:
    """The error lists the modes, or says that there is none."""
    with pytest.raises(LayoutError, match="use one of except_last, always, never"):
        build("torchgpipe", ranks=2, micro_batches=4, recompute="sometimes")
    with pytest.raises(LayoutError, match="1f1b does not recompute 'always'"):
        build("1f1b", ranks=2, micro_batches=4, recompute="always")


@given(few, st.integers(1, 12), three_times)
def test_pairs_without_communication_gain_nothing(
    ranks: int, micro_batches: int, lasting: tuple[int, int, int]
) -> None:
    """1F1B with overlap, and asynchronous 1F1B in one stretch, take the time of 1F1B and hold as much."""
    plain = uniform("1f1b", ranks, micro_batches, lasting)
    for name in ("1f1b-overlap", "pipedream"):
        made = uniform(name, ranks, micro_batches, lasting)
        assert (made.makespan, made.peak_in_flight) == (
            plain.makespan,
            plain.peak_in_flight,
        )


@given(st.integers(1, 12), three_times)
def test_pairs_hide_communication(
    micro_batches: int, lasting: tuple[int, int, int]
) -> None:
    """On one rank every steady pair saves what it hides."""
    forward, backward_input, backward_weight = lasting
    durations = Durations.uniform(
        1,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        overlap=1,
    )
    schedule = build("1f1b-overlap", ranks=1, micro_batches=micro_batches)
    assert simulate(schedule, durations).makespan == micro_batches * sum(lasting) - (
        micro_batches - 1
    )


def dual_bubble(half: int, lasting: tuple[int, int, int]) -> int:
    """Bubble of DualPipe with `half` ranks on each way."""
    f, i, w = lasting
    once, twice = half - 1, 2 * (half - 1)
    return max(
        (half - 2) * f + once * i,
        (half - 2) * f + twice * i - once * w,
        twice * f,
        twice * f + once * (i - w),
    )


@given(st.integers(2, 5), st.integers(0, 6), three_times)
def test_dualpipev(ranks: int, more: int, lasting: tuple[int, int, int]) -> None:
    """2 M (f + i + w) and the bubble of the eight phases; 2 P + 1 half micro-batches in flight."""
    micro_batches = 2 * ranks + more
    made = uniform("dualpipev", ranks, micro_batches, lasting)
    assert made.makespan == 2 * micro_batches * sum(lasting) + dual_bubble(
        ranks, lasting
    )
    assert made.peak_in_flight == (2 * ranks + 1,) * ranks


@given(st.integers(2, 4), st.integers(0, 4), three_times)
def test_dualpipe(half: int, more: int, lasting: tuple[int, int, int]) -> None:
    """M (F + I + W) and the bubble of half the ranks; P + 1 micro-batches in flight."""
    ranks, micro_batches = 2 * half, 4 * half + 2 * more
    made = uniform("dualpipe", ranks, micro_batches, lasting)
    assert made.makespan == micro_batches * sum(lasting) + dual_bubble(half, lasting)
    assert made.peak_in_flight == (ranks + 1,) * ranks


@given(st.integers(1, 5), three_times)
def test_chimera(half: int, lasting: tuple[int, int, int]) -> None:
    """One unit: M (F + B) + (P - 2) max(F, B), and between P / 2 + 1 and P micro-batches in flight."""
    ranks = 2 * half
    made = uniform("chimera", ranks, ranks, lasting)
    longer = max(lasting[0], lasting[1] + lasting[2])
    assert made.makespan == ranks * sum(lasting) + (ranks - 2) * longer
    assert made.peak_in_flight == tuple(
        half + 1 + min(rank, ranks - 1 - rank, half - 1) for rank in range(ranks)
    )


@given(few, st.integers(0, 8), three_times)
def test_fused_zero_bubble_h1(
    ranks: int, more: int, lasting: tuple[int, int, int]
) -> None:
    """Span M (F + I + W) + max((P - 2) F + (P - 1) I, (P - 1)(F + I - W)); P micro-batches until W."""
    f, i, w = lasting
    made = uniform("zb-h1-fused", ranks, ranks + more, lasting)
    bubble = (
        max((ranks - 2) * f + (ranks - 1) * i, (ranks - 1) * (f + i - w))
        if ranks > 1
        else 0
    )
    assert made.span == (ranks + more) * sum(lasting) + bubble
    assert made.peak_in_flight == (ranks,) * ranks


@given(few)
def test_hanayo_is_chimera_folded(ranks: int) -> None:
    """One wave of P micro-batches is the upper half of Chimera on 2 P ranks, its two ways being one."""
    chimera = build("chimera", ranks=2 * ranks, micro_batches=2 * ranks)
    folded = tuple(
        tuple(action._replace(micro_batch=action.micro_batch % ranks) for action in row)
        for row in chimera.actions[:ranks]
    )
    assert build("hanayo", ranks=ranks, micro_batches=ranks).actions == folded


@given(few, st.integers(1, 4), st.integers(1, 3), times, times)
def test_hanayo(
    ranks: int, rounds: int, waves: int, forward: int, backward: int
) -> None:
    """V M (f + b) + 2 (P - 1) (max(f, b) + (M / P - 1) |b - f|), and (V - 1) P + r + 1 units in flight."""
    virtual, micro_batches = 2 * waves, rounds * ranks
    made = uniform(
        "hanayo", ranks, micro_batches, (forward, backward, 0), virtual_stages=virtual
    )
    bubble = (
        2
        * (ranks - 1)
        * (max(forward, backward) + (rounds - 1) * abs(backward - forward))
    )
    assert made.makespan == virtual * micro_batches * (forward + backward) + bubble
    assert made.peak_in_flight == tuple(
        (virtual - 1) * ranks + rank + 1 for rank in range(ranks)
    )


def test_the_waves_turn_on_the_outer_ranks() -> None:
    """Stages go down and up in turn, and neighbours at a turn share their rank."""
    assert build("hanayo", ranks=3, micro_batches=3, virtual_stages=4).stage_ranks == (
        0,
        1,
        2,
        2,
        1,
        0,
        0,
        1,
        2,
        2,
        1,
        0,
    )


@pytest.mark.parametrize("name", names(fixed_only=True))
def test_no_schedule_ever_dead_locks(name: str) -> None:
    """Whatever numbers a schedule takes, it runs to its end, and busy time is all of its work."""
    entry = find(name)
    built = 0
    for ranks in range(1, 7):
        for micro_batches in (1, 2, 3, 4, 6, 7, 10, 12):
            for virtual in range(1, 5):
                for chunks in (1, 2, 3) if entry.takes_sequence_chunks else (1,):
                    try:
                        made = uniform(
                            name,
                            ranks,
                            micro_batches,
                            (1, 1, 1),
                            virtual_stages=virtual,
                            sequence_chunks=chunks,
                        )
                    except LayoutError:
                        continue
                    built += 1
                    assert (
                        sum(made.busy_seconds)
                        == 3 * made.schedule.stages * made.schedule.units
                    )
    assert built > 5
