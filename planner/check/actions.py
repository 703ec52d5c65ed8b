"""The plan's actions: complete, on their ranks, and in an order that can run.

An action is written ``<stage><F|B|I|W><unit>``. The unit is the micro-batch; with
sequence chunks it is micro-batch x chunks + chunk.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.check.context import Context
from planner.check.replay import (
    Action,
    Actions,
    StageDurations,
    most_in_flight,
    replay,
)
from planner.check.report import Findings
from planner.check.schedules import SCHEDULES, ScheduleRule, Shape, joint_pairs
from planner.errors import ScheduleError
from planner.spec.plan import Plan

_WRITTEN = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
COMPLETE = ("BF", "FIW")
"""Kinds of one stage and unit, sorted: a whole or a split backward."""


def parse_actions(rows: Sequence[Sequence[str]]) -> Actions:
    """Read the actions of every rank.

    Raises:
        ScheduleError: a text is not an action.
    """
    return tuple(tuple(_parsed(text) for text in row) for row in rows)


def _parsed(text: str) -> Action:
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{text!r} is not an action.",
            field="actions",
            hint="write <stage><F|B|I|W><micro_batch>, counted from 0, e.g. 2F0.",
        )
    return Action(int(match[1]), match[2], int(match[3]))


def check_actions(plan: Plan, context: Context, findings: Findings) -> None:
    """Check that every stage runs every micro-batch once, and that no rank deadlocks."""
    layout = plan.layout
    ranks = layout.pipeline_parallel_degree
    before = len(findings.problems)
    findings.equal("actions: lists, one per pipeline rank", len(plan.actions), ranks)
    try:
        actions = parse_actions(plan.actions)
        _check_complete(plan, actions, findings)
        _check_order(plan, actions, findings)
        if len(findings.problems) > before:
            return
        units = StageDurations((1,), (1,), (1,), 0)
        joint = joint_pairs(layout.schedule, actions)
        replay(actions, [units] * len(plan.stages), joint)
    except ScheduleError as error:
        findings.problems.append(str(error))
        return
    _check_in_flight(plan, actions, findings)
    findings.checked += [
        "every stage runs every micro-batch forward and backward once, on its rank",
        "the actions run to their end without a deadlock",
        "every rank has as many micro-batches in flight as the schedule allows",
    ]


def _check_complete(plan: Plan, actions: Actions, findings: Findings) -> None:
    """Check that every stage and unit has one F, and one B or one I and one W, on its rank."""
    owners = {stage.index: stage.pipeline_rank for stage in plan.stages}
    count = plan.micro_batches * plan.layout.sequence_chunks
    units = [(stage, unit) for stage in owners for unit in range(count)]
    kinds = dict.fromkeys(units, "")
    for rank, row in enumerate(actions):
        for action in row:
            key, owner = (action.stage, action.unit), owners.get(action.stage)
            kinds[key] = kinds.get(key, "") + action.kind
            rule = f"stage {action.stage} is on rank {owner}"
            findings.rule(f"actions[{rank}]", action, rank == owner, rule)
    for (stage, unit), run in kinds.items():
        where = f"actions[{owners.get(stage)}]: stage {stage}, micro-batch {unit}"
        holds = "".join(sorted(run)) in COMPLETE and unit < count
        findings.rule(where, run or None, holds, "it runs F and B, or F, I and W once")


def _check_order(plan: Plan, actions: Actions, findings: Findings) -> None:
    """Check that every action is after those of its own stage that it needs."""
    last, chunks = len(plan.stages) - 1, plan.layout.sequence_chunks
    for rank, row in enumerate(actions):
        where = f"actions[{rank}]"
        position = {action: place for place, action in enumerate(row)}
        for place, action in enumerate(row):
            for needed in _needed(action, chunks):
                holds = position.get(needed, -1) <= place
                rule = f"it needs {needed}, which runs later"
                findings.rule(where, action, holds, rule)
        losses = [one.unit for one in row if (one.stage, one.kind) == (last, "F")]
        rule = "the last stage runs micro-batches in order"
        findings.rule(where, losses, losses == sorted(losses), rule)


def _needed(action: Action, chunks: int) -> list[Action]:
    """Return the actions of the same stage that have to run before this one.

    Those are its own forward, or input gradient; and with sequence chunks the forward
    of the chunk before, whose keys and values it reads, or the backward of the chunk
    after, which makes gradients of its keys and values.
    """
    stage, kind, unit = action
    chunk = unit % chunks
    if kind == "F":
        return [Action(stage, "F", unit - 1)] if chunk > 0 else []
    if kind == "W":
        return [Action(stage, "I", unit)]
    needed = [Action(stage, "F", unit)]
    if chunk < chunks - 1:
        needed += [Action(stage, "B", unit + 1), Action(stage, "I", unit + 1)]
    return needed


def _check_in_flight(plan: Plan, actions: Actions, findings: Findings) -> None:
    layout = plan.layout
    rule = SCHEDULES.get(layout.schedule, ScheduleRule())
    virtual, chunks = layout.virtual_stages_per_rank, layout.sequence_chunks
    shape = Shape(len(actions), plan.micro_batches, virtual, chunks)
    for rank, row in enumerate(actions):
        expected = rule.in_flight(shape, rank)
        if expected is not None:
            where = f"actions[{rank}]: in flight under {layout.schedule}"
            findings.equal(where, most_in_flight(row), expected)
