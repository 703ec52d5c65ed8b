"""Exact discrete-event simulation of a schedule.

Every rank runs its actions strictly in order, one at a time, each as soon as the rank is free and its input is there.
Transfers overlap with compute unless asked otherwise (`planner.schedule.transfers`). Under these rules the earliest
times are the longest paths of the schedule's graph, so one pass over the actions is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from planner.schedule.actions import Action, Schedule
from planner.schedule.durations import Durations
from planner.schedule.graph import Graph, Times, check_stages, graph_of
from planner.schedule.in_flight import in_flight
from planner.schedule.needs import NOTHING
from planner.schedule.transfers import Flow, Transfer, TransferMode, transfers_of


@dataclass(frozen=True, slots=True)
class Event:
    """One action in time."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Simulation:
    """When every action of a schedule runs. Times are in the unit of the durations, from the step's start.

    Most callers want the ends of the ranks alone, so whatever tells of every action is made when it is asked for.
    """

    schedule: Schedule
    durations: Durations
    graph: Graph = field(repr=False)
    times: Times = field(repr=False, compare=False)
    """Of the graph's nodes."""
    transfer_mode: TransferMode = TransferMode.OVERLAPPED

    @cached_property
    def start_seconds(self) -> tuple[tuple[float, ...], ...]:
        """Per rank and action of the schedule."""
        return self._by_action(self.times[0])

    @cached_property
    def finish_seconds(self) -> tuple[tuple[float, ...], ...]:
        """Per rank and action of the schedule."""
        return self._by_action(self.times[1])

    def _by_action(self, times: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple([times[node] for node in nodes]) for nodes in self.graph.rank_actions
        )

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Per rank: time spent in actions, recompute included."""
        works, lengths = self.graph.work, self.durations.of_actions(self.graph.chunks)
        return tuple(
            sum([lengths[works[node]] for node in nodes])
            + _recomputing(self.schedule, self.durations, rank)
            for rank, nodes in enumerate(self.graph.rank_actions)
        )

    @property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """Per rank, in order."""
        return tuple(
            tuple(map(Event, actions, starts, ends))
            for actions, starts, ends in zip(
                self.schedule.actions,
                self.start_seconds,
                self.finish_seconds,
                strict=True,
            )
        )

    @property
    def begin_seconds(self) -> tuple[float, ...]:
        """Per rank: start of its first action."""
        starts = self.times[0]
        return tuple(starts[nodes[0]] for nodes in self.graph.rank_actions)

    @property
    def end_seconds(self) -> tuple[float, ...]:
        """Per rank: end of its last action."""
        ends = self.times[1]
        return tuple(ends[nodes[-1]] for nodes in self.graph.rank_actions)

    @property
    def makespan(self) -> float:
        """End of the last action of all."""
        return max(self.end_seconds)

    @property
    def span(self) -> float:
        """Longest time from a rank's first start to its last end: the step, when steps follow without a barrier.

        It is the cost of Qi et al. 2023: consecutive steps then tile like parallelograms.
        """
        return max(
            end - begin
            for begin, end in zip(self.begin_seconds, self.end_seconds, strict=True)
        )

    @property
    def bubble_fraction(self) -> float:
        """Idle part of all ranks: 1 - busy / (ranks x makespan); 0 when nothing takes time."""
        if not self.makespan:
            return 0.0
        return 1 - sum(self.busy_seconds) / (self.schedule.ranks * self.makespan)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank: most units held at once, from the start of F to the end of B or W."""
        return in_flight(self.schedule)

    @property
    def transfers(self) -> tuple[tuple[Transfer, ...], ...]:
        """Per rank: what it sends, in order, as far as it takes time."""
        return tuple(
            tuple(transfers_of(self, rank)) for rank in range(self.schedule.ranks)
        )

    def longest_chain(self, rank: int) -> list[int]:
        """One longest chain of nodes up to a rank's last action, from there back to the first."""
        node = self.graph.rank_actions[rank][-1]
        if self.transfer_mode is TransferMode.OVERLAPPED:
            return _longest_overlapped(
                self.graph, self.times[1], self.durations.of_transfers(), node
            )
        return _longest_chain(
            self.graph, Flow.of(self.graph, self.durations, self.transfer_mode), node
        )

    @property
    def critical_actions(self) -> tuple[Action, ...]:
        """One longest chain of actions, first to last, each waiting for the one before or for what it sent."""
        graph = self.graph
        last = max(range(self.schedule.ranks), key=self.end_seconds.__getitem__)
        named = {
            node: action
            for nodes, actions in zip(
                graph.rank_actions, self.schedule.actions, strict=True
            )
            for node, action in zip(nodes, actions, strict=True)
        }
        return tuple(
            named[node] for node in reversed(self.longest_chain(last)) if node in named
        )


def _longest_overlapped(
    graph: Graph, ends: Sequence[float], transfers: Sequence[float], node: int
) -> list[int]:
    """The same where transfers delay nothing but what waits for them: without asking for every node's flow."""
    chain = []
    while node != NOTHING:
        chain.append(node)
        producer, before = graph.producer[node], graph.before[node]
        waits = (
            producer != NOTHING
            and ends[producer] + transfers[graph.transfer[node]] >= ends[before]
        )
        node = producer if waits else before
    return chain


def _longest_chain(graph: Graph, flow: Flow, node: int) -> list[int]:
    """Back from a node along what each one really waited for."""
    chain = []
    while node != NOTHING:
        chain.append(node)
        producer, before = graph.producer[node], graph.before[node]
        if producer != NOTHING and flow.arrivals[producer] >= flow.free[before]:
            while flow.behind[producer] != NOTHING:
                producer = flow.behind[producer]
            node = producer
        else:
            node = before
    return chain


def simulate(
    schedule: Schedule,
    durations: Durations,
    *,
    transfer_mode: TransferMode = TransferMode.OVERLAPPED,
) -> Simulation:
    """When every action runs, at the earliest; linear in the number of actions.

    Raises:
        ScheduleError: actions that are missing, doubled, out of order, or dead-lock.
        LayoutError: durations for another number of stages.
    """
    check_stages(schedule, durations)
    graph = graph_of(schedule)
    if transfer_mode is TransferMode.OVERLAPPED:
        return Simulation(schedule, durations, graph, graph.earliest(durations))
    flow = Flow.of(graph, durations, transfer_mode)
    return Simulation(
        schedule, durations, graph, (flow.starts, flow.ends), transfer_mode
    )


def _recomputing(schedule: Schedule, durations: Durations, rank: int) -> float:
    """Time that a rank spends on recomputation ahead of its backwards."""
    if schedule.recompute_stop is None:
        return 0
    return schedule.recompute_stop * sum(
        durations.recompute[stage] for stage in schedule.stages_of(rank)
    )
