"""What a runtime that takes lists of actions must be able to do to run a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from planner.schedule.actions import ActionKind, Schedule


class Requirement(StrEnum):
    """Something beyond forwards and full backwards of one stage per rank."""

    VIRTUAL_STAGES = "virtual stages"
    """Several stages on a rank; the stage-to-rank map is `Schedule.stage_ranks`."""
    SPLIT_BACKWARD = "split backward"
    """I and W as actions of their own."""
    SEQUENCE_CHUNKS = "sequence chunks"
    """Keys and values, and their gradients, handed from chunk to chunk of a micro-batch."""
    BIDIRECTIONAL = "bidirectional"
    """Two copies of every stage, whose gradients are added up after the step."""
    EARLY_RECOMPUTE = "early recompute"
    """Forwards that run again while the rank waits for the gradient, instead of inside the backward."""
    UNORDERED_LAST_STAGE = "unordered last stage"
    """Forwards of the last stage out of micro-batch order; torch's runtime files losses by the order in which they
    come, and would give wrong gradients without a word."""


def requirements(schedule: Schedule) -> frozenset[Requirement]:
    """What a runtime must be able to do. Pairs ask for nothing: run one after the other they give the same gradients.

    An asynchronous schedule (`ScheduleEntry.is_asynchronous`) runs its one step like any other; what it asks for,
    stashed weights, shows only between steps.
    """
    return frozenset(_found(schedule))


def _found(schedule: Schedule) -> Iterator[Requirement]:
    if schedule.stages > schedule.ranks:
        yield Requirement.VIRTUAL_STAGES
    if any(
        action.kind is ActionKind.BACKWARD_INPUT
        for row in schedule.actions
        for action in row
    ):
        yield Requirement.SPLIT_BACKWARD
    if schedule.sequence_chunks > 1:
        yield Requirement.SEQUENCE_CHUNKS
    if schedule.replica_ranks:
        yield Requirement.BIDIRECTIONAL
    if schedule.recompute_stop:
        yield Requirement.EARLY_RECOMPUTE
    if any(losses != sorted(losses) for losses in map(list, _last_forwards(schedule))):
        yield Requirement.UNORDERED_LAST_STAGE


def _last_forwards(schedule: Schedule) -> Iterator[Iterator[int]]:
    """Per rank: units of the last stage in the order of their forwards."""
    last = schedule.stages - 1
    for row in schedule.actions:
        yield (
            unit
            for stage, kind, unit in row
            if stage == last and kind is ActionKind.FORWARD
        )
