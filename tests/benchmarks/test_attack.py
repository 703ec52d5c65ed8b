"""What the attack says about a layout that beats a plan."""

from __future__ import annotations

import pytest

from benchmarks.attack import Attack, Better, Case, Winner, report
from planner.spec import Layout

PLAN = Layout(
    data_parallel_degree=2,
    tensor_parallel_degree=1,
    pipeline_parallel_degree=4,
    micro_batch_size=1,
)
OTHER = PLAN.model_copy(update={"micro_batch_size": 2})
WINNER = Winner(
    PLAN,
    step_seconds=1.0,
    lower_bound_seconds=0.99,
    bound_all_cuts_seconds=0.8,
    is_optimal=True,
)


@pytest.mark.parametrize(
    ("layout", "step_seconds", "judgement"),
    [
        (OTHER, 0.995, "within the gap"),
        (PLAN, 0.9, "another cut of the same layout"),
        (OTHER, 0.9, "with a cut that was not evaluated"),
        (OTHER, 0.7, "below the lower bound of all cuts"),
    ],
)
def test_a_better_layout_is_compared_with_both_bounds(
    layout: Layout, step_seconds: float, judgement: str
) -> None:
    """A step below the bound of the evaluated cuts may have another cut; below that of all cuts a bound is wrong."""
    better = Better(layout, step_seconds)
    case = Case("gpt2", "8xl4-24gb", 8, 512)
    text = report(case, Attack(WINNER, 1, (better,)))
    assert text.splitlines()[-1].endswith(f"faster, {judgement}")
