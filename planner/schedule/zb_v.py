"""ZB-V: two stages per rank in a V, split backwards; the memory of 1F1B's first rank, and no bubble between steps.

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", with the action order of torch's
ScheduleZBVZeroBubble. The order is made for at least 2 P - 1 micro-batches; with fewer it is the same order, cut.

P ranks, M >= 2 P - 1 micro-batches, stages with equal f = i = w (half a rank's), no transfer time:
    span       6 M f
    makespan   6 M f + (P - 1) f
    in flight  2 P units of half a micro-batch on every rank
    transfers  4 M (P - 1)
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.schedule.actions import Action, ActionKind
from planner.schedule.entry import ScheduleEntry, Shape, v_placement

KINDS = {kind.value: kind for kind in ActionKind}


def rank_actions(shape: Shape, rank: int) -> tuple[Action, ...]:
    """The order for enough micro-batches, without those that the step does not have."""
    enough = max(shape.micro_batches, 2 * shape.ranks - 1)
    writer = _Writer(down=rank, up=2 * shape.ranks - 1 - rank)
    return tuple(
        action for action in _order(writer, shape.ranks, rank, enough) if action.micro_batch < shape.micro_batches
    )


class _Writer:
    """Writes actions of a rank's two stages, each kind counting its own micro-batches up from 0."""

    def __init__(self, down: int, up: int) -> None:
        self._stages = {"down": down, "up": up}
        self._next = {(way, kind): 0 for way in self._stages for kind in KINDS}

    def done(self, way: str, kind: str) -> int:
        """Actions of this kind written so far."""
        return self._next[way, kind]

    def write(self, way: str, kinds: str) -> Iterator[Action]:
        """The next action of each kind, e.g. ``FIW``, on the way down or up."""
        for kind in kinds:
            micro_batch = self._next[way, kind]
            self._next[way, kind] = micro_batch + 1
            yield Action(self._stages[way], KINDS[kind], micro_batch)


def _order(writer: _Writer, ranks: int, rank: int, micro_batches: int) -> Iterator[Action]:
    yield from _warm_up(writer, ranks, rank)
    yield from _steady(writer, micro_batches)
    yield from _cool_down(writer, ranks, rank, micro_batches)


def _warm_up(writer: _Writer, ranks: int, rank: int) -> Iterator[Action]:
    for _ in range(2 * (ranks - rank) - 1):
        yield from writer.write("down", "F")
    for _ in range(rank):
        yield from writer.write("up", "F")
        yield from writer.write("down", "F")
    for _ in range(ranks - rank):
        yield from writer.write("up", "FIW")


def _steady(writer: _Writer, micro_batches: int) -> Iterator[Action]:
    while writer.done("up", "F") < micro_batches:
        if writer.done("down", "F") < micro_batches:
            yield from writer.write("down", "F")
        yield from writer.write("down", "IW")
        yield from writer.write("up", "FIW")


def _cool_down(writer: _Writer, ranks: int, rank: int, micro_batches: int) -> Iterator[Action]:
    for _ in range(rank):
        yield from writer.write("down", "I")
        yield from writer.write("up", "I")
    for _ in range(ranks - rank):
        yield from writer.write("down", "IW")
    yield from writer.write("up", "W" * (micro_batches - writer.done("up", "W")))
    yield from writer.write("down", "W" * (micro_batches - writer.done("down", "W")))


ZB_V = ScheduleEntry(
    name="zb-v",
    summary="two stages per rank in a V with split backwards: the memory of 1f1b's first rank, hardly any bubble",
    rank_actions=rank_actions,
    aliases=("zbvzerobubble",),
    stage_ranks=v_placement,
    least_virtual_stages=2,
    most_virtual_stages=2,
    runnable=True,
)
