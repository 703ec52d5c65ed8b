"""The longest path through a schedule, as a linear form of the durations.

A schedule's length is the largest over all paths of its graph; each path is a sum of durations:

    length >= sum_s n_F[s] forward[s] + n_B[s] (recompute + backward_input + backward_weight)[s]
              + n_I[s] (recompute + backward_input)[s] + n_W[s] backward_weight[s]
              + sum_b t_F[b] transfer_forward[b] + t_B[b] transfer_backward[b] + tail[rank]               (1)

(and likewise the works that only some schedules have: recomputation apart from its backward, and paired actions),

with equality at the durations that the path was found for, and a valid lower bound at all others, because the graph
does not depend on durations. That makes (1) a cut: a search over durations may add it and never lose a solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from planner.errors import LayoutError
from planner.schedule.actions import Schedule
from planner.schedule.durations import Durations
from planner.schedule.graph import Graph, check_stages, graph_of
from planner.schedule.needs import NOTHING, WORKS

_WORKS = (
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "recompute",
    "plain_backward",
    "paired_forward",
    "paired_backward",
)
"""Counts of a path in the order of `planner.schedule.needs`' works."""


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """A longest path: its length, and how often each duration stands on it.

    With sequence chunks, what is counted per stage is counted per stage and chunk, at ``stage * chunks + chunk``.
    """

    length: float
    """Sum of all durations on the path, and the tail of its rank."""
    rank: int
    """Where the path ends."""
    forward: tuple[int, ...]
    """Per stage: F on the path."""
    backward: tuple[int, ...]
    """Per stage: full B, each of recompute + backward_input + backward_weight."""
    backward_input: tuple[int, ...]
    """Per stage: split I, each of recompute + backward_input."""
    backward_weight: tuple[int, ...]
    """Per stage: split W."""
    transfer_forward: tuple[int, ...]
    """Per boundary: activations; never counted between stages of one rank."""
    transfer_backward: tuple[int, ...]
    """Per boundary: gradients."""
    recompute: tuple[int, ...] = ()
    """Per stage: recomputation ahead of a backward (`Schedule.recompute_stop`)."""
    plain_backward: tuple[int, ...] = ()
    """Per stage: full B of those schedules, without recompute."""
    paired_forward: tuple[int, ...] = ()
    """Per stage: F that overlaps with the action before it, each of forward - overlap."""
    paired_backward: tuple[int, ...] = ()
    """Per stage: B that overlaps with the action before it."""

    def evaluate(self, durations: Durations, tails: Sequence[float] = ()) -> float:
        """Right side of (1): no schedule of this order is shorter at these durations."""
        seconds = self.seconds_of(durations)
        lasted: float = sum(map(mul, self.counts, seconds))
        return lasted + (tails[self.rank] if tails else 0)

    @property
    def counts(self) -> list[int]:
        """How often the path has each of `seconds_of`."""
        works = [count for name in _WORKS for count in getattr(self, name)]
        nothing = [0] * len(self.forward)
        transfers = (0, *self.transfer_forward, *self.transfer_backward)
        return [*works, *nothing, *transfers]

    def seconds_of(self, durations: Durations) -> list[float]:
        """Times of every action and transfer, in the order of `counts`."""
        chunks = len(self.forward) // (len(self.transfer_forward) + 1)
        return [*durations.of_actions(chunks), *durations.of_transfers()]


def critical_path(
    schedule: Schedule,
    durations: Durations,
    tails: Sequence[float] = (),
    *,
    rank: int | None = None,
) -> CriticalPath:
    """The longest path of a schedule.

    Args:
        schedule: what runs in which order.
        durations: how long.
        tails: per rank, time after the rank's last action (gradient reduction, optimizer); empty: none.
        rank: where the path shall end; None: on the rank that ends last, tail included.

    Raises:
        ScheduleError: actions that are missing, doubled, out of order, or dead-lock.
        LayoutError: durations or tails for another number of stages or ranks.
    """
    check_stages(schedule, durations)
    _check_tails(schedule, tails)
    graph = graph_of(schedule)
    _, ends = graph.earliest(durations)
    tails = tails or (0,) * schedule.ranks
    finish = [
        ends[actions[-1]] + tail
        for actions, tail in zip(graph.rank_actions, tails, strict=True)
    ]
    last = max(range(schedule.ranks), key=finish.__getitem__) if rank is None else rank
    works, transfers = _count(graph, durations, ends, graph.rank_actions[last][-1])
    stages = schedule.stages
    per_work = stages * schedule.sequence_chunks
    counts = {
        name: tuple(works[at * per_work : (at + 1) * per_work])
        for at, name in enumerate(_WORKS)
    }
    return CriticalPath(
        length=finish[last],
        rank=last,
        transfer_forward=tuple(transfers[1:stages]),
        transfer_backward=tuple(transfers[stages:]),
        **counts,
    )


def _count(
    graph: Graph, durations: Durations, ends: Sequence[float], last: int
) -> tuple[list[int], list[int]]:
    """Walk back from an action along what each one really waited for; how often each work and transfer is met."""
    seconds = durations.of_transfers()
    works, transfers = [0] * (WORKS * graph.stages * graph.chunks), [0] * len(seconds)
    action = last
    while action != NOTHING:
        works[graph.work[action]] += 1
        producer, transfer = graph.producer[action], graph.transfer[action]
        # The producer on a tie: at the start of a rank's list it leads on to the stages before, for a stronger cut.
        if (
            producer != NOTHING
            and ends[producer] + seconds[transfer] >= ends[graph.before[action]]
        ):
            transfers[transfer] += 1
            action = producer
        else:
            action = graph.before[action]
    return works, transfers


def _check_tails(schedule: Schedule, tails: Sequence[float]) -> None:
    if tails and len(tails) != schedule.ranks:
        raise LayoutError(
            f"tails has {len(tails)} values for {schedule.ranks} ranks.",
            field="tails",
            hint="give one per rank.",
        )
