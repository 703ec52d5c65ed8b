"""The constraint program of `planner.schedule.synthesize`: when every action of every rank starts.

Starts are whole ticks; every action is an interval of fixed length, and ranks run one at a time. For stages s, units u
(micro-batch m, chunk c of Q), with u + Q the same chunk of the next micro-batch:

    F(s+1, u) >= end F(s, u) + transfer            I(s, u) >= end I(s+1, u) + transfer             (1)
    I(last, u) >= end F(last, u)                   W(s, u) >= end I(s, u)                          (2)
    X(s, u+Q) >= end X(s, u)                       for X = F, I, W                                 (3)
    F(s, m, c+1) >= end F(s, m, c)                 I(s, m, c) >= end I(s, m, c+1)                  (4)
    F(s, u) >= end W(s, u - limit)                 with one stage per rank and no chunks           (5)
    at most `limit` of [F(s, u), end W(s, u)) of a rank's stages at any time, otherwise            (6)
    least makespan >= end W, or least span >= end W - start F(lowest stage, 0) on every rank       (7)
    span >= work(r) + max(0, wait(r) - limit x f(r)), and makespan >= head(r) + as much             (8)

(3) loses nothing: sort the starts of one kind, stage and chunk, and give them to the micro-batches in order; every
other constraint compares two such classes micro-batch by micro-batch, or counts, and survives the sorting. (4) is
causal attention's. (5) is the memory limit: since F and W both run in order, the limit's unit before must have gone (no
reservoir needed). In (8), head(r) is the time until F(r, 0) can start, work(r) all that the rank does, and, with one
stage per rank and no chunks, wait(r) the time from F(r, 0) until its gradient can be back, in which the rank has only
`limit` forwards to do; otherwise the maximum is left out.

Splitting a backward never hurts: I and W back to back are a B whose gradient leaves early. Where durations are no whole
numbers of a tick they are rounded down, so the solver's bound stays a bound. Source of the model: Qi et al. 2023, "Zero
Bubble Pipeline Parallelism", section 3, whose integer program orders actions by big-M pairs instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from math import floor, lcm
from typing import TYPE_CHECKING, Any

from planner.schedule.actions import Action, ActionKind, Schedule
from planner.schedule.durations import OF_ACTIONS, OF_TRANSFERS, Durations
from planner.schedule.simulate import Simulation

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MOST_TICKS = 2**40
"""Horizon up to which durations are kept exact."""
ROUNDED_TICKS = 2**22
"""Ticks of the horizon when they are not."""
SPLIT = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_WORKS = {ActionKind.FORWARD: 0, ActionKind.BACKWARD_INPUT: 2, ActionKind.BACKWARD_WEIGHT: 3}
"""Places of the kinds in `Durations.of_actions`."""


class Objective(StrEnum):
    """What an order is best at."""

    MAKESPAN = "makespan"
    """A step that starts and ends with a barrier."""
    SPAN = "span"
    """Steps that follow each other without one (`Simulation.span`)."""

    def of(self, simulation: Simulation) -> float:
        """The time that is to be least."""
        return simulation.makespan if self is Objective.MAKESPAN else simulation.span


@dataclass(frozen=True, slots=True)
class Found:
    """What the solver says."""

    schedule: Schedule | None
    lower_bound: float
    seconds: float
    solution_seconds: float


def _tick(durations: Durations, horizon: float) -> Fraction:
    """Length of a tick: exact where that keeps numbers small enough."""
    values = [Fraction(str(value)) for name in (*OF_ACTIONS, *OF_TRANSFERS) for value in getattr(durations, name)]
    tick = Fraction(1, lcm(*(value.denominator for value in values)))
    exact_horizon = Fraction(str(horizon))
    return tick if exact_horizon / tick <= MOST_TICKS else exact_horizon / ROUNDED_TICKS


class OrderModel:
    """The constraint program: equations (1) to (8).

    Args:
        shape: stages, ranks and units; its actions do not matter.
        durations: of the same stages.
        limit: units that any rank may hold.
        start: a simulated order that keeps the limit; the answer will be no worse.
        objective: what is to be least.
    """

    def __init__(
        self, shape: Schedule, durations: Durations, limit: int, start: Simulation, objective: Objective
    ) -> None:
        from ortools.sat.python import cp_model

        self._shape, self._limit = shape, limit
        self._tick = _tick(durations, start.makespan)
        self._lengths = list(map(self._ticks, durations.of_actions(shape.sequence_chunks)))
        self._transfers = list(map(self._ticks, durations.of_transfers()))
        self._model = cp_model.CpModel()
        self._horizon = self._latest(start, objective)
        self._starts = {
            Action(stage, kind, unit): self._model.new_int_var(0, self._horizon, "")
            for stage in range(shape.stages)
            for kind in SPLIT
            for unit in range(shape.units)
        }
        self._order()
        self._ranks()
        self._memory()
        self._minimize(objective, self._ticks(objective.of(start)) + 1)
        self._hint(start)

    def _ticks(self, seconds: float) -> int:
        return floor(Fraction(str(seconds)) / self._tick)

    def _latest(self, start: Simulation, objective: Objective) -> int:
        """The best order ends by then; one of least span may end late, but never leaves all ranks and links idle."""
        if objective is Objective.MAKESPAN:
            return self._ticks(start.makespan) + 1
        chunks, stages = self._shape.sequence_chunks, self._shape.stages
        works = (self._lengths[work * stages * chunks : (work + 1) * stages * chunks] for work in _WORKS.values())
        return self._shape.micro_batches * (sum(map(sum, works)) + chunks * sum(self._transfers))

    def _length(self, action: Action) -> int:
        chunks = self._shape.sequence_chunks
        place = _WORKS[action.kind] * self._shape.stages + action.stage
        return self._lengths[place * chunks + action.micro_batch % chunks]

    def _end(self, action: Action) -> cp_model.LinearExprT:
        return self._starts[action] + self._length(action)

    def _after(self, late: Action, early: Action, gap: int = 0) -> None:
        self._model.add(self._starts[late] >= self._end(early) + gap)

    def _order(self) -> None:
        """Equations (1) to (4)."""
        for action in self._starts:
            self._in_turn(action)
            self._through_stages(action)

    def _in_turn(self, here: Action) -> None:
        """Equations (3) and (4): the same chunk of the micro-batch before, and the neighbouring chunk of the same."""
        chunks, unit = self._shape.sequence_chunks, here.micro_batch
        if unit >= chunks:
            self._after(here, here._replace(micro_batch=unit - chunks))
        if unit % chunks and here.kind is ActionKind.FORWARD:
            self._after(here, here._replace(micro_batch=unit - 1))
        elif unit % chunks and here.kind is ActionKind.BACKWARD_INPUT:
            self._after(here._replace(micro_batch=unit - 1), here)

    def _through_stages(self, here: Action) -> None:
        """Equations (1) and (2)."""
        stage, kind, unit = here
        last = self._shape.stages - 1
        forward, backward_input, backward_weight = SPLIT
        if kind is forward and stage:
            self._after(here, Action(stage - 1, kind, unit), self._transfer(stage - 1, 1))
        elif kind is backward_input and stage < last:
            self._after(here, Action(stage + 1, kind, unit), self._transfer(stage, last + 1))
        elif kind is backward_input:
            self._after(here, Action(stage, forward, unit))
        elif kind is backward_weight:
            self._after(here, Action(stage, backward_input, unit))

    def _transfer(self, boundary: int, first: int) -> int:
        owners = self._shape.stage_ranks
        return 0 if owners[boundary] == owners[boundary + 1] else self._transfers[first + boundary]

    def _ranks(self) -> None:
        for rank in range(self._shape.ranks):
            self._model.add_no_overlap(
                self._model.new_fixed_size_interval_var(start, self._length(action), "")
                for action, start in self._starts.items()
                if self._shape.stage_ranks[action.stage] == rank
            )

    @property
    def _is_plain(self) -> bool:
        """One stage per rank, without chunks."""
        return self._shape.virtual_stages == self._shape.sequence_chunks == 1

    def _memory(self) -> None:
        """Equations (5) and (6)."""
        if not self._is_plain:
            for rank in range(self._shape.ranks):
                self._hold_together(rank)
            return
        for stage in range(self._shape.stages):
            for unit in range(self._limit, self._shape.units):
                self._after(
                    Action(stage, ActionKind.FORWARD, unit),
                    Action(stage, ActionKind.BACKWARD_WEIGHT, unit - self._limit),
                )

    def _hold_together(self, rank: int) -> None:
        held = []
        for stage in self._shape.stages_of(rank):
            for unit in range(self._shape.units):
                start = self._starts[Action(stage, ActionKind.FORWARD, unit)]
                end = self._end(Action(stage, ActionKind.BACKWARD_WEIGHT, unit))
                size = self._model.new_int_var(0, self._horizon, "")
                held.append(self._model.new_interval_var(start, size, end, ""))
        if self._limit < len(held):
            self._model.add_cumulative(held, [1] * len(held), self._limit)

    def _minimize(self, objective: Objective, most: int) -> None:
        """Equations (7) and (8)."""
        least = self._model.new_int_var(0, most, str(objective))
        chunks = self._shape.sequence_chunks
        finals = range(self._shape.units - chunks, self._shape.units)
        for stage, rank in enumerate(self._shape.stage_ranks):
            for unit in finals:
                end = self._end(Action(stage, ActionKind.BACKWARD_WEIGHT, unit))
                begin = self._first(rank) if objective is Objective.SPAN else 0
                self._model.add(least + begin >= end)
        for rank in range(self._shape.ranks):
            head = self._head(rank) if objective is Objective.MAKESPAN else 0
            self._model.add(least >= head + self._work(rank) + self._idle(rank))
        self._model.minimize(least)

    def _first(self, rank: int) -> cp_model.IntVar:
        """Start of the rank: no other action of it can be earlier."""
        return self._starts[Action(self._shape.stages_of(rank)[0], ActionKind.FORWARD, 0)]

    def _head(self, rank: int) -> int:
        """Time until the rank's first action can start."""
        before = range(self._shape.stages_of(rank)[0])
        return sum(self._length(Action(stage, ActionKind.FORWARD, 0)) + self._transfer(stage, 1) for stage in before)

    def _work(self, rank: int) -> int:
        owners = self._shape.stage_ranks
        return sum(self._length(action) for action in self._starts if owners[action.stage] == rank)

    def _idle(self, rank: int) -> int:
        """The maximum of equation (8), as far as it holds."""
        if not self._is_plain:
            return 0
        last = self._shape.stages - 1
        forward, backward_input = (
            [self._length(Action(stage, kind, 0)) for stage in range(last + 1)] for kind in SPLIT[:2]
        )
        moves = sum(self._transfer(stage, 1) + self._transfer(stage, last + 1) for stage in range(rank, last))
        wait = sum(forward[rank:]) + sum(backward_input[rank + 1 :]) + moves
        return max(0, wait - self._limit * forward[rank])

    def _hint(self, start: Simulation) -> None:
        for event in (each for row in start.events for each in row):
            stage, kind, unit = event.action
            begin = self._ticks(event.start_seconds)
            if kind is not ActionKind.BACKWARD:
                self._model.add_hint(self._starts[event.action], begin)
                continue
            split = Action(stage, ActionKind.BACKWARD_INPUT, unit)
            self._model.add_hint(self._starts[split], begin)
            weight = split._replace(kind=ActionKind.BACKWARD_WEIGHT)
            self._model.add_hint(self._starts[weight], begin + self._length(split))

    def solve(self, time_limit_seconds: float) -> Found:
        """Search, in one thread and with a fixed seed."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_time_in_seconds = time_limit_seconds
        clock = _clock_of_solutions()
        status = solver.solve(self._model, clock)
        has_order = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        return Found(
            schedule=self._schedule(solver) if has_order else None,
            lower_bound=float(Fraction(max(0, round(solver.best_objective_bound))) * self._tick),
            seconds=solver.wall_time,
            solution_seconds=clock.last_seconds,
        )

    def _schedule(self, solver: cp_model.CpSolver) -> Schedule:
        def key(action: Action) -> tuple[int, int, int, int, int]:
            begin = solver.value(self._starts[action])
            kind = SPLIT.index(action.kind)
            down = action.stage if action.kind is ActionKind.FORWARD else -action.stage
            return begin, begin + self._length(action), kind, action.micro_batch, down

        owners: Sequence[int] = self._shape.stage_ranks
        rows: list[list[Action]] = [[] for _ in range(self._shape.ranks)]
        for action in sorted(self._starts, key=key):
            rows[owners[action.stage]].append(action)
        return replace(self._shape, actions=tuple(map(tuple, rows)))


def _clock_of_solutions() -> Any:
    """A callback that keeps when the last solution came; its class needs the solver, which is imported only here."""
    from ortools.sat.python import cp_model

    class Clock(cp_model.CpSolverSolutionCallback):
        def __init__(self) -> None:
            super().__init__()
            self.last_seconds = 0.0

        def on_solution_callback(self) -> None:
            self.last_seconds = self.wall_time

    return Clock()
