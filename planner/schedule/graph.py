"""A schedule as a graph: what every action waits for.

An action waits for the action before it on its rank, and for at most one other, its producer:

    F(s, m)         F(s - 1, m), and the transfer of its output
    B or I (s, m)   B or I (s + 1, m), and the transfer of its gradient
    W(s, m)         its own I, which stands before it on the same rank

(the rules of torch.distributed.pipelining's actions; Qi et al. 2023, section 3.1). Everything else about a schedule
is order. The graph does not depend on durations, so it is made and checked once per schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from planner.errors import LayoutError, ScheduleError
from planner.schedule.actions import Action, ActionKind, Schedule
from planner.schedule.durations import Durations

KIND_INDEX = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD: 1,
    ActionKind.BACKWARD_INPUT: 2,
    ActionKind.BACKWARD_WEIGHT: 3,
}
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)
NOTHING = -1
"""No action; as an index into a list it is the last place, which holds time 0."""
NO_TRANSFER = 0

_Key = tuple[int, int, int]
"""(kind, stage, unit) of an action."""


@dataclass(frozen=True, slots=True)
class Graph:
    """All actions of a schedule as flat lists, each standing after everything that it waits for."""

    stages: int
    before: list[int]
    """By action: the action before it on its rank, or `NOTHING`."""
    producer: list[int]
    """By action: the action on another stage that it waits for, or `NOTHING`."""
    transfer: list[int]
    """By action: index into `Durations.of_transfers` of what its producer sends."""
    work: list[int]
    """By action: index into `Durations.of_actions`."""
    rank_actions: list[list[int]]
    """Per rank, its actions in order."""

    def earliest(self, durations: Durations) -> tuple[list[float], list[float]]:
        """Earliest start and end of every action; the lists end with the 0 of `NOTHING`."""
        lengths, transfers = durations.of_actions(), durations.of_transfers()
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


@lru_cache(maxsize=32)
def graph_of(schedule: Schedule) -> Graph:
    """The graph of a schedule.

    Raises:
        ScheduleError: actions that are missing, doubled, out of order, on the wrong rank, or dead-lock.
    """
    _check_shape(schedule)
    slots = _slots(schedule)
    _check_complete(schedule, slots)
    _check_order(schedule, slots)
    producers = [[_producer(schedule, slots, action) for action in actions] for actions in schedule.actions]
    return _flatten(schedule, producers)


def check_stages(schedule: Schedule, durations: Durations) -> None:
    """Raise `LayoutError` when the durations are for another number of stages."""
    if durations.stages != schedule.stages:
        raise LayoutError(
            f"durations of {durations.stages} stages for a schedule of {schedule.stages}.",
            field="durations",
            mend=f"give {schedule.stages} values, one per stage.",
        )


def _key(action: Action) -> _Key:
    return KIND_INDEX[action.kind], action.stage, action.micro_batch


def _check_shape(schedule: Schedule) -> None:
    if len(schedule.actions) != schedule.ranks or set(schedule.stage_ranks) != set(range(schedule.ranks)):
        raise _wrong(
            f"{schedule.ranks} ranks, but lists of actions for {len(schedule.actions)} and stages on ranks "
            f"{sorted(set(schedule.stage_ranks))}.",
            "give every rank one list of actions and at least one stage.",
        )


def _slots(schedule: Schedule) -> dict[_Key, int]:
    """Place of every action in its rank's list."""
    slots: dict[_Key, int] = {}
    for rank, actions in enumerate(schedule.actions):
        for slot, action in enumerate(actions):
            _check_place(schedule, rank, action)
            if slots.setdefault(_key(action), slot) != slot:
                first = actions[slots[_key(action)]]
                raise _wrong(f"{first} and again {action} stand on rank {rank}.", "run every action once.")
    return slots


def _check_place(schedule: Schedule, rank: int, action: Action) -> None:
    if not (0 <= action.stage < schedule.stages and 0 <= action.micro_batch < schedule.units):
        raise _wrong(
            f"{action} on rank {rank}, but there are {schedule.stages} stages and {schedule.units} micro-batches.",
            "count stages and micro-batches from 0.",
        )
    owner = schedule.stage_ranks[action.stage]
    if owner != rank:
        raise _wrong(
            f"{action} stands on rank {rank}, but stage {action.stage} is on rank {owner}.", f"move it to rank {owner}."
        )


def _check_complete(schedule: Schedule, slots: dict[_Key, int]) -> None:
    for stage in range(schedule.stages):
        for unit in range(schedule.units):
            present = [(kind, stage, unit) in slots for kind in range(4)]
            if present not in ([True, True, False, False], [True, False, True, True]):
                raise _wrong(
                    _describe_lack(present, stage, unit), "run F, and then either B, or I and W, of every micro-batch."
                )


def _describe_lack(present: list[bool], stage: int, unit: int) -> str:
    if present[FORWARD] and present[BACKWARD]:
        return f"{stage}B{unit} is both full and split: {stage}I{unit} or {stage}W{unit} stands beside it."
    wanted = "FIW" if present[BACKWARD_INPUT] or present[BACKWARD_WEIGHT] else "FB"
    here = dict(zip("FBIW", present, strict=True))
    lacking = [f"{stage}{kind}{unit}" for kind in wanted if not here[kind]]
    existing = [f"{stage}{kind}{unit}" for kind in "FBIW" if here[kind]]
    return f"{' and '.join(lacking)} is missing" + (f", though {existing[0]} is there." if existing else ".")


def _check_order(schedule: Schedule, slots: dict[_Key, int]) -> None:
    """F before B or I, and I before W, of each stage and unit."""
    for (kind, stage, unit), slot in slots.items():
        if kind == FORWARD:
            continue
        earlier = BACKWARD_INPUT if kind == BACKWARD_WEIGHT else FORWARD
        if slots[earlier, stage, unit] > slot:
            late, early = f"{stage}{'FBIW'[kind]}{unit}", f"{stage}{'FBIW'[earlier]}{unit}"
            raise _wrong(
                f"{late} stands before {early} on rank {schedule.stage_ranks[stage]}.", f"move {early} before {late}."
            )


def _producer(schedule: Schedule, slots: dict[_Key, int], action: Action) -> Action | None:
    """The action of the neighbouring stage that this one waits for."""
    if action.kind is ActionKind.FORWARD:
        return Action(action.stage - 1, action.kind, action.micro_batch) if action.stage else None
    if action.kind is ActionKind.BACKWARD_WEIGHT or action.stage == schedule.stages - 1:
        return None
    is_full = (BACKWARD, action.stage + 1, action.micro_batch) in slots
    kind = ActionKind.BACKWARD if is_full else ActionKind.BACKWARD_INPUT
    return Action(action.stage + 1, kind, action.micro_batch)


def _flatten(schedule: Schedule, producers: list[list[Action | None]]) -> Graph:
    """Number the actions so that each stands after what it waits for: every rank goes as far as it can, in turn."""
    graph = Graph(schedule.stages, [], [], [], [], [[] for _ in range(schedule.ranks)])
    number: dict[_Key, int] = {}
    waiting: dict[_Key, int] = {}
    going = list(range(schedule.ranks))
    while going:
        rank = going.pop()
        mine = graph.rank_actions[rank]
        for action, producer in zip(schedule.actions[rank][len(mine) :], producers[rank][len(mine) :], strict=True):
            key = None if producer is None else _key(producer)
            if key is not None and key not in number:
                waiting[key] = rank
                break
            number[_key(action)] = _append(graph, schedule, rank, action, NOTHING if key is None else number[key])
            woken = waiting.pop(_key(action), None)
            if woken is not None:
                going.append(woken)
    if waiting:
        raise _dead_lock(schedule, waiting, graph.rank_actions)
    return graph


def _append(graph: Graph, schedule: Schedule, rank: int, action: Action, producer: int) -> int:
    mine = graph.rank_actions[rank]
    graph.before.append(mine[-1] if mine else NOTHING)
    graph.producer.append(producer)
    graph.transfer.append(NO_TRANSFER if producer == NOTHING else _transfer(schedule, action))
    graph.work.append(KIND_INDEX[action.kind] * schedule.stages + action.stage)
    mine.append(len(graph.work) - 1)
    return mine[-1]


def _transfer(schedule: Schedule, action: Action) -> int:
    """Index into `Durations.of_transfers`; stages on one rank hand over without a transfer."""
    boundary = action.stage - 1 if action.kind is ActionKind.FORWARD else action.stage
    if schedule.stage_ranks[boundary] == schedule.stage_ranks[boundary + 1]:
        return NO_TRANSFER
    return 1 + boundary + (0 if action.kind is ActionKind.FORWARD else schedule.stages - 1)


def _dead_lock(schedule: Schedule, waiting: dict[_Key, int], done: list[list[int]]) -> ScheduleError:
    (kind, stage, unit), rank = next(iter(waiting.items()))
    stuck = schedule.actions[rank][len(done[rank])]
    owner = schedule.stage_ranks[stage]
    behind = schedule.actions[owner][len(done[owner])]
    wanted = f"{stage}{'FBIW'[kind]}{unit}"
    return _wrong(
        f"dead-lock: {stuck} on rank {rank} waits for {wanted}, which never comes: "
        f"it stands on rank {owner} behind {behind}.",
        f"move {wanted} before {behind} on rank {owner}, or {stuck} later on rank {rank}.",
    )


def _wrong(message: str, mend: str) -> ScheduleError:
    return ScheduleError(message, field="actions", mend=mend)
