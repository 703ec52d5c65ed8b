"""What another order of the micro-batches could save on the plan's own stages."""

from __future__ import annotations

from planner.search.engine.synthesize import order_problem
from planner.search.result import Solution


def order_gap(best: Solution) -> float | None:
    """Return the largest part of the step that another order may save.

    It is (step - bound) / step, with a bound on all orders that fit in memory. None: one
    pipeline rank has nothing to order, and ranks that differ have no bound.
    """
    costs = best.costs
    has_one_rank = costs.layout.pipeline_parallel_degree == 1
    if has_one_rank or costs.columns or costs.ranks or costs.layout.activation_offload:
        return None
    problem = order_problem(costs, best.stage_map, best.schedule)
    return max(0.0, 1 - problem.bound() / best.total)
