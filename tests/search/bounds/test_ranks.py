"""Bounds by what single ranks can take: layers stay whole."""

from __future__ import annotations

import pytest

from planner.cost import TICK_SECONDS, workload
from planner.search.bounds.parts import PartBounds
from planner.search.layouts.order_classes import ALIKE, MADE, PER_LAYER, SEARCHED, SPLIT
from planner.search.parts import parts_of
from planner.spec import Job
from tests.builders import cluster, job, layer, link, profile

RANKS, SAMPLES, LAYERS = 4, 64, 9
LAYER_BYTES = 16_000_000
"""Of OGP."""


def least_seconds(
    memory_bytes: int, kind: int, asked_seconds: float, step: Job
) -> float:
    """Of a class of orders on a pipeline of all devices, once it is asked for steps of so many seconds."""
    model = profile(layer(activation=1000, parameters=LAYER_BYTES // 16) * LAYERS)
    (whole,) = parts_of(cluster(RANKS, memory_bytes=memory_bytes, intra=link(1e15)))[
        -1:
    ]
    bounds = PartBounds(workload(model, whole.cluster, step), [whole])
    bounds.raised_to([asked_seconds / TICK_SECONDS])
    return (
        float(bounds.of_part(whole)[(1, 1, 1, 1, False), 1, RANKS][0, kind])
        * TICK_SECONDS
    )


@pytest.mark.parametrize("kind", [SEARCHED, PER_LAYER, ALIKE, SPLIT])
def test_where_every_rank_has_room_for_two_layers_nine_do_not_fit_on_four(
    kind: int,
) -> None:
    """Though all together have: no step is long enough. With room for three, the bound stays what the work takes."""
    for_two, for_three = (int((count + 0.5) * LAYER_BYTES) for count in (2, 3))
    assert RANKS * for_two > LAYERS * LAYER_BYTES
    assert least_seconds(for_two, kind, 100.0, job(SAMPLES)) == 100.0
    assert least_seconds(for_three, kind, 100.0, job(SAMPLES)) < 1.0


def test_of_orders_that_are_made_for_their_stages_less_is_known() -> None:
    """They may hold less than any schedule; they count only where the job names them."""
    named = job(SAMPLES, schedule=("1f1b", "synthesized"))
    room = int(2.5 * LAYER_BYTES)
    assert least_seconds(room, SEARCHED, 100.0, named) == 100.0
    assert least_seconds(room, MADE, 100.0, named) < 1.0
    assert least_seconds(room, MADE, 100.0, job(SAMPLES)) == float("inf")
