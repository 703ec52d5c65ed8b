"""A schedule as a graph: what every action waits for.

An action waits for the action before it on its rank, and for at most one other, its producer:

    F(s, m)         F(s - 1, m), and the transfer of its output
    B or I (s, m)   B or I (s + 1, m), and the transfer of its gradient
    W(s, m)         its own I, which stands before it on the same rank

(the rules of torch.distributed.pipelining's actions; Qi et al. 2023, section 3.1). Everything else about a schedule
is order. The graph does not depend on durations, so it is made and checked once per schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import LayoutError, ScheduleError
from planner.schedule.actions import Action, Schedule, without_collection
from planner.schedule.durations import Durations
from planner.schedule.kept import Kept
from planner.schedule.levels import LEAST_WIDTH, Levels, Nodes, in_step, in_turn, width
from planner.schedule.needs import NOTHING, Needs, producers_of, read_output
from planner.schedule.rows import Numbers
from planner.schedule.validity import check_schedule, wrong

Times = tuple[Sequence[float], Sequence[float]]
"""Start and end of every node; both end with the 0 of `NOTHING`."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """All nodes of a schedule in columns, each standing after everything that it waits for.

    Nodes are its actions, and those of `planner.schedule.needs` that pairs and recomputation add.
    """

    stages: int
    chunks: int
    before: Sequence[int]
    """By node: the one before it on its rank, or `NOTHING`."""
    producer: Sequence[int]
    """By node: the one on another stage that it waits for, or `NOTHING`."""
    transfer: Sequence[int]
    """By node: index into `Durations.of_transfers` of what its producer sends."""
    work: Sequence[int]
    """By node: index into `Durations.of_actions`."""
    rank: Sequence[int]
    """By node: where it runs."""
    rank_actions: Sequence[Sequence[int]]
    """Per rank, its actions in order."""
    levels: Levels | None
    """Of a wide graph."""

    def earliest(self, durations: Durations) -> Times:
        """Earliest start and end of every node. The latest answer is kept: whoever simulates asks for paths next."""
        for graph, known, times in _latest[:]:
            if graph is self and known is durations:
                return times
        lengths, transfers = durations.of_actions(self.chunks), durations.of_transfers()
        times = self._by_levels(lengths, transfers) or self._one_by_one(
            lengths, transfers
        )
        _latest[:] = [(self, durations, times)]
        return times

    def _by_levels(
        self, lengths: Sequence[float], transfers: Sequence[float]
    ) -> Times | None:
        return self.levels.earliest(lengths, transfers) if self.levels else None

    def _one_by_one(
        self, lengths: Sequence[float], transfers: Sequence[float]
    ) -> Times:
        starts: list[float] = [0] * (len(self.work) + 1)
        ends: list[float] = [0] * (len(self.work) + 1)
        waits = zip(self.before, self.producer, self.transfer, self.work, strict=True)
        for node, (before, producer, transfer, work) in enumerate(waits):
            start = ends[before]
            ready = ends[producer] + transfers[transfer]
            if ready > start:
                start = ready
            starts[node] = start
            ends[node] = start + lengths[work]
        return starts, ends


_latest: list[tuple[Graph, Durations, Times]] = []


def graph_of(schedule: Schedule) -> Graph:
    """The graph of a schedule; the latest ones are kept.

    Raises:
        ScheduleError: actions that are missing, doubled, out of order, on the wrong rank, or dead-lock.
    """
    return _kept(schedule)


def check_stages(schedule: Schedule, durations: Durations) -> None:
    """Raise `LayoutError` when the durations are for another number of stages or chunks."""
    if durations.stages != schedule.stages:
        raise LayoutError(
            f"durations of {durations.stages} stages for a schedule of {schedule.stages}.",
            field="durations",
            hint=f"give {schedule.stages} values, one per stage.",
        )
    if durations.sequence_chunks not in (1, schedule.sequence_chunks):
        raise LayoutError(
            f"durations of {durations.sequence_chunks} sequence chunks for a schedule of {schedule.sequence_chunks}.",
            field="durations",
            hint=f"give one value per stage, or {schedule.sequence_chunks}.",
        )


def make_graph(schedule: Schedule, *, by_levels: bool | None = None) -> Graph:
    """The graph of a schedule, made anew; raises as `graph_of`.

    Args:
        schedule: what runs in which order.
        by_levels: find the order, and later the times, level by level; None: where that is faster.
    """
    with without_collection():
        needs = Needs.of(schedule, check_schedule(schedule))
        producers = producers_of(needs)
        if by_levels is None:
            by_levels = width(needs.first, schedule.stages) >= LEAST_WIDTH
        levels = in_step(producers, needs.first) if by_levels else []
        order = levels or [
            np.array(in_turn(producers.tolist(), needs.first.tolist()), dtype=np.int64)
        ]
        return _graph(schedule, needs, producers, np.concatenate(order), levels)


_kept = Kept[Schedule, Graph](
    make_graph, size_of=lambda schedule: schedule.stages * schedule.units
)


def _graph(
    schedule: Schedule,
    needs: Needs,
    producers: Numbers,
    order: Numbers,
    levels: Sequence[Numbers] = (),
) -> Graph:
    """Number the nodes in an order in which each stands after everything that it waits for."""
    if len(order) < len(producers):
        raise _dead_lock(schedule, needs, order)
    number = np.full(len(order) + 1, NOTHING)
    number[order] = np.arange(len(order))
    before = np.arange(-1, len(order) - 1)
    before[needs.first[:-1]] = NOTHING
    ranks = np.repeat(np.arange(schedule.ranks), np.diff(needs.first))[order]
    per_work = schedule.stages * schedule.sequence_chunks
    nodes = Nodes(
        number[producers[order]], needs.works[order], needs.transfers[order], per_work
    )
    is_action = needs.is_action(schedule)
    own = [
        slice(*bounds) for bounds in zip(needs.first[:-1], needs.first[1:], strict=True)
    ]

    def column(values: Numbers) -> Sequence[int]:
        """A list is read faster, an array takes a tenth of its memory."""
        return values.astype(np.int32).data if levels else values.tolist()

    return Graph(
        stages=schedule.stages,
        chunks=schedule.sequence_chunks,
        before=column(number[before[order]]),
        producer=column(nodes.producers),
        transfer=column(nodes.transfers),
        work=column(nodes.works),
        rank=column(ranks),
        rank_actions=[column(number[:-1][each][is_action[each]]) for each in own],
        levels=Levels.of(levels, ranks, nodes) if levels else None,
    )


def _dead_lock(schedule: Schedule, needs: Needs, order: Numbers) -> ScheduleError:
    """The error of a rank that waits for ever, and of the one that it waits for."""
    reached = np.zeros(len(needs.works), dtype=bool)
    reached[order] = True
    is_action = needs.is_action(schedule)
    stuck_node = int(np.flatnonzero(~reached & (needs.inputs != NOTHING))[0])
    kinds, stage, unit = read_output(int(needs.inputs[stuck_node]), schedule)
    rank, owner = (
        int(np.searchsorted(needs.first, stuck_node, side="right")) - 1,
        schedule.owner(stage, unit),
    )

    def next_of(rank: int) -> Action:
        """The first action of a rank that cannot run."""
        mine = slice(needs.first[rank], needs.first[rank + 1])
        return schedule.actions[rank][int((reached & is_action)[mine].sum())]

    stuck, behind = next_of(rank), next_of(owner)
    wanted = next(
        action
        for action in schedule.actions[owner]
        if action in [(stage, kind, unit) for kind in kinds]
    )
    return wrong(
        f"dead-lock: {stuck} on rank {rank} waits for {wanted}, which never comes: "
        f"it stands on rank {owner} behind {behind}.",
        f"move {wanted} before {behind} on rank {owner}, or {stuck} later on rank {rank}.",
    )
