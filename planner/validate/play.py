"""Playing the plan's actions: when does each rank end, and what does it hold?

(W1)  a rank runs its list strictly in order, one action at a time
(W2)  F waits for F of the stage before, B or I for B or I of the stage behind, each with a transfer in between that
      delays nobody else; stages on one rank hand over without a transfer; W, and the last stage's B or I, wait for
      nothing but their place in the list (the rules of torch.distributed.pipelining)
(W3)  a joint pair starts when both its actions have their input, and hands on what both made when both have ended
(W4)  a micro-batch of a stage is held from F to the end of B, or of W when the backward is split
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.errors import ScheduleError


class Action(NamedTuple):
    """One stage computing one micro-batch, or one sequence chunk of it."""

    stage: int
    kind: str
    micro_batch: int
    """With sequence chunks: micro-batch x chunks + chunk."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Actions = Sequence[Sequence[Action]]
"""Per pipeline rank, in order."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Nanoseconds of one stage and micro-batch."""

    forward: int
    backward_input: int
    """Recomputation included."""
    backward_weight: int
    transfer: int
    """To the next stage, and of the gradient back from it."""
    later: tuple[StageTimes, ...] = ()
    """Of the sequence chunks behind the first one, when sequences are cut."""

    def of(self, kind: str, unit: int) -> int:
        """How long an action of this kind lasts."""
        chunk = unit % (1 + len(self.later))
        if chunk > 0:
            return self.later[chunk - 1].of(kind, 0)
        backward = {
            "I": self.backward_input,
            "W": self.backward_weight,
            "B": self.backward_input + self.backward_weight,
        }
        return self.forward if kind == "F" else backward[kind]


def end_nanoseconds(
    actions: Actions,
    stages: Sequence[StageTimes],
    pairs: frozenset[tuple[int, str, int]] = frozenset(),
) -> tuple[int, ...]:
    """When each rank ends its last action, by playing the lists: equations (W1) to (W3).

    Args:
        actions: of every rank.
        stages: how long they last.
        pairs: actions that run as one with the action before them.

    Raises:
        ScheduleError: no rank can go on.
    """
    play = _Play(actions, stages, pairs)
    while any(
        position < len(one) for position, one in zip(play.place, actions, strict=True)
    ):
        moved = [play.advance(rank) for rank in range(len(actions))]
        if not any(moved):
            raise _dead_lock(actions, play.place)
    return tuple(play.clock)


class _Wait(NamedTuple):
    """What an action of one stage and kind waits for, and how long it lasts."""

    lasts: tuple[int, ...]
    """By sequence chunk."""
    source: tuple[int, bool] | None
    """Stage that makes its input, and whether that is an output or a gradient; None: it waits for nothing."""
    transfer: int


class _Play:
    """The state of all ranks."""

    def __init__(
        self,
        actions: Actions,
        stages: Sequence[StageTimes],
        pairs: frozenset[tuple[int, str, int]],
    ) -> None:
        self.clock, self.place = [0] * len(actions), [0] * len(actions)
        self._actions, self._pairs = actions, pairs
        held_by = owners(actions)
        self._waits = {
            (stage, kind): _wait(stages, held_by, stage, kind)
            for stage in range(len(stages))
            for kind in "FBIW"
        }
        self._made: dict[tuple[int, bool, int], int] = {}
        """When the output (True) or the input gradient (False) of a stage and micro-batch is done."""

    def advance(self, rank: int) -> bool:
        """Run a rank's actions until one has to wait; did any run?"""
        first = self.place[rank]
        while together := self._next(rank):
            start, lasts = self.clock[rank], 0
            for stage, kind, unit in together:
                wait = self._waits[stage, kind]
                lasts += wait.lasts[unit % len(wait.lasts)]
                if wait.source is not None:
                    made = self._made.get((*wait.source, unit))
                    if made is None:
                        return self.place[rank] > first
                    start = max(start, made + wait.transfer)
            self.clock[rank] = start + lasts
            for stage, kind, unit in together:
                if kind != "W":
                    self._made[stage, kind == "F", unit] = start + lasts
            self.place[rank] += len(together)
        return self.place[rank] > first

    def _next(self, rank: int) -> Sequence[Action]:
        """The rank's next action, with the one that is paired with it."""
        one, place = self._actions[rank], self.place[rank]
        is_pair = self._pairs and place + 1 < len(one) and one[place + 1] in self._pairs
        return one[place : place + 2] if is_pair else one[place : place + 1]


def _wait(
    stages: Sequence[StageTimes], held_by: Mapping[int, int], stage: int, kind: str
) -> _Wait:
    """Equation (W2)."""
    source = stage - 1 if kind == "F" else stage + 1
    lasts = tuple(
        stages[stage].of(kind, chunk) for chunk in range(1 + len(stages[stage].later))
    )
    if kind == "W" or not 0 <= source < len(stages):
        return _Wait(lasts, None, 0)
    is_at_hand = held_by.get(source) == held_by.get(stage)
    return _Wait(
        lasts,
        (source, kind == "F"),
        0 if is_at_hand else stages[min(source, stage)].transfer,
    )


def owners(actions: Actions) -> Mapping[int, int]:
    """Pipeline rank of every stage that has actions."""
    return {action.stage: rank for rank, one in enumerate(actions) for action in one}


def _dead_lock(actions: Actions, place: Sequence[int]) -> ScheduleError:
    waiting = ", ".join(
        f"{one[position]} on rank {rank}"
        for rank, (one, position) in enumerate(zip(actions, place, strict=True))
        if position < len(one)
    )
    return ScheduleError(
        f"dead-lock: {waiting} wait forever.",
        field="actions",
        hint="order the lists so that what an action waits for runs before it.",
    )


def holdings_of(actions: Sequence[Action]) -> list[Counter[int]]:
    """Units of every stage of a rank before each release that follows a forward, every combination once."""
    held: Counter[int] = Counter()
    found: dict[tuple[tuple[int, int], ...], Counter[int]] = {}
    is_rising = False
    for action in actions:
        if action.kind == "F":
            held[action.stage] += 1
            is_rising = True
        elif action.kind in "BW":
            if is_rising:
                found.setdefault(tuple(sorted(held.items())), held.copy())
            is_rising = False
            held[action.stage] -= 1
    return list(found.values())


def held_per_stage(actions: Sequence[Action]) -> Counter[int]:
    """Units of every stage of a rank at the first moment at which it holds most: equation (W4)."""
    held: Counter[int] = Counter()
    most: Counter[int] = Counter()
    total = largest = 0
    for action in actions:
        change = {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        held[action.stage] += change
        total += change
        if total > largest:
            largest, most = total, held.copy()
    return most


def in_flight(actions: Sequence[Action]) -> int:
    """Most units that a rank holds at once."""
    return held_per_stage(actions).total()
