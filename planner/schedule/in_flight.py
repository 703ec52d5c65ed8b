"""What a rank holds: units whose forward has started and whose backward has not ended.

A unit is one (stage, micro-batch), or one sequence chunk of it. It is held from the start of F to the end of B, or of W
when the backward is split. A rank runs one action at a time, so the count depends on the order alone, not on durations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.schedule.actions import Action, Schedule
from planner.schedule.kept import Kept
from planner.schedule.rows import BACKWARD_INPUT, FORWARD, Numbers, Row

_CHANGES = np.array([1, -1, 0, -1])
"""Of the units held, by kind."""
_LARGEST_NUMBER = 2**62


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank: most units held at once."""
    return tuple(
        max(map(sum, crests(schedule, rank)), default=0)
        for rank in range(schedule.ranks)
    )


def in_flight_per_stage(schedule: Schedule) -> tuple[int, ...]:
    """Per stage: units held when its rank holds most (the first such moment); of two copies, the larger number."""
    held = [0] * schedule.stages
    for rank in range(schedule.ranks):
        crests_here = _crests(schedule, rank)
        crest = crests_here[crests_here.sum(axis=1).argmax()].tolist()
        for stage, units in zip(schedule.stages_of(rank), crest, strict=True):
            held[stage] = max(held[stage], units)
    return tuple(held)


def most_held(actions: Sequence[Action]) -> dict[int, int]:
    """Units of every stage run so far when a rank with these actions holds most (the first such moment)."""
    row = Row.read(actions)
    changes = _CHANGES[row.kinds]
    moment = int(changes.cumsum().argmax()) + 1
    stages = row.stages[:moment]
    held, run = (
        np.bincount(stages, weights=changes[:moment]),
        np.flatnonzero(np.bincount(stages)),
    )
    return dict(zip(run.tolist(), held[run].astype(np.int64).tolist(), strict=True))


def crests(schedule: Schedule, rank: int) -> tuple[tuple[int, ...], ...]:
    """All combinations of units of the rank's stages (`Schedule.stages_of`) that it holds before a release, sorted."""
    return _kept(schedule)[rank]


def in_flight_vectors(schedule: Schedule) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per rank: every combination of units held of its stages (`Schedule.stages_of`) that no other one contains.

    Memory is the largest of (units of a stage x its bytes, summed over the stages) over these, whatever the bytes.
    """
    return _kept_vectors(schedule)


def _all_crests(schedule: Schedule) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`crests` of every rank."""
    every = (
        _distinct(_crests(schedule, rank)).tolist() for rank in range(schedule.ranks)
    )
    return tuple(tuple(sorted(set(map(tuple, each)))) for each in every)


def _distinct(rows: Numbers) -> Numbers:
    """Without repeated rows, as long as a row can be written as one whole number."""
    digits = int(rows.max(initial=0)) + 1
    if not len(rows) or digits ** rows.shape[1] >= _LARGEST_NUMBER:
        return rows
    _, places = np.unique(
        rows @ (digits ** np.arange(rows.shape[1])), return_index=True
    )
    distinct: Numbers = rows[places]
    return distinct


def _all_vectors(schedule: Schedule) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`in_flight_vectors` of every rank."""
    return tuple(
        _maximal(set(crests(schedule, rank))) for rank in range(schedule.ranks)
    )


_kept = Kept(_all_crests, size_of=lambda schedule: schedule.stages * schedule.units)
"""Predictions of many stage maps ask for those of one schedule."""
_kept_vectors = Kept(
    _all_vectors, size_of=lambda schedule: schedule.stages * schedule.units
)


def _crests(schedule: Schedule, rank: int) -> Numbers:
    """Units held of the rank's stages, each time that a release follows a forward, [moment, stage]."""
    row, stages = Row.read(schedule.actions[rank]), np.array(schedule.stages_of(rank))
    changing = np.flatnonzero(row.kinds != BACKWARD_INPUT)
    changes = np.zeros((len(changing), len(stages)), dtype=np.int64)
    places = np.searchsorted(stages, row.stages[changing])
    changes[np.arange(len(changing)), places] = _CHANGES[row.kinds[changing]]
    rises = row.kinds[changing] == FORWARD
    before = np.flatnonzero(rises[:-1] & ~rises[1:])
    crests_here: Numbers = changes.cumsum(axis=0)[before]
    return crests_here


def _maximal(vectors: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Vectors that no other one reaches in every place."""
    rows = np.array(sorted(vectors), dtype=np.int64)
    return tuple(
        tuple(row.tolist()) for row in rows if (rows >= row).all(axis=1).sum() == 1
    )
