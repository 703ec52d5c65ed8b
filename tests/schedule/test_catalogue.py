"""Schedules are found by name, and refuse numbers that they do not take."""

import pytest

from planner.errors import LayoutError, UnknownNameError
from planner.schedule import build, canonical_name, find, names


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("GPipe", "gpipe"),
        ("FThenB", "gpipe"),
        ("AFAB", "gpipe"),
        ("1F1B", "1f1b"),
        ("PipeDream-Flush", "1f1b"),
        ("Eager1F1B", "eager-1f1b"),
        ("Interleaved1F1B", "interleaved-1f1b"),
        ("vpp", "interleaved-1f1b"),
        ("interleaved_memory_optimized", "interleaved-memory-optimised"),
        ("LoopedBFS", "looped-bfs"),
        ("ZB_H1", "zb-h1"),
        ("zb1p", "zb-h1"),
        ("ZBH2", "zb-h2"),
        ("ZBVZeroBubble", "zb-v"),
        ("zero_bubble_v", "dualpipev"),
        ("DualPipeV", "dualpipev"),
        ("Seq1F1B", "seqpipe"),
        ("SeqSmartVPP", "seqsmartvpp"),
        ("InterleavedZeroBubble", "zb-h1"),
        ("Synthesised", "synthesized"),
    ],
)
def test_names_of_other_frameworks_are_known(written: str, canonical: str) -> None:
    """Aliases, case, hyphens and underscores lead to one name."""
    assert canonical_name(written) == canonical


def test_unknown_name_lists_the_known() -> None:
    """The error names what stood there and what may stand there."""
    with pytest.raises(UnknownNameError, match=r"'2f2b'.*gpipe, 1f1b"):
        canonical_name("2f2b")


def test_no_alias_is_claimed_twice() -> None:
    """Every name and alias leads back to its own schedule."""
    entries = [find(name) for name in names()]
    assert [find(alias) for entry in entries for alias in entry.aliases] == [
        entry for entry in entries for _ in entry.aliases
    ]


def test_runnable_schedules() -> None:
    """The executor runs all but those that copy stages or keep old weights."""
    left = {"dualpipe", "chimera", "pipedream"}
    assert set(names(runnable_only=True)) == set(names()) - left


def test_synthesized_is_known_and_needs_durations() -> None:
    """Its name stands among the others; whoever wants it from numbers alone is told who makes it."""
    assert set(names()) - set(names(fixed_only=True)) == {"synthesized"}
    with pytest.raises(
        LayoutError, match=r"order for given durations.*ranks\(4\)"
    ) as refused:
        build("synthesized", ranks=4, micro_batches=8)
    assert "synthesize(durations" in refused.value.problems[0].hint


def test_virtual_stages_default_to_the_fewest() -> None:
    """Left out, they are what the schedule is defined with."""
    assert build("zb-v", ranks=2, micro_batches=4).virtual_stages == 2
    assert build("interleaved", ranks=2, micro_batches=4).virtual_stages == 2
    assert build("looped-bfs", ranks=2, micro_batches=4).virtual_stages == 1


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        ("1f1b", {"virtual_stages": 2}, r"exactly 1 stages.*virtual_stages\(2\)"),
        ("vpp", {"virtual_stages": 1}, r"2 or more.*virtual_stages\(1\)"),
        ("zb-v", {"virtual_stages": 3}, r"exactly 2.*virtual_stages\(3\)"),
        ("gpipe", {"sequence_chunks": 2}, r"sequence_chunks\(2\)"),
        ("gpipe", {"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
        ("gpipe", {"ranks": -1}, "ranks must be at least 1, got -1"),
        ("gpipe", {"micro_batches": 10**9}, "1000000000"),
        ("vpp", {"micro_batches": 9, "virtual_stages": 2}, r"9 % 2 = 1.*8 or 12"),
        ("interleaved-memory-optimised", {"micro_batches": 3}, "= 4, got 3"),
        ("zb-h1", {"micro_batches": 3}, "= 4, got 3"),
        ("zb-h2", {"micro_batches": 6}, "= 7, got 6"),
        (
            "zb-h1",
            {"micro_batches": 9, "virtual_stages": 2},
            r"zb-h1 runs 9.*9 % 2 = 1",
        ),
        ("dualpipev", {"micro_batches": 7}, "= 8, got 7"),
        ("dualpipe", {"micro_batches": 6}, "= 8, got 6"),
        ("dualpipe", {"micro_batches": 9}, "even number of micro batches, got 9"),
        ("dualpipe", {"ranks": 3}, "even number of ranks, got 3"),
        ("chimera", {"micro_batches": 6}, "units of 4 micro-batches"),
        ("hanayo", {"virtual_stages": 3}, "even number of virtual stages, got 3"),
        ("seqvpp", {"sequence_chunks": 5}, "<= pipeline ranks = 4, got 5"),
        (
            "seqvpp",
            {"micro_batches": 1, "sequence_chunks": 2},
            r"micro_batches\(1\).*got 2",
        ),
        ("seqvpp", {"ranks": 5, "sequence_chunks": 3}, "groups of 3 units on 5 ranks"),
        (
            "seqsmartvpp",
            {"ranks": 3, "sequence_chunks": 2},
            "even number of ranks, got 3",
        ),
    ],
)
def test_impossible_numbers_are_refused(
    name: str, numbers: dict[str, int], says: str
) -> None:
    """The error shows the numbers."""
    with pytest.raises(LayoutError, match=says):
        build(name, **{"ranks": 4, "micro_batches": 8, **numbers})


def test_fewer_micro_batches_than_ranks() -> None:
    """1F1B takes any number; its warm-up is then all forwards."""
    assert build("1f1b", ranks=4, micro_batches=1).to_text() == (
        ("0F0", "0B0"),
        ("1F0", "1B0"),
        ("2F0", "2B0"),
        ("3F0", "3B0"),
    )
