"""The eight phases that DualPipe and DualPipeV share.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1, and its published DualPipe and DualPipeV.
A rank runs micro-batches of two ways at once. It pairs the forward of one way with the backward of the other, which
hides the communication of each behind the compute of the other (`Durations.overlap` says how much).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from planner.schedule.actions import Action, ActionKind

Written = tuple[Action, bool]
"""An action, and whether it is paired with the one before it."""


@dataclass(frozen=True, slots=True)
class Way:
    """One of the two ways through a rank."""

    stage: int
    first: int
    """Number of its first micro-batch."""


class _Writer:
    """Writes actions of both ways; forwards and backwards of each count their own micro-batches up."""

    def __init__(self, ways: tuple[Way, Way]) -> None:
        self._ways = ways
        self._next = {
            (way, is_forward): ways[way].first
            for way in (0, 1)
            for is_forward in (True, False)
        }
        self._put_off: deque[Action] = deque()

    def forward(self, way: int) -> Iterator[Written]:
        """The next forward."""
        yield self._take(way, ActionKind.FORWARD), False

    def backward(
        self, way: int, *, split: bool = False, paired: bool = False
    ) -> Iterator[Written]:
        """The next backward; split, its weight gradient is put off."""
        action = self._take(
            way, ActionKind.BACKWARD_INPUT if split else ActionKind.BACKWARD
        )
        if split:
            self._put_off.append(action._replace(kind=ActionKind.BACKWARD_WEIGHT))
        yield action, paired

    def weight(self) -> Iterator[Written]:
        """The weight gradient that has been put off longest."""
        yield self._put_off.popleft(), False

    def pair(self, way: int) -> Iterator[Written]:
        """A forward, and beside it a backward of the other way."""
        yield from self.forward(way)
        yield from self.backward(1 - way, paired=True)

    def _take(self, way: int, kind: ActionKind) -> Action:
        counter = way, kind is ActionKind.FORWARD
        micro_batch = self._next[counter]
        self._next[counter] += 1
        return Action(self._ways[way].stage, kind, micro_batch)


def eight_phases(
    ways: tuple[Way, Way], ranks: int, rank: int, micro_batches: int
) -> Iterator[Written]:
    """Actions of one rank.

    Args:
        ways: the one that this rank runs ahead, and the other.
        ranks: length of one way, in ranks.
        rank: place on it.
        micro_batches: of each way; at least twice the ranks.
    """
    writer = _Writer(ways)
    behind = ranks - rank - 1
    yield from _warm_up(writer, rank, behind)
    for turn in range(micro_batches - 2 * ranks + rank + 1):
        # The rank where the ways meet does not pair its first: its backward waits for the forward just before.
        if turn == 0 and rank == ranks - 1:
            yield from writer.forward(0)
            yield from writer.backward(1)
        else:
            yield from writer.pair(0)
        yield from writer.pair(1)
    for _ in range(behind):
        yield from writer.backward(1)
        yield from writer.pair(1)
    yield from _cool_down(writer, rank, behind)


def _warm_up(writer: _Writer, rank: int, behind: int) -> Iterator[Written]:
    for _ in range(2 * behind):
        yield from writer.forward(0)
    for _ in range(rank + 1):
        yield from writer.forward(0)
        yield from writer.forward(1)
    for _ in range(behind):
        yield from writer.backward(1, split=True)
        yield from writer.weight()
        yield from writer.forward(1)


def _cool_down(writer: _Writer, rank: int, behind: int) -> Iterator[Written]:
    """Backwards only; from the middle of the first loop on they are split, and weight gradients fill the end."""
    for index in range(2 * (rank + 1)):
        yield from writer.backward(1 - index % 2, split=index > rank)
    for _ in range(behind):
        yield from writer.weight()
        yield from writer.backward(0, split=True)
    for _ in range(rank + 1):
        yield from writer.weight()
