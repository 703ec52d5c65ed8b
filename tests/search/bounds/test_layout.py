"""What the bounds say of a schedule without building it."""

from __future__ import annotations

from unittest import mock

import pytest

from planner.cost import layout_costs, workload
from planner.errors import UnsupportedError
from planner.schedule import ActionKind, build, in_flight_per_stage, names
from planner.search.bounds.layout import (
    BOUNDED,
    Totals,
    any_order_bound,
    lower_bound,
    warm_ups,
)
from planner.search.stage_maps.segments import allowed_modes
from planner.spec.layout import Layout
from tests.builders import cluster, job, layer, profile


def told(name: str, ranks: int, micro_batches: int) -> tuple[int, ...]:
    """`warm_ups` of a layout with these numbers."""
    layout = Layout(schedule=name, pipeline_parallel_degree=ranks)
    return warm_ups(mock.Mock(layout=layout, micro_batches=micro_batches))


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
def test_warm_ups_are_those_of_the_built_schedule(
    name: str, ranks: int, micro_batches: int
) -> None:
    """Forwards before the first backward, and most in flight, as the schedule's own actions have them."""
    schedule = build(name, ranks=ranks, micro_batches=micro_batches)
    kinds = [[action.kind for action in actions] for actions in schedule.actions]
    assert told(name, ranks, micro_batches) == tuple(
        row.index(ActionKind.BACKWARD) for row in kinds
    )
    assert told(name, ranks, micro_batches) == in_flight_per_stage(schedule)


def test_every_schedule_that_the_search_may_choose_runs() -> None:
    """The executor runs more than have bounds, never fewer."""
    assert set(names(runnable_only=True)) > set(BOUNDED)


def test_a_schedule_without_bounds_is_refused() -> None:
    """No bound is guessed."""
    with pytest.raises(UnsupportedError, match="no bound is known"):
        told("zb-h1", 2, 4)


def test_layers_are_whole() -> None:
    """(B5): three layers of 3 ms on two ranks: one of them has two, for each of four micro-batches."""
    work = workload(profile(layer() * 3), cluster(2), job(4))
    costs = layout_costs(work, Layout(pipeline_parallel_degree=2))
    assert (
        any_order_bound(costs, Totals.of(costs, allowed_modes(costs, ("none",))))
        == 4 * 2 * 3_000_000
    )


def test_memory_makes_layers_recompute() -> None:
    """(B6): four layers of 3 ms that keep 1000 bytes, or none and 1 ms more: of 2500 bytes, 1.5 layers recompute."""
    work = workload(
        profile(layer(activation=1000, modes=("none", "full")) * 4),
        cluster(1, memory_bytes=2500),
        job(1),
    )
    costs = layout_costs(work, Layout())
    totals = Totals.of(costs, allowed_modes(costs, ("per-layer",)))
    assert lower_bound(costs, totals, warm_ups(costs)) == 4 * 3_000_000 + 1_500_000 - 1
