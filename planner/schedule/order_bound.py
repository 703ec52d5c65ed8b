"""How fast any order of some stages can be, told without searching one.

low(r) is the lowest stage of rank r; f, i and w are the times of a unit's F, of the backward that hands its gradient on
(I, or B where backwards are not split) and of W (nothing where they are not), of a micro-batch's first chunk; c are the
transfers between ranks:

    down(q, r)  = sum of f(k) + c(k) over low(q) <= k < low(r): F of low(q), until the same unit may start on low(r)
    up(r, q)    = sum of c(k) + i(k) over low(q) <= k < low(r): the gradient of low(r), on its way to that of low(q)
    idle(r)     = max(0, time from F(low(r), 0) until its gradient can be back - limit(r) f): with one stage per rank
                  and whole sequences, all that the rank may do in between are `limit` forwards

    (P1)  end(r) >= down(0, r) + idle(r) + all F, I and W of rank r
    (P2)  end(q) >= down(0, r) + idle(r) + all F and I of rank r + up(r, q) + w(low(q))   for q < r: a rank's last I is
          that of its lowest stage, and that gradient still has to go up
    (P3)  end(q) >= the way of one unit down through all stages and up again to low(q), + w(low(q))
    (P4)  a unit of stage s is held for hold(s) at least, its way as in (P3) from there on; with one stage per rank F(u)
          waits for W(u - limit): end(q) >= down(0, q) + M / limit(q), rounded up, x hold(q); with several, what is held
          for how long must fit into the room: end(q) >= down(0, q) + M x sum of size(s) x hold(s) / room(q)

A rank's tail is added to its end. Without a barrier between steps (`Objective.SPAN`), a rank q counts from its own
first forward on: down(0, q) less. All of this holds because every order can be sorted to run each kind of a stage in
micro-batch order without loss (equation (3) of `planner.schedule.order_model`).

Source: the bounds of job-shop scheduling by heads and tails (Carlier 1982), for the precedences of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from planner.schedule.actions import Action, ActionKind, Schedule
from planner.schedule.durations import Durations
from planner.schedule.room import Room

SPLIT = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
"""What every unit of every stage runs where backwards are split."""
WHOLE = (ActionKind.FORWARD, ActionKind.BACKWARD)
"""And where they are not."""
_WORKS = {kind: place for place, kind in enumerate(WHOLE + SPLIT[1:])}
"""Places of the kinds in `Durations.of_actions`."""


@dataclass(frozen=True)
class Lengths:
    """How long every action and transfer of a shape lasts, in any unit of time."""

    shape: Schedule
    actions: Sequence[float]
    """As `Durations.of_actions` has them, per chunk."""
    transfers: Sequence[float]
    """As `Durations.of_transfers` has them."""
    kinds: tuple[ActionKind, ...] = SPLIT
    """What a unit runs: `SPLIT` or `WHOLE`."""

    @classmethod
    def of(
        cls,
        shape: Schedule,
        durations: Durations,
        kinds: tuple[ActionKind, ...] = SPLIT,
    ) -> Lengths:
        """In the unit of the durations."""
        return cls(
            shape,
            durations.of_actions(shape.sequence_chunks),
            durations.of_transfers(),
            kinds,
        )

    def action(self, action: Action) -> float:
        """Of one action."""
        return self.unit(
            action.stage, action.kind, action.micro_batch % self.shape.sequence_chunks
        )

    def unit(self, stage: int, kind: ActionKind, chunk: int = 0) -> float:
        """Of one stage and sequence chunk."""
        return self.actions[
            (_WORKS[kind] * self.shape.stages + stage) * self.shape.sequence_chunks
            + chunk
        ]

    def forward_transfer(self, boundary: int) -> float:
        """Of an output to the next stage; nothing where that is on the same rank."""
        return self._transfer(boundary, 1)

    def backward_transfer(self, boundary: int) -> float:
        """Of a gradient from the next stage."""
        return self._transfer(boundary, self.shape.stages)

    def _transfer(self, boundary: int, first: int) -> float:
        owners = self.shape.stage_ranks
        return (
            0
            if owners[boundary] == owners[boundary + 1]
            else self.transfers[first + boundary]
        )

    def work(self, rank: int, kinds: Sequence[ActionKind]) -> float:
        """All actions of these kinds of a rank."""
        chunks = range(self.shape.sequence_chunks)
        stages = self.shape.stages_of(rank)
        return self.shape.micro_batches * sum(
            self.unit(s, kind, c) for s in stages for kind in kinds for c in chunks
        )

    def down(self, first: int, last: int) -> float:
        """From the start of a unit's F on one stage until it may start on a later one."""
        return self._downs[last] - self._downs[first]

    def up(self, first: int, last: int) -> float:
        """From the gradient of the later stage until that of the earlier one."""
        return self._ups[last] - self._ups[first]

    @cached_property
    def _downs(self) -> list[float]:
        """Until a unit's F may start on every stage."""
        boundaries = range(self.shape.stages - 1)
        return list(
            accumulate(
                (self.unit(k, SPLIT[0]) + self.forward_transfer(k) for k in boundaries),
                initial=0,
            )
        )

    @cached_property
    def _ups(self) -> list[float]:
        """From every stage's gradient until the first one's."""
        boundaries = range(self.shape.stages - 1)
        return list(
            accumulate(
                (
                    self.backward_transfer(k) + self.unit(k, self.kinds[1])
                    for k in boundaries
                ),
                initial=0,
            )
        )

    def held(self, stage: int) -> float:
        """A unit of a stage, from F until it is released, at least."""
        last = self.shape.stages - 1
        turn = self.unit(last, SPLIT[0]) + self.unit(last, self.kinds[1])
        return (
            self.down(stage, last) + turn + self.up(stage, last) + self.released(stage)
        )

    def released(self, stage: int) -> float:
        """What is left of a unit when its gradient has been handed on: W, where backwards are split."""
        return self.unit(stage, self.kinds[2]) if self.kinds == SPLIT else 0


@dataclass(frozen=True)
class OrderBound:
    """Equations (P1) to (P3).

    Args:
        lengths: of the stages.
        room: what ranks may hold.
        tails: per rank, time after its last action; empty: none.
        has_barrier: all ranks start together; else each counts from its own start.
    """

    lengths: Lengths
    room: Room
    tails: Sequence[float] = ()
    has_barrier: bool = True

    def value(self) -> float:
        """No order takes less, in the unit of the lengths."""
        ranks = range(self.lengths.shape.ranks)
        return max(
            self._end(rank) + (self.tails[rank] if self.tails else 0) for rank in ranks
        )

    def _end(self, rank: int) -> float:
        """The latest of all equations for a rank's last action."""
        lengths, lows = self.lengths, self._lows
        low = lows[rank]
        ends = [
            self._idle(rank) + lengths.work(rank, lengths.kinds),
            lengths.held(low),
            self._turned_over(rank),
        ]
        for other in range(rank + 1, lengths.shape.ranks):
            way = (
                lengths.down(low, lows[other])
                + lengths.up(low, lows[other])
                + lengths.released(low)
            )
            ends.append(self._until_gradients[other] + way)
        return max(ends) + (lengths.down(0, low) if self.has_barrier else 0)

    @cached_property
    def _lows(self) -> list[int]:
        """Lowest stage of every rank."""
        shape = self.lengths.shape
        return [shape.stages_of(rank)[0] for rank in range(shape.ranks)]

    @cached_property
    def _until_gradients(self) -> list[float]:
        """Per rank: from its first F until its last gradient."""
        kinds = self.lengths.kinds[:2]
        return [
            self._idle(rank) + self.lengths.work(rank, kinds)
            for rank in range(self.lengths.shape.ranks)
        ]

    def _turned_over(self, rank: int) -> float:
        """Equation (P4), from the rank's first F on."""
        lengths, shape = self.lengths, self.lengths.shape
        if is_plain(shape):
            return -(
                -shape.micro_batches // max(1, self.room.most_units(shape, rank))
            ) * lengths.held(rank)
        if shape.sequence_chunks > 1:
            return 0
        held = sum(
            self.room.sizes[stage] * lengths.held(stage)
            for stage in shape.stages_of(rank)
        )
        return shape.micro_batches * held // max(1, self.room.capacities[rank])

    def _idle(self, rank: int) -> float:
        lengths = self.lengths
        shape = lengths.shape
        if not is_plain(shape):
            return 0
        last, forward = shape.stages - 1, lengths.unit(rank, SPLIT[0])
        # The gradient of the stage behind is back when its own backward has ended and the transfer has.
        wait = lengths.down(rank, last) + lengths.unit(last, SPLIT[0])
        if rank < last:
            wait += (
                lengths.unit(last, lengths.kinds[1])
                + lengths.up(rank + 1, last)
                + lengths.backward_transfer(rank)
            )
        return max(0, wait - self.room.most_units(shape, rank) * forward)


def is_plain(shape: Schedule) -> bool:
    """One stage per rank, and whole sequences."""
    return shape.virtual_stages == shape.sequence_chunks == 1
