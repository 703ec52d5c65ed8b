"""The plan's actions: are they complete, and when does each rank end?

An action is written ``<stage><F|B|I|W><micro_batch>``. Every rank runs its list strictly in order. F waits for F of the
stage before, B or I for B or I of the stage behind, each with a transfer in between that delays nobody else; W and the
last stage's B or I wait for nothing but their place in the list (the rules of torch.distributed.pipelining).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.errors import ScheduleError
from planner.spec.plan import Plan
from planner.validate.facts import Facts
from planner.validate.findings import Findings

_WRITTEN = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_HELD_AT_MOST = {"gpipe": lambda count, ahead: count, "1f1b": lambda count, ahead: min(count, ahead)}
"""Micro-batches that a rank with `ahead` ranks from itself to the last one holds: Huang et al. 2019; Narayanan et al.
2019, section 3.2. Schedules that are not listed promise nothing here; their memory is recomputed all the same."""


class Action(NamedTuple):
    """One stage computing one micro-batch."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Nanoseconds of one stage and micro-batch."""

    forward: int
    backward_input: int
    """Recomputation included."""
    backward_weight: int
    transfer: int
    """To the next stage, and of the gradient back from it."""

    def of(self, kind: str) -> int:
        """How long an action of this kind lasts."""
        backward = {
            "I": self.backward_input,
            "W": self.backward_weight,
            "B": self.backward_input + self.backward_weight,
        }
        return self.forward if kind == "F" else backward[kind]


def parse(lists: Sequence[Sequence[str]]) -> tuple[tuple[Action, ...], ...]:
    """Read the written actions of every rank.

    Raises:
        ScheduleError: a text is no action.
    """
    return tuple(tuple(map(_parse, texts)) for texts in lists)


def _parse(text: str) -> Action:
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{text!r} is no action.",
            field="actions",
            mend="write <stage><F|B|I|W><micro_batch>, counted from 0, e.g. 2F0.",
        )
    return Action(int(match[1]), match[2], int(match[3]))


def check_actions(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Every stage runs every micro-batch forward and backward once, on its own rank, and nobody waits for ever."""
    stages, before = plan.layout.pipeline_parallel_degree, len(findings.problems)
    findings.equal("actions: lists, one per pipeline rank", len(plan.actions), stages)
    try:
        actions = parse(plan.actions)
        if len(actions) == stages:
            _check_once(actions, plan.micro_batches, findings)
            _check_order(actions, findings)
        findings.checked.append("every stage runs every micro-batch forward and backward once, on its rank, in order")
        if len(findings.problems) > before:
            return
        end_nanoseconds(actions, [StageTimes(1, 1, 1, 0)] * stages)
    except ScheduleError as error:
        findings.problems.append(str(error))
        return
    findings.checked.append("the actions run to their end without a dead-lock")
    _check_held(plan, actions, findings)


def _check_once(actions: Sequence[Sequence[Action]], micro_batches: int, findings: Findings) -> None:
    stages = len(actions)
    found = Counter(action for one in actions for action in one)
    for rank, one in enumerate(actions):
        for action in one:
            if action.stage != rank:
                findings.wrong(f"actions[{rank}]", f"{action} stands on rank {rank}, its stage on rank {action.stage}.")
            if action.stage >= stages or action.micro_batch >= micro_batches:
                findings.wrong(f"actions[{rank}]", f"{action}, but {stages} stages run {micro_batches} micro-batches.")
    for stage in range(stages):
        for micro_batch in range(micro_batches):
            counts = {kind: found[Action(stage, kind, micro_batch)] for kind in "FBIW"}
            if counts not in ({"F": 1, "B": 1, "I": 0, "W": 0}, {"F": 1, "B": 0, "I": 1, "W": 1}):
                told = ", ".join(f"{stage}{kind}{micro_batch} {count} times" for kind, count in counts.items())
                findings.wrong(f"actions[{stage}]", f"one F and one B (or I and W) wanted, found {told}.")


def _check_order(actions: Sequence[Sequence[Action]], findings: Findings) -> None:
    for rank, one in enumerate(actions):
        place = {action: position for position, action in enumerate(one)}
        for action, position in place.items():
            earlier = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            first = action._replace(kind=earlier) if earlier else action
            if place.get(first, -1) > position:
                findings.wrong(f"actions[{rank}]", f"{action} stands before {first}.")
    forwards = [action.micro_batch for action in (actions[-1] if actions else ()) if action.kind == "F"]
    if forwards != sorted(forwards):
        findings.wrong(f"actions[{len(actions) - 1}]", f"the last stage's forwards run in the order {forwards}.")


def _check_held(plan: Plan, actions: Sequence[Sequence[Action]], findings: Findings) -> None:
    promise = _HELD_AT_MOST.get(plan.layout.schedule)
    if promise is None:
        return
    for rank, one in enumerate(actions):
        promised = promise(plan.micro_batches, len(actions) - rank)
        findings.equal(f"actions[{rank}]: in flight under {plan.layout.schedule}", in_flight(one), promised)
    findings.checked.append(f"no rank holds more micro-batches than {plan.layout.schedule} lets it")


def in_flight(actions: Sequence[Action]) -> int:
    """Most micro-batches of a rank that are forwarded and not yet backwarded."""
    most = held = 0
    for action in actions:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def end_nanoseconds(actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes]) -> tuple[int, ...]:
    """When each rank ends its last action, by playing the lists.

    Raises:
        ScheduleError: no rank can go on.
    """
    done: dict[Action, int] = {}
    clock, place = [0] * len(actions), [0] * len(actions)
    while any(position < len(one) for position, one in zip(place, actions, strict=True)):
        moved = False
        for rank, one in enumerate(actions):
            while place[rank] < len(one) and (arrival := _arrival(one[place[rank]], done, stages)) is not None:
                action = one[place[rank]]
                clock[rank] = max(clock[rank], arrival) + stages[action.stage].of(action.kind)
                done[action] = clock[rank]
                place[rank] += 1
                moved = True
        if not moved:
            raise _dead_lock(actions, place)
    return tuple(clock)


def _arrival(action: Action, done: Mapping[Action, int], stages: Sequence[StageTimes]) -> int | None:
    """When the action's input is there; None: not yet known."""
    stage, kind, micro_batch = action
    if kind == "F":
        sent, boundary = done.get(Action(stage - 1, "F", micro_batch)), stage - 1
        is_first = stage == 0
    else:
        behind = [done.get(Action(stage + 1, other, micro_batch)) for other in "BI"]
        sent, boundary = next((end for end in behind if end is not None), None), stage
        is_first = kind == "W" or stage == len(stages) - 1
    if is_first:
        return 0
    return None if sent is None else sent + stages[boundary].transfer


def _dead_lock(actions: Sequence[Sequence[Action]], place: Sequence[int]) -> ScheduleError:
    waiting = ", ".join(
        f"{one[position]} on rank {rank}"
        for rank, (one, position) in enumerate(zip(actions, place, strict=True))
        if position < len(one)
    )
    return ScheduleError(
        f"dead-lock: {waiting} wait for ever.",
        field="actions",
        mend="order the lists so that what an action waits for runs before it.",
    )
