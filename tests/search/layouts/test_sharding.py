"""Groups of ranks that share out ZeRO's states: when they win, and which of them the search does without."""

from __future__ import annotations

from typing import Any

import pytest

import planner.search.layouts.sharding as module
from planner.check import check
from planner.cost import LayoutCosts, Workload, layout_costs, workload
from planner.executor.support import check_plan
from planner.search import plan
from planner.search.layouts.space import space_of
from planner.spec import Layout, ModelProfile, Plan
from tests.builders import cluster, job, layer, link, profile, request

ELEMENTS = 500_000
MODEL = profile(layer(parameters=ELEMENTS, activation=500, optimizer=5e-5) * 8)
SLOW = {"nodes": 2, "inter": link(1e7, 1e-5)}


def planned(memory_bytes: int, **wishes: Any) -> Plan:
    """Of eight devices on two nodes with a slow network between them, each with four micro-batches."""
    step = job(32, pipeline_parallel_degree=1, schedule="1f1b", **wishes)
    found = plan(
        request(MODEL, cluster(8, memory_bytes=memory_bytes, **SLOW), step), MODEL
    )
    assert isinstance(found, Plan)
    check_plan(found)
    assert check(found, MODEL).problems == ()
    return found


def test_a_node_shares_out_what_the_network_is_too_slow_for() -> None:
    """64 MB of states: where a rank has room for a quarter, but not for ZeRO 1, the four of a node share them out."""
    found = planned(21_500_000)
    assert (found.layout.zero_stage, found.layout.zero_shard_degree) == (3, 4)
    assert any(
        "ranks that share out its states all instead of 4" in one.reason
        for one in found.alternatives
    )
    whole = planned(21_500_000, zero_stage=3, zero_shard_degree=8)
    assert whole.layout.zero_shard_degree is None
    assert whole.prediction.step_seconds > 3 * found.prediction.step_seconds
    assert planned(13_000_000).layout.zero_shard_degree is None


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_groups_can_be_asked_for(zero_stage: int) -> None:
    """A constraint is held against the number of ranks that share the states out: one, without ZeRO."""
    found = planned(10**9, zero_stage=zero_stage, zero_shard_degree=2)
    assert (found.layout.zero_stage, found.layout.zero_shard_degree) == (zero_stage, 2)
    assert planned(10**9, zero_shard_degree=1).layout.zero_stage == 0


def opened(
    memory_bytes: int, model: ModelProfile = MODEL
) -> list[tuple[int, int | None]]:
    """ZeRO stage and groups worth opening of the only family of eight devices on one node."""
    work = workload(
        model, cluster(8, memory_bytes=memory_bytes), job(8, pipeline_parallel_degree=1)
    )
    (family,) = space_of(work).families
    layouts = [
        one[2].layout for one in module.worth_opening(work, family, ("per-layer",))
    ]
    return [(layout.zero_stage, layout.zero_shard_degree) for layout in layouts]


def test_dominated_groups_are_left_out() -> None:
    """Without latency, smaller groups under ZeRO 1 only take more memory and longer updates, as no ZeRO at all does."""
    assert [found for found in opened(10**9) if found[0] < 2] == [(1, None)]


def test_smaller_groups_than_do_not_fit_are_not_priced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight ranks hold 8 MB each, and 4 MB of two layers whole; groups of four do not fit: those of two are not
    looked at. With shared parameters, of which a few bytes may be spared, all are."""
    priced: list[tuple[int, int | None]] = []

    def price(work: Workload, layout: Layout) -> LayoutCosts:
        priced.append((layout.zero_stage, layout.zero_shard_degree))
        return layout_costs(work, layout)

    monkeypatch.setattr(module, "layout_costs", price)
    assert opened(13_000_000) == [(3, None)]
    assert priced == [(0, None), (1, None), (2, None), (3, None), (3, 4)]
    priced.clear()
    block = layer(parameters=ELEMENTS, activation=500, optimizer=5e-5)
    opened(13_000_000, profile(block * 8, shared=[((0, 1), 1000)]))
    assert len(priced) == 1 + 3 * 3
