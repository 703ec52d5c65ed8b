"""How transfers between ranks behave, and when each one runs.

    overlapped  a transfer starts when its producer ends and delays nobody but its consumer: compute goes on beside it,
                and links carry any number at once (asynchronous sends, with bandwidth to spare)
    queued      as overlapped, but a link (an ordered pair of ranks) carries one transfer at a time, in order
    blocking    the sending rank does nothing else until its transfer has arrived (synchronous sends)

Whatever a link carries comes from one rank, which runs in list order: the order on a link is known beforehand, and all
three are longest paths of a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from planner.schedule.actions import Action, ActionKind
from planner.schedule.durations import Durations
from planner.schedule.graph import Graph
from planner.schedule.needs import NOTHING

if TYPE_CHECKING:
    from planner.schedule.simulate import Simulation


class TransferMode(StrEnum):
    """What a transfer holds up besides its consumer."""

    OVERLAPPED = "overlapped"
    QUEUED = "queued"
    BLOCKING = "blocking"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor on its way from one rank to another."""

    producer: Action
    source: int
    """Rank that sends."""
    target: int
    """Rank that receives."""
    target_stage: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Flow:
    """When every action of a graph runs and sends. All lists end with the value of `NOTHING`."""

    starts: list[float]
    ends: list[float]
    free: list[float]
    """By action: when its rank may go on."""
    arrivals: list[float]
    """By action: when what it made is where it is needed."""
    behind: list[int]
    """By action: the one whose transfer its own had to let pass, or `NOTHING`."""

    @classmethod
    def of(cls, graph: Graph, durations: Durations, mode: TransferMode) -> Flow:
        """Earliest times."""
        made = _empty(len(graph.work))
        lengths, seconds = durations.of_actions(graph.chunks), durations.of_transfers()
        sends = _sends(graph)
        last_on_link: dict[tuple[int, int], int] = {}
        for action, (before, producer, work) in enumerate(
            zip(graph.before, graph.producer, graph.work, strict=True)
        ):
            start = max(made.free[before], made.arrivals[producer])
            end = start + lengths[work]
            transfer, link = sends.get(action, (0, (0, 0)))
            leaves = end
            if mode is TransferMode.QUEUED and seconds[transfer]:
                ahead = last_on_link.get(link, NOTHING)
                if made.arrivals[ahead] > end:
                    leaves, made.behind[action] = made.arrivals[ahead], ahead
                last_on_link[link] = action
            made.starts[action], made.ends[action] = start, end
            made.arrivals[action] = leaves + seconds[transfer]
            made.free[action] = (
                made.arrivals[action] if mode is TransferMode.BLOCKING else end
            )
        return made


def _empty(actions: int) -> Flow:
    def zeros() -> list[float]:
        return [0] * (actions + 1)

    return Flow(zeros(), zeros(), zeros(), zeros(), behind=[NOTHING] * (actions + 1))


def _sends(graph: Graph) -> dict[int, tuple[int, tuple[int, int]]]:
    """By action that sends: index into `Durations.of_transfers`, and the link."""
    return {
        producer: (transfer, (graph.rank[producer], graph.rank[action]))
        for action, (producer, transfer) in enumerate(
            zip(graph.producer, graph.transfer, strict=True)
        )
        if transfer
    }


def transfers_of(simulation: Simulation, rank: int) -> Iterator[Transfer]:
    """What a rank sends, in order, as far as it takes time."""
    schedule, mode = simulation.schedule, simulation.transfer_mode
    free: dict[int, float] = {}
    for action, leaves in _departures(simulation, rank):
        target_stage, seconds = _destination(simulation, action)
        target = schedule.owner(target_stage, action.micro_batch) if seconds else rank
        if target == rank:
            continue
        link = target if mode is TransferMode.QUEUED else rank
        start = (
            leaves
            if mode is TransferMode.OVERLAPPED
            else max(leaves, free.get(link, leaves))
        )
        free[link] = start + seconds
        yield Transfer(action, rank, target, target_stage, start, free[link])


def _departures(simulation: Simulation, rank: int) -> Iterator[tuple[Action, float]]:
    """Actions with the time at which their output may leave; both of a joint pair leave when the pair has ended."""
    schedule = simulation.schedule
    actions, ends = schedule.actions[rank], simulation.finish_seconds[rank]
    for place, (action, end) in enumerate(zip(actions, ends, strict=True)):
        following = actions[place + 1] if place + 1 < len(actions) else None
        if schedule.joint_pairs and following in schedule.paired:
            continue
        yield action, end
        if schedule.joint_pairs and action in schedule.paired:
            yield actions[place - 1], end


def _destination(simulation: Simulation, action: Action) -> tuple[int, float]:
    """The stage that needs what this action made, and the seconds to it; 0 seconds when nobody does."""
    durations, stage = simulation.durations, action.stage
    if action.kind is ActionKind.FORWARD:
        return stage + 1, durations.transfer_forward[
            stage
        ] if stage + 1 < durations.stages else 0
    if action.kind is ActionKind.BACKWARD_WEIGHT or stage == 0:
        return stage, 0
    return stage - 1, durations.transfer_backward[stage - 1]
