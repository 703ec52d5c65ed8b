"""Solve one layout: alternate between CP-SAT and the simulator until they agree (`planner.search.stages`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ortools.sat.python import cp_model

from planner.cost import LayoutCosts, StageMap, Step, choose, durations, evaluate, tail_ticks
from planner.schedule import Schedule, critical_path, in_flight_per_stage
from planner.search.bounds import warm_ups
from planner.search.runs import Run
from planner.search.stages import StageModel

_ROUND_SECONDS = 30.0
"""Wall-clock limit of one CP-SAT call; the search's own limit may be shorter."""


class Outcome(Enum):
    """How solving a layout ended."""

    SOLVED = "solved"
    """The stage map is the layout's best."""
    NOT_BETTER = "not better"
    """Proven: no stage map fits and beats the limit."""
    STOPPED = "stopped"
    """Out of time; the bound stands."""


@dataclass(frozen=True, slots=True)
class Inside:
    """Result of solving one layout."""

    outcome: Outcome
    bound_ticks: int
    """No stage map of the layout that fits is faster (or the limit is not beaten)."""
    stage_map: StageMap | None = None
    step: Step | None = None

    @property
    def ticks(self) -> int | None:
        """Step of the stage map found."""
        return self.step.total_ticks if self.step else None


def solve_layout(
    costs: LayoutCosts,
    schedule: Schedule,
    runs: tuple[Run, ...],
    *,
    limit_ticks: int | None,
    seconds_left: Callable[[], float],
    must_fit: bool = True,
) -> Inside:
    """Best stage map of a layout that fits the memory (unless told otherwise) and beats the limit."""
    in_flight = in_flight_per_stage(schedule)
    model = StageModel(costs, runs, in_flight, limit_ticks)
    if must_fit:
        model.limit_memory()
    model.add_work_bounds(warm_ups(schedule))
    model.model.minimize(model.total)
    best: Inside | None = None
    bound = 0
    while (seconds := seconds_left()) > 0:
        solver = _solver(min(seconds, _ROUND_SECONDS))
        status = solver.solve(model.model)
        if status == cp_model.INFEASIBLE:
            return Inside(Outcome.NOT_BETTER, limit_ticks or bound)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            break
        bound = max(bound, round(solver.best_objective_bound))
        stage_map = model.stage_map(solver)
        stages = choose(costs, stage_map)
        step = evaluate(costs, schedule, stages)
        if best is None or best.ticks is None or step.total_ticks < best.ticks:
            best = Inside(Outcome.SOLVED, bound, stage_map, step)
        if best.ticks is not None and bound >= best.ticks:
            return Inside(Outcome.SOLVED, best.ticks, best.stage_map, best.step)
        tails = [sum(parts) for parts in tail_ticks(costs, stages)]
        model.add_path(critical_path(schedule, durations(costs, stages), tails))
        _hint(model, solver)
    return Inside(Outcome.STOPPED, bound, best.stage_map if best else None, best.step if best else None)


def least_memory(
    costs: LayoutCosts, schedule: Schedule, runs: tuple[Run, ...], *, seconds: float
) -> tuple[int, int] | None:
    """(pipeline rank, bytes) of the fullest rank under the stage map that needs least; None when out of time."""
    model = StageModel(costs, runs, in_flight_per_stage(schedule))
    fullest = model.model.new_int_var(0, 2**50, "fullest")
    for peak in model.peaks:
        model.model.add(fullest >= peak)
    model.model.minimize(fullest)
    solver = _solver(seconds)
    if solver.solve(model.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    peaks = [_value(solver, peak) for peak in model.peaks]
    return peaks.index(max(peaks)), max(peaks)


def _solver(seconds: float) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # several workers race: the same request could give another plan
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = max(0.01, seconds)
    return solver


def _hint(model: StageModel, solver: cp_model.CpSolver) -> None:
    """Start the next round where this one ended."""
    model.model.clear_hints()
    for index, value in enumerate(solver.response_proto.solution):
        variable = model.model.get_int_var_from_proto_index(index)
        if index != model.total.index:
            model.model.add_hint(variable, value)


def _value(solver: cp_model.CpSolver, expression: object) -> int:
    return expression if isinstance(expression, int) else int(solver.value(expression))  # type: ignore[arg-type]
