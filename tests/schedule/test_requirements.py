"""What each schedule asks of a runtime."""

from dataclasses import replace

import pytest

from planner.schedule import (
    Durations,
    Requirement,
    Schedule,
    build,
    names,
    requirements,
    synthesize,
)

VIRTUAL, SPLIT, CHUNKS, BOTH_WAYS, EARLY, UNORDERED = Requirement

REQUIRED = {
    "gpipe": set(),
    "torchgpipe": {EARLY},
    "1f1b": set(),
    "eager-1f1b": set(),
    "1f1b-overlap": set(),
    "interleaved-1f1b": {VIRTUAL},
    "interleaved-memory-optimised": {VIRTUAL},
    "looped-bfs": {VIRTUAL},
    "seqpipe": {CHUNKS},
    "seqvpp": {VIRTUAL, CHUNKS},
    "seqsmartvpp": {VIRTUAL, CHUNKS},
    "zb-h1": {SPLIT},
    "zb-h1-fused": {SPLIT},
    "zb-h2": {SPLIT},
    "zb-v": {VIRTUAL, SPLIT},
    "dualpipev": {VIRTUAL, SPLIT},
    "dualpipe": {SPLIT, BOTH_WAYS},
    "chimera": {BOTH_WAYS},
    "hanayo": {VIRTUAL},
    "pipedream": set(),
}


def named(name: str) -> Schedule:
    """The schedule on four ranks, with what makes it special."""
    chunks = 2 if name.startswith("seq") else 1
    virtual = 2 if name == "looped-bfs" else None
    return build(
        name, ranks=4, micro_batches=8, virtual_stages=virtual, sequence_chunks=chunks
    )


def test_every_schedule_is_told() -> None:
    """A new schedule has to stand here too."""
    assert list(REQUIRED) == list(names(fixed_only=True))


@pytest.mark.parametrize("name", REQUIRED)
def test_requirements(name: str) -> None:
    """Read off the actions, the placement and the copies."""
    assert requirements(named(name)) == REQUIRED[name]


def test_numbers_matter() -> None:
    """Several stages per rank, chunks and recomputation are asked for only when they are there."""
    assert requirements(build("zb-h1", ranks=4, micro_batches=8, virtual_stages=2)) == {
        VIRTUAL,
        SPLIT,
    }
    assert requirements(build("seqpipe", ranks=4, micro_batches=8)) == set()
    assert (
        requirements(build("torchgpipe", ranks=4, micro_batches=8, recompute="never"))
        == set()
    )


def test_losses_out_of_order() -> None:
    """No schedule of ours permutes the last stage's forwards, synthesised ones included; a given list may."""
    made = synthesize(Durations((1, 2), (1, 2), (1, 2)), ranks=2, micro_batches=3)
    assert made is not None
    assert requirements(made.schedule) == {SPLIT}
    rows = (("0F0", "0F1", "0B1", "0B0"), ("1F1", "1B1", "1F0", "1B0"))
    given = Schedule.from_text(rows)
    assert requirements(given) == {UNORDERED}
    assert (
        requirements(
            replace(given, actions=build("1f1b", ranks=2, micro_batches=2).actions)
        )
        == set()
    )
