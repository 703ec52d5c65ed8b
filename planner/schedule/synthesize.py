"""The best order for given durations: CP-SAT over when every action starts, hinted by the best known schedule.

The question stands in `planner.schedule.order_problem`, what no order beats in `planner.schedule.order_bound`, the
constraint program in `planner.schedule.order_model`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.errors import ScheduleError, UnsupportedError
from planner.schedule.actions import Schedule
from planner.schedule.candidates import is_canonical
from planner.schedule.durations import Durations
from planner.schedule.entry import Shape, loop_placement, wave_placement
from planner.schedule.order_model import Effort, OrderModel
from planner.schedule.order_problem import Objective, OrderProblem
from planner.schedule.room import Room
from planner.schedule.simulate import Simulation, simulate
from planner.schedule.synthesized import NAME

EXACT = 1e-9
"""Gap within which an order equals its bound, up to floating point."""
MOST_ACTIONS = 20_000
"""What the solver reads in seconds."""


class Placement(StrEnum):
    """Which ranks have the stages, where a rank has several."""

    WAVE = "wave"
    """Down and up in turn: two stages per rank make a V (ZB-V, DualPipeV, Hanayo)."""
    LOOP = "loop"
    """Every chunk of stages through all ranks from the first on (interleaved 1F1B)."""


@dataclass(frozen=True, slots=True)
class Synthesis:
    """The best order that was found, and its proof."""

    schedule: Schedule
    simulation: Simulation
    objective: Objective
    """What the order is best at."""
    value: float
    """The order's makespan or span, whichever was to be least, tails included."""
    lower_bound: float
    """No order is shorter in that, in the unit of the durations."""
    canonical: str | None
    """The best canonical schedule of the same stages that fits; None: none does."""
    canonical_value: float | None
    """Its makespan or span."""
    seconds: float = 0.0
    """Of the solver."""
    solution_seconds: float = 0.0
    """After which this order was found; 0 when no order is better than the one that the search began with."""
    deterministic: float = 0.0
    """Work of the solver, in its own measure."""

    @property
    def gap(self) -> float:
        """(value - lower bound) / value."""
        return (self.value - self.lower_bound) / self.value if self.value else 0.0

    @property
    def optimal(self) -> bool:
        """Proven: no order is shorter."""
        return self.gap <= EXACT


def best_shape(
    ranks: int,
    micro_batches: int,
    virtual_stages: int = 1,
    sequence_chunks: int = 1,
    placement: Placement = Placement.WAVE,
) -> Schedule:
    """The stages that `synthesize` orders, without any actions."""
    shape = Shape(ranks, micro_batches, virtual_stages, sequence_chunks)
    owners = (
        wave_placement(shape) if placement is Placement.WAVE else loop_placement(shape)
    )
    return Schedule(
        NAME,
        ranks,
        micro_batches,
        virtual_stages,
        sequence_chunks,
        owners,
        ((),) * ranks,
    )


def synthesize(
    durations: Durations,
    *,
    ranks: int,
    micro_batches: int,
    virtual_stages: int = 1,
    sequence_chunks: int = 1,
    placement: Placement = Placement.WAVE,
    objective: Objective = Objective.MAKESPAN,
    memory_limit: int | None = None,
    time_limit_seconds: float = 20.0,
) -> Synthesis | None:
    """The order with the least makespan or span; None when no order keeps the memory limit.

    It is never worse than the best canonical schedule of the same stages. The search runs in one thread with a fixed
    seed: a search that ends before its time limit gives the same order every time.

    Args:
        durations: per stage, or per stage and sequence chunk; pairs that save time are not searched.
        ranks: pipeline ranks.
        micro_batches: of one step.
        virtual_stages: stages per rank.
        sequence_chunks: pieces of each micro-batch; forwards run them in order, backwards in reverse.
        placement: of the stages, where a rank has several.
        objective: what is to be least.
        memory_limit: units (stage, micro-batch, chunk) that any rank may hold from F to W; None: any number.
        time_limit_seconds: after which the best order so far is returned, with its gap.

    Raises:
        LayoutError: durations for another number of stages or chunks, or with overlaps.
        UnsupportedError: too many actions for the solver.
    """
    shape = best_shape(ranks, micro_batches, virtual_stages, sequence_chunks, placement)
    room = Room.of_units(shape, memory_limit)
    problem = OrderProblem(shape, durations, room, objective=objective)
    if problem.actions > MOST_ACTIONS:
        raise UnsupportedError(
            f"an order of {problem.actions} actions is too large to search, the most is {MOST_ACTIONS}.",
            field="micro_batches",
            hint="synthesise for fewer micro-batches, or use a canonical schedule.",
        )
    known = best_known(problem)
    return known and best_order(problem, known, Effort(seconds=time_limit_seconds))


def best_known(problem: OrderProblem) -> Synthesis | None:
    """The best order that needs no search, with the bound that needs none; None when no order fits."""
    known = problem.known()
    if not known:
        return None
    named = next((each for each in known if is_canonical(each.schedule)), None)
    return _synthesis(
        problem,
        known[0],
        problem.bound(),
        named.schedule.name if named else None,
        problem.of(named) if named else None,
    )


def best_order(
    problem: OrderProblem,
    known: Synthesis,
    effort: Effort,
    *,
    below: float | None = None,
) -> Synthesis:
    """The best order that CP-SAT finds, or the known one where that is no worse.

    Args:
        problem: what is asked for.
        known: of the same problem; what it has proven already is not searched.
        effort: when to give up.
        below: only orders that take less matter: the bound is then no higher than this; None: those that are no worse
            than the known one.
    """
    target = known.value if below is None else min(below, known.value)
    if known.lower_bound >= target:
        return known
    found = OrderModel(problem, known.simulation, below).solve(effort)
    best = min((known.simulation, *_simulated(found.schedule, problem)), key=problem.of)
    made = _synthesis(
        problem,
        best,
        max(known.lower_bound, found.lower_bound),
        known.canonical,
        known.canonical_value,
    )
    is_new = best is not known.simulation
    return replace(
        made,
        seconds=found.seconds,
        solution_seconds=found.solution_seconds if is_new else 0.0,
        deterministic=found.deterministic,
    )


def _synthesis(
    problem: OrderProblem,
    best: Simulation,
    bound: float,
    canonical: str | None,
    canonical_value: float | None,
) -> Synthesis:
    schedule, value = replace(best.schedule, name=problem.shape.name), problem.of(best)
    simulation = replace(best, schedule=schedule)
    return Synthesis(
        schedule,
        simulation,
        problem.objective,
        value,
        min(bound, value),
        canonical,
        canonical_value,
    )


def _simulated(
    schedule: Schedule | None, problem: OrderProblem
) -> Iterable[Simulation]:
    """The solver's order with the real durations; actions that last no tick may have come out in a wrong order."""
    if schedule is None:
        return
    try:
        simulation = simulate(schedule, problem.durations)
    except ScheduleError:
        return
    if problem.room.holds(schedule):
        yield simulation
