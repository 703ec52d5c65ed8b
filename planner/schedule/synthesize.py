"""The best order for given durations: CP-SAT over when every action starts, hinted by the best canonical schedule.

Starts are whole ticks; every action is an interval of fixed length, and ranks run one at a time. Within a stage each
kind runs in micro-batch order, which loses nothing: units of a stage are alike, so two of them may swap names.

    F(s+1, m) >= end F(s, m) + transfer            I(s, m) >= end I(s+1, m) + transfer             (1)
    I(last, m) >= end F(last, m)                   W(s, m) >= end I(s, m)                          (2)
    F(s, m) >= end W(s, m - limit)                 with one stage per rank                         (3)
    at most `limit` of [F(s, m), end W(s, m)) of a rank's stages at any time, with several         (4)
    least makespan >= end W                                                                        (5)

(3) is the memory limit: since F and W both run in order, the limit's unit before must have gone (no reservoir needed).
Splitting a backward never hurts: I and W back to back are a B whose gradient leaves early. Where durations are no whole
numbers of a tick they are rounded down, so the solver's bound stays a bound. Source of the model: Qi et al. 2023, "Zero
Bubble Pipeline Parallelism", section 3, whose integer program orders actions by big-M pairs instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor, lcm
from typing import TYPE_CHECKING, Any

from planner.errors import LayoutError, ScheduleError, UnsupportedError
from planner.schedule.actions import Action, ActionKind, Schedule
from planner.schedule.candidates import candidates, is_canonical
from planner.schedule.durations import OF_ACTIONS, OF_TRANSFERS, Durations
from planner.schedule.entry import Shape, wave_placement
from planner.schedule.simulate import Simulation, simulate

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MOST_TICKS = 2**40
"""Horizon up to which durations are kept exact."""
ROUNDED_TICKS = 2**22
"""Ticks of the horizon when they are not."""
EXACT = 1e-9
"""Gap within which a makespan equals its bound, up to floating point."""
MOST_ACTIONS = 20_000
"""What the solver reads in seconds."""
SPLIT = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class Synthesis:
    """The best order that was found, and its proof."""

    schedule: Schedule
    simulation: Simulation
    lower_bound: float
    """No order is shorter, in the unit of the durations."""
    canonical: str | None
    """The best canonical schedule that keeps the limit; None: none does."""
    canonical_makespan: float | None
    seconds: float
    """Of the search."""
    solution_seconds: float
    """After which this order was found; 0 when no order is better than the one that the search began with."""

    @property
    def gap(self) -> float:
        """(makespan - lower bound) / makespan."""
        makespan = self.simulation.makespan
        return (makespan - self.lower_bound) / makespan if makespan else 0.0

    @property
    def optimal(self) -> bool:
        """Proven: no order is shorter."""
        return self.gap <= EXACT


def best_shape(ranks: int, micro_batches: int, virtual_stages: int) -> Schedule:
    """The stages that `synthesize` orders: one per rank, or several on waves; without any actions."""
    placement = wave_placement(Shape(ranks, micro_batches, virtual_stages))
    return Schedule("synthesized", ranks, micro_batches, virtual_stages, 1, placement, ((),) * ranks)


def synthesize(
    durations: Durations,
    *,
    ranks: int,
    micro_batches: int,
    virtual_stages: int = 1,
    memory_limit: int | None = None,
    time_limit_seconds: float = 20.0,
) -> Synthesis | None:
    """The order with the least makespan; None when no order keeps the memory limit.

    It is never worse than the best canonical schedule. The search runs in one thread with a fixed seed: a search that
    ends before its time limit gives the same order every time.

    Args:
        durations: per stage; stages stand one per rank, or, with several per rank, in a V (or more waves).
        ranks: pipeline ranks.
        micro_batches: of one step.
        virtual_stages: stages per rank.
        memory_limit: units (stage, micro-batch) that any rank may hold from F to W; None: any number.
        time_limit_seconds: after which the best order so far is returned, with its gap.

    Raises:
        LayoutError: durations for another number of stages, or with sequence chunks.
        UnsupportedError: too many actions for the solver.
    """
    shape = best_shape(ranks, micro_batches, virtual_stages)
    _check(durations, shape)
    limit = shape.units * virtual_stages if memory_limit is None else memory_limit
    known = [simulate(each, durations) for each in candidates(shape, limit)]
    if not known:
        return None
    start = min(known, key=_makespan)
    named = min((each for each in known if is_canonical(each.schedule)), key=_makespan, default=None)
    found = _Model(shape, durations, limit, start).solve(time_limit_seconds)
    best = min((start, *_simulated(found.schedule, durations, limit)), key=_makespan)
    schedule = replace(best.schedule, name=shape.name)
    return Synthesis(
        schedule=schedule,
        simulation=replace(best, schedule=schedule),
        lower_bound=min(found.lower_bound, best.makespan),
        canonical=named.schedule.name if named else None,
        canonical_makespan=named.makespan if named else None,
        seconds=found.seconds,
        solution_seconds=0.0 if best is start else found.solution_seconds,
    )


def _check(durations: Durations, shape: Schedule) -> None:
    actions = len(SPLIT) * shape.stages * shape.units
    if actions > MOST_ACTIONS:
        raise UnsupportedError(
            f"an order of {actions} actions is too large to search, the most is {MOST_ACTIONS}.",
            field="micro_batches",
            mend="synthesise for fewer micro-batches, or use a canonical schedule.",
        )
    if durations.stages == shape.stages and durations.sequence_chunks == 1:
        return
    raise LayoutError(
        f"durations of {durations.stages} stages and {durations.sequence_chunks} sequence chunks for {shape.stages} "
        "stages without chunks.",
        field="durations",
        mend=f"give {shape.stages} values.",
    )


def _makespan(simulation: Simulation) -> float:
    return simulation.makespan


def _simulated(schedule: Schedule | None, durations: Durations, limit: int) -> Iterable[Simulation]:
    """The solver's order with the real durations; actions that last no tick may have come out in a wrong order."""
    if schedule is None:
        return
    try:
        simulation = simulate(schedule, durations)
    except ScheduleError:
        return
    if max(simulation.peak_in_flight) <= limit:
        yield simulation


@dataclass(frozen=True, slots=True)
class _Found:
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


class _Model:
    """The constraint program: equations (1) to (5)."""

    def __init__(self, shape: Schedule, durations: Durations, limit: int, start: Simulation) -> None:
        from ortools.sat.python import cp_model

        self._shape, self._limit = shape, limit
        self._tick = _tick(durations, start.makespan)
        self._lengths = list(map(self._ticks, durations.of_actions()))
        self._transfers = list(map(self._ticks, durations.of_transfers()))
        self._model = cp_model.CpModel()
        self._horizon = self._ticks(start.makespan) + 1
        self._starts = {
            Action(stage, kind, unit): self._model.new_int_var(0, self._horizon, "")
            for stage in range(shape.stages)
            for kind in SPLIT
            for unit in range(shape.units)
        }
        self._order()
        self._ranks()
        self._memory()
        self._objective()
        self._hint(start)

    def _ticks(self, seconds: float) -> int:
        return floor(Fraction(str(seconds)) / self._tick)

    def _length(self, action: Action) -> int:
        work = {"F": 0, "I": 2, "W": 3}[action.kind.value]
        return self._lengths[work * self._shape.stages + action.stage]

    def _end(self, action: Action) -> cp_model.LinearExprT:
        return self._starts[action] + self._length(action)

    def _after(self, late: Action, early: Action, gap: int = 0) -> None:
        self._model.add(self._starts[late] >= self._end(early) + gap)

    def _order(self) -> None:
        """Equations (1) and (2), and the order of units."""
        last = self._shape.stages - 1
        forward, backward_input, backward_weight = SPLIT
        for stage, kind, unit in self._starts:
            here = Action(stage, kind, unit)
            if unit:
                self._after(here, Action(stage, kind, unit - 1))
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

    def _memory(self) -> None:
        """Equations (3) and (4)."""
        if self._shape.virtual_stages > 1:
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

    def _objective(self) -> None:
        """Equation (5)."""
        self._makespan = self._model.new_int_var(0, self._horizon, "makespan")
        final = self._shape.units - 1
        for stage in range(self._shape.stages):
            self._model.add(self._makespan >= self._end(Action(stage, ActionKind.BACKWARD_WEIGHT, final)))
        self._model.minimize(self._makespan)

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

    def solve(self, time_limit_seconds: float) -> _Found:
        """Search, in one thread and with a fixed seed."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_time_in_seconds = time_limit_seconds
        clock = _clock_of_solutions()
        status = solver.solve(self._model, clock)
        has_order = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        return _Found(
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
