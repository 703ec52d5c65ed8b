"""What a rank holds: units whose forward has started and whose backward has not ended.

A unit is one (stage, micro-batch), or one sequence chunk of it. It is held from the start of F to the end of B, or of W
when the backward is split. A rank runs one action at a time, so the count depends on the order alone, not on durations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from planner.schedule.actions import Action, ActionKind, Schedule
from planner.schedule.kept import Kept

_RELEASING = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank: most units held at once."""
    return tuple(max(map(sum, crests(schedule, rank)), default=0) for rank in range(schedule.ranks))


def in_flight_per_stage(schedule: Schedule) -> tuple[int, ...]:
    """Per stage: units held when its rank holds most (the first such moment); of two copies, the larger number."""
    held = [0] * schedule.stages
    for rank in range(schedule.ranks):
        crest = max(_crests(schedule, rank), key=sum)
        for stage, units in zip(schedule.stages_of(rank), crest, strict=True):
            held[stage] = max(held[stage], units)
    return tuple(held)


def most_held(actions: Iterable[Action]) -> dict[int, int]:
    """Units of every stage when a rank with these actions holds most (the first such moment)."""
    held: Counter[int] = Counter()
    most: dict[int, int] = {}
    largest = total = 0
    for stage, kind, _ in actions:
        change = 1 if kind is ActionKind.FORWARD else -1 if kind in _RELEASING else 0
        held[stage] += change
        total += change
        if total > largest:
            largest, most = total, dict(held)
    return most


def crests(schedule: Schedule, rank: int) -> tuple[tuple[int, ...], ...]:
    """All combinations of units of the rank's stages (`Schedule.stages_of`) that it holds before a release, sorted."""
    return _kept(schedule)[rank]


def in_flight_vectors(schedule: Schedule) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per rank: every combination of units held of its stages (`Schedule.stages_of`) that no other one contains.

    Memory is the largest of (units of a stage x its bytes, summed over the stages) over these, whatever the bytes.
    """
    return tuple(_maximal(set(crests(schedule, rank))) for rank in range(schedule.ranks))


def _all_crests(schedule: Schedule) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`crests` of every rank."""
    return tuple(tuple(sorted(set(_crests(schedule, rank)))) for rank in range(schedule.ranks))


_kept = Kept(_all_crests, size_of=lambda schedule: schedule.stages * schedule.units)
"""Predictions of many stage maps ask for those of one schedule."""


def _crests(schedule: Schedule, rank: int) -> Iterator[tuple[int, ...]]:
    """Units held of the rank's stages, each time that a release follows a forward."""
    place = {stage: index for index, stage in enumerate(schedule.stages_of(rank))}
    held = [0] * len(place)
    rising = False
    for action in schedule.actions[rank]:
        if action.kind is ActionKind.FORWARD:
            held[place[action.stage]] += 1
            rising = True
        elif action.kind in _RELEASING:
            if rising:
                yield tuple(held)
            rising = False
            held[place[action.stage]] -= 1


def _maximal(vectors: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Vectors that no other one reaches in every place."""
    return tuple(
        sorted(vector for vector in vectors if not any(_contains(other, vector) for other in vectors - {vector}))
    )


def _contains(large: tuple[int, ...], small: tuple[int, ...]) -> bool:
    return all(left >= right for left, right in zip(large, small, strict=True))
