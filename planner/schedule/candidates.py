"""Orders that a synthesis may start from: canonical ones that fit the memory, and simple ones that always do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from planner.errors import LayoutError
from planner.schedule.actions import Action, ActionKind, Schedule
from planner.schedule.catalogue import build, find, names
from planner.schedule.entry import Shape
from planner.schedule.greedy import backward_first
from planner.schedule.requirements import Requirement, requirements
from planner.schedule.room import Room
from planner.schedule.rows import Row
from planner.schedule.warm_up import (
    grouped_units,
    one_forward_one_backward,
    split_backwards,
)

LIMITED = "limited"
"""Name of the orders that are no canonical schedule."""


def is_canonical(schedule: Schedule) -> bool:
    """Has the order a name in the catalogue?"""
    return schedule.name != LIMITED


def candidates(
    shape: Schedule, room: Room, *, is_split: bool = True
) -> Iterator[Schedule]:
    """Schedules of the shape's stages for which every rank has room, each kind in order.

    Args:
        shape: stages, ranks and units.
        room: what the ranks may hold.
        is_split: backwards may be I and W; else all of them are B.
    """
    for schedule in (*_canonical(shape), *_limited(shape, room, is_split)):
        is_possible = is_split or Requirement.SPLIT_BACKWARD not in requirements(
            schedule
        )
        if is_possible and _runs_in_order(schedule) and room.holds(schedule):
            yield schedule


def _canonical(shape: Schedule) -> Iterator[Schedule]:
    """Schedules of the catalogue with the same stages on the same ranks, one copy each, without pairs."""
    for name in names(fixed_only=True):
        try:
            schedule = build(
                name,
                ranks=shape.ranks,
                micro_batches=shape.micro_batches,
                virtual_stages=shape.virtual_stages,
                sequence_chunks=shape.sequence_chunks,
            )
        except LayoutError:
            continue
        is_special = (
            schedule.replica_ranks
            or schedule.joint_pairs
            or schedule.recompute_stop is not None
        )
        if (
            schedule.stage_ranks == shape.stage_ranks
            and not is_special
            and not find(name).is_asynchronous
        ):
            yield schedule


def _limited(shape: Schedule, room: Room, is_split: bool) -> Iterator[Schedule]:
    """One stage per rank: ZB-H1 and ZB-H2 cut to the room, or 1F1B and eager 1F1B where backwards are not split;
    several: as many whole micro-batches as there is room for on every rank."""
    if not room.is_enough(shape):
        return
    units = [room.most_units(shape, rank) for rank in range(shape.ranks)]
    if shape.virtual_stages > 1:
        rows = backward_first(
            shape.stage_ranks,
            shape.micro_batches,
            limit=min(units) // shape.sequence_chunks,
        )
        yield replace(
            shape,
            name=LIMITED,
            actions=tuple(_in_chunks(row, shape.sequence_chunks) for row in rows),
        )
        return
    for per_rank in (1, 2):
        cut = tuple(
            _cut(shape, rank, per_rank, units[: rank + 1], is_split)
            for rank in range(shape.ranks)
        )
        yield replace(shape, name=LIMITED, actions=cut)


def _in_chunks(actions: Iterable[Action], chunks: int) -> tuple[Action, ...]:
    """Every action chunk by chunk: forwards in order, backwards in reverse."""
    return tuple(
        action._replace(micro_batch=action.micro_batch * chunks + chunk)
        for action in actions
        for chunk in (
            range(chunks)
            if action.kind is ActionKind.FORWARD
            else reversed(range(chunks))
        )
    )


def _cut(
    shape: Schedule, rank: int, per_rank: int, units: Sequence[int], is_split: bool
) -> Row:
    """Warm-up and delay of weight gradients, which together with one more are what is held.

    Args:
        shape: the numbers.
        rank: whose actions.
        per_rank: forwards of warm-up for every rank behind.
        units: that this rank and those before it have room for; none runs further ahead than the one before it.
        is_split: I and W; else B.
    """
    numbers = Shape(
        shape.ranks, shape.micro_batches, sequence_chunks=shape.sequence_chunks
    )
    forwards, backwards = grouped_units(numbers, rank, (shape.micro_batches,))
    ahead = min(
        min(units) - 1, per_rank * (shape.ranks - 1 - rank) + shape.sequence_chunks - 1
    )
    row = one_forward_one_backward(forwards, backwards, ahead)
    return (
        split_backwards(row, min(per_rank * rank, units[-1] - 1 - ahead))
        if is_split
        else row
    )


def _runs_in_order(schedule: Schedule) -> bool:
    """Every kind of every stage and chunk in micro-batch order."""
    chunks = schedule.sequence_chunks
    reached: dict[tuple[int, ActionKind, int], int] = {}
    for stage, kind, unit in (action for row in schedule.actions for action in row):
        kind = ActionKind.BACKWARD if kind is ActionKind.BACKWARD_INPUT else kind
        if unit < reached.get((stage, kind, unit % chunks), 0):
            return False
        reached[stage, kind, unit % chunks] = unit
    return True
