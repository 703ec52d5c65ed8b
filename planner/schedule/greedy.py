"""List scheduling: every rank runs, as soon as it is free, the ready action that stands first in a priority.

An order for stages on any ranks with any number of micro-batches under way, from which a search may start. Ties are
broken by rank and stage, so the order is a pure function of its arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.schedule.actions import Action, ActionKind


@dataclass(slots=True)
class _Rank:
    """What a rank may run next, and what it has run."""

    ready: list[tuple[tuple[int, int], Action]] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    is_busy: bool = False


class _Run:
    """One simulation, in which each rank decides when it is free."""

    def __init__(
        self,
        stage_ranks: Sequence[int],
        micro_batches: int,
        limit: int,
        times: tuple[int, int],
    ) -> None:
        self._owners, self._limit, self._times = stage_ranks, limit, times
        self._ranks = [_Rank() for _ in range(max(stage_ranks) + 1)]
        self._ends: list[tuple[int, int, Action]] = []
        self._left = list(range(micro_batches))

    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The order of actions on every rank."""
        for _ in range(self._limit):
            self._admit()
        now = 0
        while True:
            for number, rank in enumerate(self._ranks):
                self._start(number, rank, now)
            if not self._ends:
                return tuple(tuple(rank.actions) for rank in self._ranks)
            now = self._ends[0][0]
            while self._ends and self._ends[0][0] == now:
                _, number, action = heapq.heappop(self._ends)
                self._ranks[number].is_busy = False
                self._follow(action)

    def _start(self, number: int, rank: _Rank, now: int) -> None:
        if rank.is_busy or not rank.ready:
            return
        _, action = heapq.heappop(rank.ready)
        rank.actions.append(action)
        rank.is_busy = True
        lasting = self._times[action.kind is not ActionKind.FORWARD]
        heapq.heappush(self._ends, (now + lasting, number, action))

    def _follow(self, action: Action) -> None:
        """Make ready what waited for this action."""
        stage, kind, micro_batch = action
        if kind is ActionKind.FORWARD and stage + 1 < len(self._owners):
            self._make_ready(Action(stage + 1, kind, micro_batch))
        elif kind is ActionKind.FORWARD:
            self._make_ready(Action(stage, ActionKind.BACKWARD, micro_batch))
        elif stage:
            self._make_ready(Action(stage - 1, kind, micro_batch))
        else:
            self._admit()

    def _admit(self) -> None:
        if self._left:
            self._make_ready(Action(0, ActionKind.FORWARD, self._left.pop(0)))

    def _make_ready(self, action: Action) -> None:
        """Backwards first, oldest micro-batch first; then the forward that is furthest down the pipeline."""
        is_forward = action.kind is ActionKind.FORWARD
        urgency = (1, -action.stage) if is_forward else (0, action.micro_batch)
        heapq.heappush(self._ranks[self._owners[action.stage]].ready, (urgency, action))


def backward_first(
    stage_ranks: Sequence[int],
    micro_batches: int,
    *,
    limit: int,
    times: tuple[int, int] = (1, 2),
) -> tuple[tuple[Action, ...], ...]:
    """Orders in which backwards go first, then forwards that are furthest down.

    Args:
        stage_ranks: pipeline rank of each stage.
        micro_batches: of one step.
        limit: micro-batches that may be under way at once.
        times: of a forward and a full backward of one stage.
    """
    return _Run(stage_ranks, micro_batches, limit, times).orders()
