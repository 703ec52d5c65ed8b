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
from functools import lru_cache
from operator import add

from planner.errors import LayoutError, ScheduleError
from planner.schedule.actions import Action, ActionKind, Schedule, without_collection
from planner.schedule.durations import Durations
from planner.schedule.validity import KINDS, check_schedule, wrong

WORKS = 9
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)
RECOMPUTE, PLAIN_BACKWARD = 4, 5
"""Recomputation ahead of a backward, and that backward without it."""
PAIRED_FORWARD, PAIRED_BACKWARD, JOIN = 6, 7, 8
"""The second action of a pair; and no work, where a pair waits for its other input or hands on its other output."""
_WORK = {kind: work for work, kind in enumerate(KINDS)}
NOTHING = -1
"""No action; as an index into a list it is the last place, which holds time 0."""
NO_TRANSFER = 0
LARGE_GRAPH_UNITS = 20_000
"""(stage, unit) pairs above which a graph takes tens of megabytes."""


@dataclass(frozen=True, slots=True)
class Graph:
    """All actions of a schedule as flat lists, each standing after everything that it waits for.

    Recomputation that runs ahead of a backward is a node of its own, between the backward and what stands before it.
    Joint pairs stand between two nodes that take no time: one waits for the second action's input, the other hands on
    the first one's output.
    """

    stages: int
    chunks: int
    before: list[int]
    """By action: the action before it on its rank, or `NOTHING`."""
    producer: list[int]
    """By action: the action on another stage that it waits for, or `NOTHING`."""
    transfer: list[int]
    """By action: index into `Durations.of_transfers` of what its producer sends."""
    work: list[int]
    """By action: index into `Durations.of_actions`."""
    rank: list[int]
    """By action: where it runs."""
    rank_actions: list[list[int]]
    """Per rank, its actions in order."""

    def earliest(self, durations: Durations) -> tuple[list[float], list[float]]:
        """Earliest start and end of every action; the lists end with the 0 of `NOTHING`."""
        lengths, transfers = durations.of_actions(self.chunks), durations.of_transfers()
        starts: list[float] = [0] * (len(self.work) + 1)
        ends: list[float] = [0] * (len(self.work) + 1)
        waits = zip(self.before, self.producer, self.transfer, self.work, strict=True)
        for action, (before, producer, transfer, work) in enumerate(waits):
            start = ends[before]
            ready = ends[producer] + transfers[transfer]
            if ready > start:
                start = ready
            starts[action] = start
            ends[action] = start + lengths[work]
        return starts, ends


def graph_of(schedule: Schedule) -> Graph:
    """The graph of a schedule; the latest ones are kept, of large ones only two.

    Raises:
        ScheduleError: actions that are missing, doubled, out of order, on the wrong rank, or dead-lock.
    """
    is_large = schedule.stages * schedule.units > LARGE_GRAPH_UNITS
    return _kept_large(schedule) if is_large else _kept(schedule)


def _made(schedule: Schedule) -> Graph:
    with without_collection():
        check_schedule(schedule)
        return _Builder(schedule).graph()


_kept = lru_cache(maxsize=32)(_made)
_kept_large = lru_cache(maxsize=2)(_made)


def check_stages(schedule: Schedule, durations: Durations) -> None:
    """Raise `LayoutError` when the durations are for another number of stages or chunks."""
    if durations.stages != schedule.stages:
        raise LayoutError(
            f"durations of {durations.stages} stages for a schedule of {schedule.stages}.",
            field="durations",
            mend=f"give {schedule.stages} values, one per stage.",
        )
    if durations.sequence_chunks not in (1, schedule.sequence_chunks):
        raise LayoutError(
            f"durations of {durations.sequence_chunks} sequence chunks for a schedule of {schedule.sequence_chunks}.",
            field="durations",
            mend=f"give one value per stage, or {schedule.sequence_chunks}.",
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """One rank's actions as numbers. Outputs are forwards by (stage, unit), then gradients, then one for no output."""

    outputs: list[int]
    """What each action makes."""
    needs: list[int]
    """The output that it waits for, or `NOTHING`."""
    works: list[int]
    transfers: list[int]


class _Tables:
    """What an action of a work and stage makes, needs and receives, by ``work * stages + stage``."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.no_output = 2 * schedule.stages * schedule.units
        self.outputs: list[int] = []
        self.needs: list[int] = []
        self.transfers: list[int] = []
        for work in range(WORKS):
            for stage in range(schedule.stages):
                self._add(work, stage)

    def _add(self, work: int, stage: int) -> None:
        stages, units = self._schedule.stages, self._schedule.units
        if work in (BACKWARD_WEIGHT, RECOMPUTE, JOIN):
            self._append(self.no_output, NOTHING, NO_TRANSFER)
        elif work in (FORWARD, PAIRED_FORWARD):
            need = (stage - 1) * units if stage else NOTHING
            self._append(stage * units, need, self._transfer(stage - 1, 1) if stage else NO_TRANSFER)
        elif stage < stages - 1:
            self._append((stages + stage) * units, (stages + stage + 1) * units, self._transfer(stage, stages))
        else:
            self._append((stages + stage) * units, NOTHING, NO_TRANSFER)

    def _append(self, output: int, need: int, transfer: int) -> None:
        self.outputs.append(output)
        self.needs.append(need)
        self.transfers.append(transfer)

    def _transfer(self, boundary: int, first: int) -> int:
        """Index into `Durations.of_transfers`; stages on one rank hand over without a transfer."""
        owners = self._schedule.stage_ranks
        return NO_TRANSFER if owners[boundary] == owners[boundary + 1] else first + boundary

    def row(self, actions: Sequence[Action]) -> _Row:
        """A rank's list in numbers; its special works come later."""
        stages, chunks = self._schedule.stages, self._schedule.sequence_chunks
        indices = [_WORK[kind] * stages + stage for stage, kind, _ in actions]
        units = [unit for _, _, unit in actions]
        outputs = map(add, map(self.outputs.__getitem__, indices), units)
        needs = zip(map(self.needs.__getitem__, indices), units, strict=True)
        works = indices
        if chunks > 1:
            works = [index * chunks + unit % chunks for index, unit in zip(indices, units, strict=True)]
        return _Row(
            outputs=[min(output, self.no_output) for output in outputs],
            needs=[NOTHING if need == NOTHING else need + unit for need, unit in needs],
            works=works,
            transfers=list(map(self.transfers.__getitem__, indices)),
        )

    def special_row(self, actions: Sequence[Action]) -> _Row:
        """A rank's list in numbers, with pairs and with the recomputations that run ahead of a backward."""
        row = _SpecialRow(self._schedule, self.row(actions), self.no_output)
        for place, action in enumerate(actions):
            row.add(place, action)
        return row.made


class _SpecialRow:
    """Copies a plain row action by action, and adds the nodes that pairs and recomputation need."""

    def __init__(self, schedule: Schedule, plain: _Row, no_output: int) -> None:
        self._schedule, self._plain, self._no_output = schedule, plain, no_output
        self.made = _Row([], [], [], [])

    def add(self, place: int, action: Action) -> None:
        """Copy one action."""
        stop = self._schedule.recompute_stop
        if action in self._schedule.paired:
            self._pair(place, action)
        elif stop is not None and action.kind is ActionKind.BACKWARD:
            if action.micro_batch < stop:
                self._append(NOTHING, self._work(RECOMPUTE, action), NO_TRANSFER, self._no_output)
            self._copy(place, self._work(PLAIN_BACKWARD, action))
        else:
            self._copy(place, self._plain.works[place])

    def _pair(self, place: int, action: Action) -> None:
        work = self._work(PAIRED_FORWARD if action.kind is ActionKind.FORWARD else PAIRED_BACKWARD, action)
        if not self._schedule.joint_pairs:
            self._copy(place, work)
            return
        join, made, plain = self._work(JOIN, action), self.made, self._plain
        first = made.works.pop(), made.outputs.pop(), made.needs.pop(), made.transfers.pop()
        self._append(plain.needs[place], join, plain.transfers[place], self._no_output)
        self._append(first[2], first[0], first[3], self._no_output)
        self._append(NOTHING, work, NO_TRANSFER, plain.outputs[place])
        self._append(NOTHING, join, NO_TRANSFER, first[1])

    def _copy(self, place: int, work: int) -> None:
        self._append(self._plain.needs[place], work, self._plain.transfers[place], self._plain.outputs[place])

    def _append(self, need: int, work: int, transfer: int, output: int) -> None:
        self.made.needs.append(need)
        self.made.works.append(work)
        self.made.transfers.append(transfer)
        self.made.outputs.append(output)

    def _work(self, work: int, action: Action) -> int:
        chunks = self._schedule.sequence_chunks
        return (work * self._schedule.stages + action.stage) * chunks + action.micro_batch % chunks


class _Builder:
    """Numbers actions so that each stands after what it waits for: every rank goes as far as it can, in turn."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        tables = _Tables(schedule)
        self._is_special = schedule.recompute_stop is not None or bool(schedule.paired)
        self._rows = list(map(tables.special_row if self._is_special else tables.row, schedule.actions))
        self._number = [NOTHING] * (2 * schedule.stages * schedule.units + 1)
        self._waiting: dict[int, int] = {}
        self._graph = Graph(
            schedule.stages, schedule.sequence_chunks, [], [], [], [], [], [[] for _ in range(schedule.ranks)]
        )

    def graph(self) -> Graph:
        """The whole graph.

        Raises:
            ScheduleError: a dead-lock is in its way.
        """
        going = list(range(self._schedule.ranks))
        while going:
            going += self._advance(going.pop())
        if self._waiting:
            raise self._dead_lock()
        if self._is_special:
            graph_actions = self._graph.rank_actions
            graph_actions[:] = map(self._own, graph_actions)
        return self._graph

    def _advance(self, rank: int) -> list[int]:
        """Number a rank's actions until one has to wait; the ranks that waited for any of them."""
        row, number, waiting = self._rows[rank], self._number, self._waiting
        start = end = len(self._graph.rank_actions[rank])
        outputs, needs, producers = row.outputs, row.needs, self._graph.producer
        action, woken = len(producers), []
        for end in range(start, len(needs) + 1):
            if end == len(needs):
                break
            need = needs[end]
            if need == NOTHING:
                producers.append(NOTHING)
            elif number[need] == NOTHING:
                waiting[need] = rank
                break
            else:
                producers.append(number[need])
            number[outputs[end]] = action
            action += 1
            if outputs[end] in waiting:
                woken.append(waiting.pop(outputs[end]))
        self._append(rank, start, end)
        return woken

    def _append(self, rank: int, start: int, end: int) -> None:
        """Put a rank's places from start to end, whose producers are already there, into the graph."""
        if start == end:
            return
        graph, row = self._graph, self._rows[rank]
        mine, first = graph.rank_actions[rank], len(graph.work)
        graph.before.append(mine[-1] if mine else NOTHING)
        graph.before.extend(range(first, first + end - start - 1))
        graph.rank.extend([rank] * (end - start))
        graph.work.extend(row.works[start:end])
        graph.transfer.extend(row.transfers[start:end])
        mine.extend(range(first, first + end - start))

    def _own(self, actions: Sequence[int]) -> list[int]:
        """Without the nodes that stand for no action of the schedule."""
        works, per_work = self._graph.work, self._graph.stages * self._graph.chunks
        return [action for action in actions if works[action] // per_work not in (RECOMPUTE, JOIN)]

    def _dead_lock(self) -> ScheduleError:
        schedule = self._schedule
        need, rank = next(iter(self._waiting.items()))
        is_gradient, index = divmod(need, schedule.stages * schedule.units)
        stage, unit = divmod(index, schedule.units)
        owner = schedule.owner(stage, unit)
        stuck, behind = self._next(rank), self._next(owner)
        kinds = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT) if is_gradient else (ActionKind.FORWARD,)
        wanted = next(action for action in schedule.actions[owner] if action in [(stage, kind, unit) for kind in kinds])
        return wrong(
            f"dead-lock: {stuck} on rank {rank} waits for {wanted}, which never comes: "
            f"it stands on rank {owner} behind {behind}.",
            f"move {wanted} before {behind} on rank {owner}, or {stuck} later on rank {rank}.",
        )

    def _next(self, rank: int) -> Action:
        """The first action of a rank that could not be numbered."""
        return self._schedule.actions[rank][len(self._own(self._graph.rank_actions[rank]))]
