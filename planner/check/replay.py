"""Replay of the plan's actions: when each rank ends, and what it holds.

(W1)  a rank runs its list strictly in order, one action at a time
(W2)  F waits for F of the stage before it, B and I for B or I of the stage after
      it, each plus a transfer that delays nothing else; stages on one rank hand
      over without a transfer; W, and the last stage's B or I, wait for nothing
      (the rules of torch.distributed.pipelining)
(W3)  a joint pair starts when both its actions have their input, and ends as one
(W4)  a stage holds a micro-batch from F to the end of B, or of W if the backward
      is split
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.errors import ScheduleError


class Action(NamedTuple):
    """One stage computing one micro-batch, or one sequence chunk of it."""

    stage: int
    kind: str
    """F: forward, B: backward, I and W: gradients of inputs and weights."""
    unit: int
    """Micro-batch; with sequence chunks micro-batch x chunks + chunk."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.unit}"


Actions = Sequence[Sequence[Action]]
"""Per pipeline rank, in order."""


@dataclass(frozen=True, slots=True)
class StageDurations:
    """Nanoseconds of one stage, by sequence chunk."""

    forward: Sequence[int]
    backward_input: Sequence[int]
    """Includes recomputation."""
    backward_weight: Sequence[int]
    transfer: int
    """To the next stage, and of the gradient back from it."""

    def of(self, action: Action) -> int:
        """Return the duration of an action."""
        chunk = action.unit % len(self.forward)
        duration = 0
        if action.kind == "F":
            duration += self.forward[chunk]
        if action.kind in "BI":
            duration += self.backward_input[chunk]
        if action.kind in "BW":
            duration += self.backward_weight[chunk]
        return duration


def stage_owners(actions: Actions) -> dict[int, int]:
    """Return the pipeline rank of every stage that has actions."""
    return {action.stage: rank for rank, row in enumerate(actions) for action in row}


def replay(
    actions: Actions,
    stages: Sequence[StageDurations],
    joint: frozenset[Action] = frozenset(),
) -> list[int]:
    """Return the nanosecond at which each rank ends its last action.

    Args:
        actions: of every rank.
        stages: their durations.
        joint: actions that run as one with the action before them.

    Raises:
        ScheduleError: no rank can continue.
    """
    clock = [0] * len(actions)
    position = [0] * len(actions)
    owner = stage_owners(actions)
    made: dict[tuple[int, bool, int], int] = {}

    def arrival(action: Action) -> int | None:
        """Return when the input arrives; None: it is not made yet."""
        is_forward = action.kind == "F"
        source = action.stage + (-1 if is_forward else 1)
        if action.kind == "W" or not 0 <= source < len(stages):
            return 0
        time = made.get((source, is_forward, action.unit))
        if time is None or owner.get(source) == owner[action.stage]:
            return time
        return time + stages[min(source, action.stage)].transfer

    def run_next(rank: int) -> bool:
        """Run the next action of a rank, with its partner; False: it has to wait."""
        row, place = actions[rank], position[rank]
        is_pair = row[place + 1 : place + 2] and row[place + 1] in joint
        together = row[place : place + (2 if is_pair else 1)]
        inputs = [arrival(action) for action in together]
        arrived = [time for time in inputs if time is not None]
        if not together or len(arrived) < len(together):
            return False
        lasted = sum(stages[action.stage].of(action) for action in together)
        clock[rank] = max(clock[rank], *arrived) + lasted
        position[rank] += len(together)
        for action in together:
            if action.kind != "W":
                made[action.stage, action.kind == "F", action.unit] = clock[rank]
        return True

    is_moving = True
    while is_moving:
        is_moving = False
        for rank in range(len(actions)):
            while run_next(rank):
                is_moving = True
    _check_ended(actions, position)
    return clock


def _check_ended(actions: Actions, position: Sequence[int]) -> None:
    waiting = [
        f"{row[place]} on rank {rank}"
        for rank, (row, place) in enumerate(zip(actions, position, strict=True))
        if place < len(row)
    ]
    if waiting:
        raise ScheduleError(
            f"deadlock: {', '.join(waiting)} wait forever.",
            field="actions",
            hint="order the lists so that what an action waits for runs before it.",
        )


def peaks(row: Sequence[Action]) -> list[Counter[int]]:
    """Return the units of every stage that a rank holds before each release: (W4).

    Only releases after a forward are listed, and every combination once: one of them is
    the peak, whatever the stages' units weigh.
    """
    held: Counter[int] = Counter()
    found: dict[tuple[tuple[int, int], ...], Counter[int]] = {}
    is_rising = False
    for action in row:
        if action.kind == "F":
            held[action.stage] += 1
            is_rising = True
        elif action.kind in "BW":
            if is_rising:
                found.setdefault(tuple(sorted(held.items())), held.copy())
            is_rising = False
            held[action.stage] -= 1
    return list(found.values())


def most_in_flight(row: Sequence[Action]) -> int:
    """Return the most units that a rank holds at once."""
    return max((held.total() for held in peaks(row)), default=0)
