"""The plan's actions: are they complete, on their ranks, in an order that runs to its end?

An action is written ``<stage><F|B|I|W><micro_batch>``; with sequence chunks the number is micro-batch x chunks + chunk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from planner.errors import ScheduleError
from planner.spec.plan import Plan
from planner.validate.facts import Facts
from planner.validate.findings import Findings
from planner.validate.play import (
    Action,
    Actions,
    StageTimes,
    end_nanoseconds,
    in_flight,
)
from planner.validate.schedules import RULES, Shape, joint_pairs

_WRITTEN = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)


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
            hint="write <stage><F|B|I|W><micro_batch>, counted from 0, e.g. 2F0.",
        )
    return Action(int(match[1]), match[2], int(match[3]))


def check_actions(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Every stage runs every micro-batch forward and backward once, on its own rank, and nobody waits for ever."""
    ranks, before = plan.layout.pipeline_parallel_degree, len(findings.problems)
    findings.equal("actions: lists, one per pipeline rank", len(plan.actions), ranks)
    try:
        actions = parse(plan.actions)
        if len(actions) == ranks:
            owners = [stage.pipeline_rank for stage in plan.stages]
            _check_once(
                actions,
                owners,
                plan.micro_batches * plan.layout.sequence_chunks,
                findings,
            )
            _check_order(actions, owners, plan.layout.sequence_chunks, findings)
        findings.checked.append(
            "every stage runs every micro-batch forward and backward once, on its rank, in order"
        )
        if len(findings.problems) > before:
            return
        pairs = joint_pairs(plan.layout.schedule, actions)
        end_nanoseconds(actions, [StageTimes(1, 1, 1, 0)] * len(plan.stages), pairs)
    except ScheduleError as error:
        findings.problems.append(str(error))
        return
    findings.checked.append("the actions run to their end without a dead-lock")
    _check_held(plan, actions, findings)


def _check_once(
    actions: Actions, owners: Sequence[int], units: int, findings: Findings
) -> None:
    found = Counter(action for one in actions for action in one)
    for rank, one in enumerate(actions):
        for action in one:
            where, stage = f"actions[{rank}]", action.stage
            if stage < len(owners) and owners[stage] != rank:
                findings.wrong(
                    where,
                    f"{action} is on rank {rank}, its stage on rank {owners[stage]}.",
                )
            if stage >= len(owners) or action.micro_batch >= units:
                findings.wrong(
                    where,
                    f"{action}, but {len(owners)} stages run {units} micro-batches.",
                )
    for stage, owner in enumerate(owners):
        for unit in range(units):
            counts = {kind: found[Action(stage, kind, unit)] for kind in "FBIW"}
            if counts not in (
                {"F": 1, "B": 1, "I": 0, "W": 0},
                {"F": 1, "B": 0, "I": 1, "W": 1},
            ):
                told = ", ".join(
                    f"{stage}{kind}{unit} {count} times"
                    for kind, count in counts.items()
                )
                findings.wrong(
                    f"actions[{owner}]",
                    f"one F and one B (or I and W) wanted, found {told}.",
                )


def _check_order(
    actions: Actions, owners: Sequence[int], chunks: int, findings: Findings
) -> None:
    for rank, one in enumerate(actions):
        place = {action: position for position, action in enumerate(one)}
        for action, position in place.items():
            for first in _before(action, chunks):
                if place.get(first, -1) > position:
                    findings.wrong(
                        f"actions[{rank}]", f"{action} stands before {first}."
                    )
    for rank, one in enumerate(actions):
        forwards = [
            unit
            for stage, kind, unit in one
            if stage == len(owners) - 1 and kind == "F"
        ]
        if forwards != sorted(forwards):
            findings.wrong(
                f"actions[{rank}]",
                f"the last stage's forwards run in the order {forwards}.",
            )


def _before(action: Action, chunks: int) -> list[Action]:
    """What must stand before an action of the same stage: its own forward or input gradient; of a sequence, the forward
    of the chunk before, whose keys and values it reads, and the backward of the chunk behind, which made gradients of
    them."""
    earlier = {"F": "", "B": "F", "I": "F", "W": "I"}[action.kind]
    first = [action._replace(kind=kind) for kind in earlier]
    chunk = action.micro_batch % chunks
    if action.kind == "F" and chunk > 0:
        first.append(action._replace(micro_batch=action.micro_batch - 1))
    if action.kind in "BI" and chunk < chunks - 1:
        first += [Action(action.stage, kind, action.micro_batch + 1) for kind in "BI"]
    return first


def _check_held(plan: Plan, actions: Actions, findings: Findings) -> None:
    layout, rules = plan.layout, RULES.get(plan.layout.schedule)
    shape = Shape(
        layout.pipeline_parallel_degree,
        plan.micro_batches,
        layout.virtual_stages_per_rank,
        layout.sequence_chunks,
    )
    promises = (
        [rules.held(shape, rank) for rank in range(len(actions))] if rules else []
    )
    for rank, promised in enumerate(promises):
        if promised is not None:
            findings.equal(
                f"actions[{rank}]: in flight under {layout.schedule}",
                in_flight(actions[rank]),
                promised,
            )
    if any(promised is not None for promised in promises):
        findings.checked.append(
            f"every rank has as many micro-batches in flight as {layout.schedule} lets it"
        )
