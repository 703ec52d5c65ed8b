"""Every order of small pipelines, one by one: the oracle of whatever claims to have found the best."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

from planner.errors import ScheduleError
from planner.schedule import (
    Action,
    ActionKind,
    Durations,
    Schedule,
    Simulation,
    in_flight_vectors,
    simulate,
)
from planner.schedule.order_bound import SPLIT
from planner.schedule.room import Room


def rank_orders(
    stages: tuple[int, ...],
    units: int,
    chunks: int,
    kinds: tuple[ActionKind, ...] = SPLIT,
    *,
    in_turn: bool = False,
) -> list[tuple[Action, ...]]:
    """Every order of a rank in which nothing stands before what its own rank must have run for it.

    Args:
        stages: of the rank.
        units: of every stage.
        chunks: units of a micro-batch.
        kinds: that every unit runs.
        in_turn: only those that run every kind of a stage in micro-batch order (without chunks).
    """
    wanted = {
        Action(stage, kind, unit)
        for stage in stages
        for kind in kinds
        for unit in range(units)
    }

    def before(action: Action) -> set[Action]:
        stage, kind, unit = action
        if kind is ActionKind.FORWARD:
            earlier = {Action(stage, kind, unit - 1)} if unit % chunks else set()
            return earlier | {
                Action(each, kind, unit) for each in stages if each < stage
            }
        if kind is ActionKind.BACKWARD_WEIGHT:
            return {Action(stage, ActionKind.BACKWARD_INPUT, unit)}
        later = {Action(stage, kind, unit + 1)} if (unit + 1) % chunks else set()
        return later | {
            Action(stage, ActionKind.FORWARD, unit),
            *(Action(s, kind, unit) for s in stages if s > stage),
        }

    def extend(done: tuple[Action, ...]) -> list[tuple[Action, ...]]:
        left = wanted.difference(done)
        if not left:
            return [done]
        next_ones = [action for action in sorted(left) if before(action) <= set(done)]
        if in_turn:
            next_ones = [
                one
                for one in next_ones
                if one._replace(micro_batch=one.micro_batch - 1) not in left
            ]
        return [row for action in next_ones for row in extend((*done, action))]

    return extend(())


def simulated_orders(
    shape: Schedule,
    durations: Durations,
    room: Room,
    kinds: tuple[ActionKind, ...] = SPLIT,
    *,
    in_turn: bool = False,
) -> Iterator[Simulation]:
    """Every order of every rank with every order of the others, as far as they run and fit."""
    rows = [
        rank_orders(
            shape.stages_of(rank),
            shape.units,
            shape.sequence_chunks,
            kinds,
            in_turn=in_turn,
        )
        for rank in range(shape.ranks)
    ]
    for actions in product(*rows):
        schedule = replace(shape, actions=actions)
        if fits(schedule, room):
            with suppress(ScheduleError):  # orders that dead-lock are no orders
                yield simulate(schedule, durations)


def fits(schedule: Schedule, room: Room) -> bool:
    """No rank ever holds more than it has room for."""
    return all(
        sum(
            count * room.sizes[stage]
            for stage, count in zip(schedule.stages_of(rank), held, strict=True)
        )
        <= most
        for rank, most in enumerate(room.capacities)
        for held in in_flight_vectors(schedule)[rank]
    )
