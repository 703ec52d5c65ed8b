"""Four ranks, unit times: every schedule's step, bubble, memory and transfers as worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.schedule import (
    Durations,
    HeldBytes,
    Simulation,
    build,
    peak_bytes,
    simulate,
)

RANKS = 4


def worked(
    name: str, micro_batches: int = 8, virtual: int | None = None, chunks: int = 1
) -> Simulation:
    """Every action of a stage lasts 1, and so does a transfer that is not waited for."""
    schedule = build(
        name,
        ranks=RANKS,
        micro_batches=micro_batches,
        virtual_stages=virtual,
        sequence_chunks=chunks,
    )
    recompute = 1 if schedule.recompute_stop is not None else 0
    return simulate(schedule, Durations.uniform(schedule.stages, recompute=recompute))


def until_input_gradient(made: Simulation) -> tuple[float, ...]:
    """Per rank: most units held when a unit is released at the end of I already."""
    one, none = (1,) * made.schedule.stages, (0,) * made.schedule.stages
    return peak_bytes(made, HeldBytes(activation=one, weight=none))


ROWS = (
    # schedule, micro-batches, V, Q, makespan, span, ideal, units until W or B, units until I or B, transfers
    ("gpipe", 8, 1, 1, 33, 33, 24, (8, 8, 8, 8), (8, 8, 8, 8), 48),
    ("torchgpipe", 8, 1, 1, 40, 40, 31, (8, 8, 8, 8), (8, 8, 8, 8), 48),
    ("1f1b", 8, 1, 1, 33, 33, 24, (4, 3, 2, 1), (4, 3, 2, 1), 48),
    ("eager-1f1b", 8, 1, 1, 33, 33, 24, (7, 5, 3, 1), (7, 5, 3, 1), 48),
    ("interleaved-1f1b", 8, 2, 1, 57, 57, 48, (11, 9, 7, 5), (11, 9, 7, 5), 112),
    (
        "interleaved-memory-optimised",
        8,
        2,
        1,
        57,
        57,
        48,
        (8, 7, 6, 5),
        (8, 7, 6, 5),
        112,
    ),
    ("looped-bfs", 8, 2, 1, 57, 57, 48, (16, 16, 16, 16), (16, 16, 16, 16), 112),
    ("seqpipe", 8, 1, 2, 57, 57, 48, (5, 4, 3, 2), (5, 4, 3, 2), 96),
    ("seqvpp", 4, 2, 2, 57, 57, 48, (12, 10, 8, 6), (12, 10, 8, 6), 112),
    ("seqsmartvpp", 4, 2, 2, 57, 57, 48, (9, 8, 7, 6), (9, 8, 7, 6), 112),
    ("zb-h1", 8, 1, 1, 27, 27, 24, (4, 4, 4, 4), (4, 3, 2, 1), 48),
    ("zb-h1-fused", 8, 1, 1, 29, 29, 24, (4, 4, 4, 4), (4, 3, 2, 1), 48),
    ("zb-h2", 8, 1, 1, 27, 24, 24, (7, 7, 7, 7), (7, 5, 3, 1), 48),
    ("zb-v", 8, 2, 1, 51, 48, 48, (8, 8, 8, 8), (8, 8, 8, 8), 96),
    ("dualpipev", 8, 2, 1, 54, 54, 48, (9, 9, 9, 9), (9, 9, 9, 9), 96),
    ("dualpipe", 8, 1, 1, 26, 26, 24, (5, 5, 5, 5), (5, 5, 5, 5), 48),
    ("chimera", 4, 1, 1, 16, 16, 12, (3, 4, 4, 3), (3, 4, 4, 3), 24),
)


@pytest.mark.parametrize(
    (
        "name",
        "micro_batches",
        "virtual",
        "chunks",
        "makespan",
        "span",
        "ideal",
        "held",
        "held_until_input",
        "sent",
    ),
    ROWS,
)
def test_worked_examples(
    name: str,
    micro_batches: int,
    virtual: int,
    chunks: int,
    makespan: int,
    span: int,
    ideal: int,
    held: tuple[int, ...],
    held_until_input: tuple[int, ...],
    sent: int,
) -> None:
    """Step with and without a barrier, bubble, peaks of every rank, and transfers."""
    made = worked(name, micro_batches, virtual, chunks)
    assert (made.makespan, made.span) == (makespan, span)
    assert made.bubble_fraction == pytest.approx(1 - ideal / makespan)
    assert made.peak_in_flight == held
    assert until_input_gradient(made) == held_until_input
    stages = made.schedule.stages
    assert (
        sum(
            map(
                len,
                simulate(
                    made.schedule, Durations.uniform(stages, transfer=1)
                ).transfers,
            )
        )
        == sent
    )


def test_pairs_as_one_kernel_undo_1f1b() -> None:
    """Were both halves of a pair to hand on at the pair's end, 1F1B with overlap would last 51 instead of 33."""
    made = worked("1f1b-overlap")
    joint = replace(made.schedule, joint_pairs=True)
    assert (made.makespan, simulate(joint, made.durations).makespan) == (33, 51)


@given(st.integers(1, 6), st.integers(0, 6))
def test_units_until_the_input_gradient(ranks: int, more: int) -> None:
    """ZB-H1 holds P - r, and ZB-H2 2 (P - r) - 1 units on rank r, if I released them: what 1F1B and eager 1F1B hold."""
    for name, plain in (("zb-h1", "1f1b"), ("zb-h2", "eager-1f1b")):
        split, whole = (
            simulate(
                build(each, ranks=ranks, micro_batches=2 * ranks - 1 + more),
                Durations.uniform(ranks),
            )
            for each in (name, plain)
        )
        assert until_input_gradient(split) == whole.peak_in_flight


@given(st.integers(1, 6), st.integers(1, 12))
def test_torchgpipe_holds_one_micro_batch_and_inputs(
    ranks: int, micro_batches: int
) -> None:
    """All activations of one micro-batch, and the inputs of the others, until their turn comes."""
    schedule = build("torchgpipe", ranks=ranks, micro_batches=micro_batches)
    made = simulate(schedule, Durations.uniform(ranks, recompute=1))
    held = peak_bytes(
        made, HeldBytes(activation=(100,) * ranks, recomputed=(1,) * ranks)
    )
    assert held == (100 + micro_batches - 1,) * ranks
