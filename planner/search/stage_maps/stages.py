"""The master problem of one layout: which segments make the stage map (CP-SAT).

y(s,i,j) = 1 when rank s holds the layers [i, j); T, the step:

    (6)  the chosen segments follow each other from the first layer to the last          -> choose_segments()
    (7)  T >= sum of cut k's cost of the chosen segments, for every known cut k          -> choose_segments()
    (8)  minimise T                                                                      -> choose_segments()

Segments that cannot be in a better stage map have been struck out before (`planner.search.stage_maps.paths`, H3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from planner.search.stage_maps.segments import Mask, Table


@dataclass(frozen=True, slots=True)
class Effort:
    """How long CP-SAT may work: by the clock, or by its deterministic measure of work."""

    seconds: float = float("inf")
    deterministic: float = float("inf")


def choose_segments(
    tables: Sequence[Table], open_: Mask, limit_ticks: int, effort: Effort
) -> tuple[bool, int, tuple[tuple[int, int], ...]]:
    """Solve the master problem.

    Args:
        tables: per cut, what every segment adds to it.
        open_: segments to choose from.
        limit_ticks: only steps below this matter.
        effort: when to give up.

    Returns:
        (proven, bound in ticks, (x, y) per rank); no segments when none beats the limit (proven) or none was found.
    """
    model = cp_model.CpModel()
    stages, width, _ = open_.shape
    places = np.argwhere(open_)
    chosen = [model.new_bool_var("") for _ in places]
    leaving, entering = defaultdict(list), defaultdict(list)
    for variable, (s, x, y) in zip(chosen, places.tolist(), strict=True):
        leaving[s, x].append(variable)
        entering[s + 1, y].append(variable)
    for s in range(stages):
        model.add_exactly_one(
            variable for x in range(width) for variable in leaving[s, x]
        )
        for x in range(width):
            if s > 0 and (leaving[s, x] or entering[s, x]):
                model.add(sum(leaving[s, x]) == sum(entering[s, x]))
    total = model.new_int_var(0, max(0, limit_ticks - 1), "T")
    for table in tables:
        model.add(
            total >= cp_model.LinearExpr.weighted_sum(chosen, table[open_].tolist())
        )
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = (
        1  # several workers race: the same request could give another plan
    )
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # Ctrl-C is the caller's
    solver.parameters.max_time_in_seconds = max(0.01, effort.seconds)
    solver.parameters.max_deterministic_time = effort.deterministic
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return True, limit_ticks, ()
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return False, 0, ()
    path = [
        (x, y)
        for variable, (s, x, y) in zip(chosen, places.tolist(), strict=True)
        if solver.value(variable)
    ]
    return status == cp_model.OPTIMAL, round(solver.best_objective_bound), tuple(path)
