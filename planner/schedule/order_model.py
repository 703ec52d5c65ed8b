"""The constraint program of `planner.schedule.synthesize`: when every action of every rank starts.

Starts are whole ticks; every action is an interval of fixed length, and ranks run one at a time. For stages s, units u
(micro-batch m, chunk c of Q), with u + Q the same chunk of the next micro-batch:

    F(s+1, u) >= end F(s, u) + transfer            I(s, u) >= end I(s+1, u) + transfer             (1)
    I(last, u) >= end F(last, u)                   W(s, u) >= end I(s, u)                          (2)
    X(s, u+Q) >= end X(s, u)                       for X = F, I, W                                 (3)
    F(s, m, c+1) >= end F(s, m, c)                 I(s, m, c) >= end I(s, m, c+1)                  (4)
    F(s, u) >= end W(s, u - limit(s))              with one stage per rank and no chunks           (5)
    sum of the sizes of all [F(s, u), end W(s, u)) of a rank's stages <= its room, otherwise       (6)
    least makespan >= end W + tail, or least span >= as much - start F(lowest stage, 0), on every rank  (7)
    least >= what `planner.schedule.order_bound` tells                                             (8)
    where backwards are not split: B in the place of I and of W                                    (9)

(3) loses nothing: sort the starts of one kind, stage and chunk, and give them to the micro-batches in order; every
other constraint compares two such classes micro-batch by micro-batch, or counts, and survives the sorting. (4) is
causal attention's. (5) is the memory limit: since F and W both run in order, the limit's unit before must have gone (no
reservoir needed).

Splitting a backward never hurts: I and W back to back are a B whose gradient leaves early. Where durations are no whole
numbers of a tick they are rounded down, so the solver's bound stays a bound. Source of the model: Qi et al. 2023, "Zero
Bubble Pipeline Parallelism", section 3, whose integer program orders actions by big-M pairs instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, inf, lcm
from typing import TYPE_CHECKING, Any

from planner.schedule.actions import Action, ActionKind, Schedule
from planner.schedule.durations import OF_ACTIONS, OF_TRANSFERS, Durations
from planner.schedule.order_bound import Lengths, OrderBound, is_plain
from planner.schedule.order_problem import Objective, OrderProblem
from planner.schedule.simulate import Simulation

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MOST_TICKS = 2**40
"""Horizon up to which durations are kept exact."""
ROUNDED_TICKS = 2**22
"""Ticks of the horizon when they are not."""


@dataclass(frozen=True, slots=True)
class Effort:
    """When CP-SAT gives up: by the clock, or by its own measure of work, which is the same on every machine."""

    seconds: float = inf
    deterministic: float = inf


@dataclass(frozen=True, slots=True)
class Found:
    """What the solver says."""

    schedule: Schedule | None
    lower_bound: float
    seconds: float
    solution_seconds: float
    deterministic: float
    """Work that it took."""


def _tick(durations: Durations, tails: Sequence[float], horizon: float) -> Fraction:
    """Length of a tick: exact where that keeps numbers small enough."""
    times = [
        value
        for name in (*OF_ACTIONS, *OF_TRANSFERS)
        for value in getattr(durations, name)
    ]
    tick = Fraction(
        1, lcm(*(Fraction(str(value)).denominator for value in (*times, *tails)))
    )
    exact_horizon = Fraction(str(horizon))
    return tick if exact_horizon / tick <= MOST_TICKS else exact_horizon / ROUNDED_TICKS


class OrderModel:
    """The constraint program: equations (1) to (9).

    Args:
        problem: what is asked for.
        start: a simulated order that fits.
        below: only orders that take less matter; None: those that are no worse than the start.
    """

    def __init__(
        self, problem: OrderProblem, start: Simulation, below: float | None = None
    ) -> None:
        from ortools.sat.python import cp_model

        shape, durations = problem.shape, problem.durations
        self._problem, self._shape = problem, shape
        self._tick = _tick(durations, problem.tails, problem.of(start))
        in_ticks = list(map(self._ticks, durations.of_actions(shape.sequence_chunks)))
        transfers = list(map(self._ticks, durations.of_transfers()))
        self._lengths = Lengths(shape, in_ticks, transfers, problem.kinds)
        self._tails = tuple(map(self._ticks, problem.tails or (0,) * shape.ranks))
        self._releasing, self._passing = problem.kinds[-1], problem.kinds[1]
        self._model = cp_model.CpModel()
        self._most = max(
            0,
            self._ticks(problem.of(start)) + 1
            if below is None
            else self._before(below),
        )
        self._horizon = (
            self._most if problem.objective is Objective.MAKESPAN else self._latest()
        )
        self._starts = {
            Action(stage, kind, unit): self._model.new_int_var(0, self._horizon, "")
            for stage in range(shape.stages)
            for kind in problem.kinds
            for unit in range(shape.units)
        }
        self._order()
        self._ranks()
        self._memory()
        self._minimize()
        self._hint(start)

    def _ticks(self, seconds: float) -> int:
        return floor(Fraction(str(seconds)) / self._tick)

    def _before(self, seconds: float) -> int:
        """The last whole tick before."""
        return ceil(Fraction(str(seconds)) / self._tick) - 1

    def _latest(self) -> int:
        """An order of least span may end late, but never leaves all ranks and links idle."""
        shape, lengths = self._shape, self._lengths
        moves = sum(lengths.transfers) * shape.units
        return int(
            moves
            + sum(lengths.work(rank, lengths.kinds) for rank in range(shape.ranks))
        )

    def _length(self, action: Action) -> int:
        return int(self._lengths.action(action))

    def _end(self, action: Action) -> cp_model.LinearExprT:
        return self._starts[action] + self._length(action)

    def _after(self, late: Action, early: Action, gap: float = 0) -> None:
        self._model.add(self._starts[late] >= self._end(early) + int(gap))

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
        elif unit % chunks and here.kind is self._passing:
            self._after(here._replace(micro_batch=unit - 1), here)

    def _through_stages(self, here: Action) -> None:
        """Equations (1), (2) and (9)."""
        stage, kind, unit = here
        last = self._shape.stages - 1
        if kind is ActionKind.FORWARD:
            if stage:
                self._after(
                    here,
                    Action(stage - 1, kind, unit),
                    self._lengths.forward_transfer(stage - 1),
                )
        elif kind is not self._passing:
            self._after(here, here._replace(kind=self._passing))
        elif stage < last:
            self._after(
                here,
                Action(stage + 1, kind, unit),
                self._lengths.backward_transfer(stage),
            )
        else:
            self._after(here, here._replace(kind=ActionKind.FORWARD))

    def _ranks(self) -> None:
        for rank in range(self._shape.ranks):
            self._model.add_no_overlap(
                self._model.new_fixed_size_interval_var(start, self._length(action), "")
                for action, start in self._starts.items()
                if self._shape.stage_ranks[action.stage] == rank
            )

    def _memory(self) -> None:
        """Equations (5) and (6)."""
        if not is_plain(self._shape):
            for rank in range(self._shape.ranks):
                self._hold_together(rank)
            return
        for stage in range(self._shape.stages):
            most = self._problem.room.most_units(self._shape, stage)
            for unit in range(most, self._shape.units):
                gone = Action(stage, self._releasing, unit - most)
                self._after(Action(stage, ActionKind.FORWARD, unit), gone)

    def _hold_together(self, rank: int) -> None:
        room, held, sizes = self._problem.room, [], []
        for stage in self._shape.stages_of(rank):
            for unit in range(self._shape.units):
                start = self._starts[Action(stage, ActionKind.FORWARD, unit)]
                end = self._end(Action(stage, self._releasing, unit))
                size = self._model.new_int_var(0, self._horizon, "")
                held.append(self._model.new_interval_var(start, size, end, ""))
                sizes.append(room.sizes[stage])
        if room.capacities[rank] < sum(sizes):
            self._model.add_cumulative(held, sizes, room.capacities[rank])

    def _minimize(self) -> None:
        """Equations (7) and (8)."""
        has_barrier = self._problem.objective is Objective.MAKESPAN
        least = self._model.new_int_var(0, self._most, "least")
        finals = range(
            self._shape.units - self._shape.sequence_chunks, self._shape.units
        )
        for stage, rank in enumerate(self._shape.stage_ranks):
            for unit in finals:
                end = self._end(Action(stage, self._releasing, unit))
                self._model.add(
                    least + (0 if has_barrier else self._first(rank))
                    >= end + self._tails[rank]
                )
        bound = OrderBound(self._lengths, self._problem.room, self._tails, has_barrier)
        self._model.add(least >= int(bound.value()))
        self._model.minimize(least)

    def _first(self, rank: int) -> cp_model.IntVar:
        """Start of the rank: no other action of it can be earlier."""
        return self._starts[
            Action(self._shape.stages_of(rank)[0], ActionKind.FORWARD, 0)
        ]

    def _hint(self, start: Simulation) -> None:
        for event in (each for row in start.events for each in row):
            begin = self._ticks(event.start_seconds)
            if event.action in self._starts:
                self._model.add_hint(self._starts[event.action], begin)
                continue
            split = event.action._replace(kind=self._passing)
            self._model.add_hint(self._starts[split], begin)
            weight = split._replace(kind=self._releasing)
            self._model.add_hint(self._starts[weight], begin + self._length(split))

    def solve(self, effort: Effort) -> Found:
        """Search, in one thread and with a fixed seed; an order that is not found although no limit was met is none."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = (
            1  # several workers race: the same problem could give another order
        )
        solver.parameters.random_seed = 0
        solver.parameters.catch_sigint_signal = False  # Ctrl-C is the caller's
        solver.parameters.max_time_in_seconds = effort.seconds
        solver.parameters.max_deterministic_time = effort.deterministic
        clock = _clock_of_solutions()
        status = solver.solve(self._model, clock)
        bound = (
            self._most + 1
            if status == cp_model.INFEASIBLE
            else max(0, round(solver.best_objective_bound))
        )
        return Found(
            schedule=self._schedule(solver)
            if status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
            else None,
            lower_bound=float(bound * self._tick),
            seconds=solver.wall_time,
            solution_seconds=clock.last_seconds,
            deterministic=solver.response_proto.deterministic_time,
        )

    def _schedule(self, solver: cp_model.CpSolver) -> Schedule:
        def key(action: Action) -> tuple[int, int, int, int, int]:
            begin = solver.value(self._starts[action])
            kind = self._problem.kinds.index(action.kind)
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
