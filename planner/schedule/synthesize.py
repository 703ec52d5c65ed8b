"""The best order for given durations: CP-SAT over when every action starts, hinted by the best canonical schedule.

The constraint program stands in `planner.schedule.order_model`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.errors import LayoutError, ScheduleError, UnsupportedError
from planner.schedule.actions import Schedule
from planner.schedule.candidates import candidates, is_canonical
from planner.schedule.durations import Durations
from planner.schedule.entry import Shape, loop_placement, wave_placement
from planner.schedule.graph import check_stages
from planner.schedule.order_model import SPLIT, Objective, OrderModel
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
    lower_bound: float
    """No order is shorter in that, in the unit of the durations."""
    canonical: str | None
    """The best canonical schedule of the same stages that keeps the limit; None: none does."""
    canonical_value: float | None
    """Its makespan or span."""
    seconds: float
    """Of the search."""
    solution_seconds: float
    """After which this order was found; 0 when no order is better than the one that the search began with."""

    @property
    def value(self) -> float:
        """The order's makespan or span, whichever was to be least."""
        return self.objective.of(self.simulation)

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
    owners = wave_placement(shape) if placement is Placement.WAVE else loop_placement(shape)
    return Schedule(NAME, ranks, micro_batches, virtual_stages, sequence_chunks, owners, ((),) * ranks)


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
    _check(durations, shape)
    limit = shape.units * virtual_stages if memory_limit is None else memory_limit
    known = [simulate(each, durations) for each in candidates(shape, limit)]
    if not known:
        return None
    start = min(known, key=objective.of)
    named = min((each for each in known if is_canonical(each.schedule)), key=objective.of, default=None)
    found = OrderModel(shape, durations, limit, start, objective).solve(time_limit_seconds)
    best = min((start, *_simulated(found.schedule, durations, limit)), key=objective.of)
    schedule = replace(best.schedule, name=shape.name)
    return Synthesis(
        schedule=schedule,
        simulation=replace(best, schedule=schedule),
        objective=objective,
        lower_bound=min(found.lower_bound, objective.of(best)),
        canonical=named.schedule.name if named else None,
        canonical_value=objective.of(named) if named else None,
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
    check_stages(shape, durations)
    if any(durations.overlap):
        raise LayoutError(
            f"{NAME} pairs no actions, so nothing overlaps.", field="overlap", mend="leave the overlap out."
        )


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
