"""What every action of a schedule makes and waits for, as columns; the works that tell how long it lasts.

Recomputation that runs ahead of a backward is a node of its own, between the backward and what stands before it. Joint
pairs stand between two nodes that take no time: one waits for the second action's input, the other hands on the first
one's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from planner.schedule.actions import Action, ActionKind, Schedule
from planner.schedule.columns import Columns
from planner.schedule.rows import Numbers

WORKS = 9
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)
"""In the order of `planner.schedule.rows.KINDS`."""
RECOMPUTE, PLAIN_BACKWARD = 4, 5
"""Recomputation ahead of a backward, and that backward without it."""
PAIRED_FORWARD, PAIRED_BACKWARD, JOIN = 6, 7, 8
"""The second action of a pair; and no work, where a pair waits for its other input or hands on its other output."""
NOTHING = -1
"""No action; as an index into a list it is the last place, which holds time 0."""
NO_TRANSFER = 0


@dataclass(frozen=True, slots=True)
class Needs:
    """All nodes of a schedule, rank after rank.

    Outputs are numbered: forwards by ``stage * units + unit``, then gradients, then one for no output.
    """

    outputs: Numbers
    """What each node makes."""
    inputs: Numbers
    """The output that it waits for, or `NOTHING`."""
    works: Numbers
    """Indices into `Durations.of_actions`."""
    transfers: Numbers
    """Of the input; indices into `Durations.of_transfers`."""
    first: Numbers
    """Per rank: where its nodes begin; then where the last rank's end."""

    @classmethod
    def of(cls, schedule: Schedule, columns: Columns) -> Needs:
        """Of a checked schedule."""
        plain = _plain(schedule, columns)
        if schedule.recompute_stop is None and not schedule.paired:
            return plain
        rows = [
            _SpecialRow(schedule, plain, first) for first in plain.first[:-1].tolist()
        ]
        for row, actions in zip(rows, schedule.actions, strict=True):
            for place, action in enumerate(actions):
                row.add(place, action)
        sizes = [len(row.made.works) for row in rows]
        return cls(
            outputs=np.concatenate([row.made.outputs for row in rows]),
            inputs=np.concatenate([row.made.inputs for row in rows]),
            works=np.concatenate([row.made.works for row in rows]),
            transfers=np.concatenate([row.made.transfers for row in rows]),
            first=np.array([0, *accumulate(sizes)]),
        )

    def is_action(self, schedule: Schedule) -> NDArray[np.bool_]:
        """By node: does it stand for an action of the schedule?"""
        kinds = self.works // (schedule.stages * schedule.sequence_chunks)
        return np.not_equal(kinds, RECOMPUTE) & np.not_equal(kinds, JOIN)


def _plain(schedule: Schedule, columns: Columns) -> Needs:
    """One node for every action."""
    stages, units, chunks = schedule.stages, schedule.units, schedule.sequence_chunks
    all_stages = np.arange(stages)
    crosses = (
        np.diff(np.array(schedule.stage_ranks)) != 0
    )  # stages of one rank hand over without a transfer
    outputs = np.full((4, stages), 2 * stages * units)
    inputs = np.full((4, stages), NOTHING)
    transfers = np.full((4, stages), NO_TRANSFER)
    outputs[FORWARD] = all_stages * units
    inputs[FORWARD, 1:] = all_stages[:-1] * units
    transfers[FORWARD, 1:] = np.where(crosses, all_stages[1:], NO_TRANSFER)
    for work in (BACKWARD, BACKWARD_INPUT):
        outputs[work] = (stages + all_stages) * units
        inputs[work, :-1] = (stages + all_stages[1:]) * units
        transfers[work, :-1] = np.where(crosses, stages + all_stages[:-1], NO_TRANSFER)
    which = columns.kinds * stages + columns.stages
    made, needed = outputs.ravel()[which], inputs.ravel()[which]
    return Needs(
        outputs=np.minimum(made + columns.units, 2 * stages * units),
        inputs=np.where(needed == NOTHING, NOTHING, needed + columns.units),
        works=which if chunks == 1 else which * chunks + columns.units % chunks,
        transfers=transfers.ravel()[which],
        first=columns.first,
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """`Needs` of one rank, as it grows."""

    outputs: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    works: list[int] = field(default_factory=list)
    transfers: list[int] = field(default_factory=list)


class _SpecialRow:
    """Copies a rank's plain nodes action by action, and adds those that pairs and recomputation need."""

    def __init__(self, schedule: Schedule, plain: Needs, first: int) -> None:
        self._schedule, self._plain, self._first = schedule, plain, first
        self._no_output = 2 * schedule.stages * schedule.units
        self.made = _Row()

    def add(self, place: int, action: Action) -> None:
        """Copy the action at a place of the rank's list."""
        stop, at = self._schedule.recompute_stop, self._first + place
        if action in self._schedule.paired:
            self._pair(at, action)
        elif stop is not None and action.kind is ActionKind.BACKWARD:
            if action.micro_batch < stop:
                self._append(
                    NOTHING, self._work(RECOMPUTE, action), NO_TRANSFER, self._no_output
                )
            self._copy(at, self._work(PLAIN_BACKWARD, action))
        else:
            self._copy(at, int(self._plain.works[at]))

    def _pair(self, at: int, action: Action) -> None:
        work = self._work(
            PAIRED_FORWARD if action.kind is ActionKind.FORWARD else PAIRED_BACKWARD,
            action,
        )
        if not self._schedule.joint_pairs:
            self._copy(at, work)
            return
        join, made, plain = self._work(JOIN, action), self.made, self._plain
        first = (
            made.works.pop(),
            made.outputs.pop(),
            made.inputs.pop(),
            made.transfers.pop(),
        )
        self._append(
            int(plain.inputs[at]), join, int(plain.transfers[at]), self._no_output
        )
        self._append(first[2], first[0], first[3], self._no_output)
        self._append(NOTHING, work, NO_TRANSFER, int(plain.outputs[at]))
        self._append(NOTHING, join, NO_TRANSFER, first[1])

    def _copy(self, at: int, work: int) -> None:
        self._append(
            int(self._plain.inputs[at]),
            work,
            int(self._plain.transfers[at]),
            int(self._plain.outputs[at]),
        )

    def _append(self, needed: int, work: int, transfer: int, output: int) -> None:
        self.made.inputs.append(needed)
        self.made.works.append(work)
        self.made.transfers.append(transfer)
        self.made.outputs.append(output)

    def _work(self, work: int, action: Action) -> int:
        chunks = self._schedule.sequence_chunks
        return (
            work * self._schedule.stages + action.stage
        ) * chunks + action.micro_batch % chunks


def producers_of(needs: Needs) -> Numbers:
    """By node: the one that makes its input, or `NOTHING`."""
    maker = np.full(int(needs.outputs.max()) + 1, NOTHING)
    maker[needs.outputs] = np.arange(len(needs.outputs))
    return np.where(needs.inputs == NOTHING, NOTHING, maker[needs.inputs])


def read_output(
    output: int, schedule: Schedule
) -> tuple[tuple[ActionKind, ...], int, int]:
    """The kinds of action that make an output, its stage and its unit."""
    is_gradient, index = divmod(output, schedule.stages * schedule.units)
    kinds: Sequence[ActionKind] = (ActionKind.FORWARD,)
    if is_gradient:
        kinds = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    return tuple(kinds), *divmod(index, schedule.units)
