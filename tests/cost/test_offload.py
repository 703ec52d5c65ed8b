"""Offloading by hand: equations (O1) to (O8) on two stages of two layers."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost import (
    LayoutCosts,
    StageMap,
    choose,
    layout_costs,
    predict_step,
    schedule_of,
    workload,
)
from planner.errors import UnsupportedError
from planner.spec import Cluster, Layout, Prediction
from tests.builders import cluster, job, layer, profile

_LAYERS = profile(layer(activation=6000, output=100, temporary=50, parameters=1000) * 4)
_NODE_BYTES = 80_001
"""Of two devices."""
_SPEED = 1e9
"""Of the link; copies reach eight tenths of it."""


def hosted(**changes: Any) -> Cluster:
    """Two devices of one node whose host is known."""
    known = {"host_bandwidth_bytes_per_second": _SPEED, "reserved_bytes": 7} | changes
    found = cluster(2, memory_bytes=10**6, **known)
    group = found.node_groups[0].model_copy(update={"host_memory_bytes": _NODE_BYTES})
    return found.model_copy(update={"node_groups": (group,)})


def costs_of(machines: Cluster | None = None, **offload: bool) -> LayoutCosts:
    """Two stages under 1f1b with eight micro-batches."""
    layout = Layout(pipeline_parallel_degree=2, **offload)
    return layout_costs(workload(_LAYERS, machines or hosted(), job(8)), layout)


def predicted(costs: LayoutCosts) -> Prediction:
    """Two layers on either stage."""
    stage_map: StageMap = (((0, "none"), (1, "none")), ((2, "none"), (3, "none")))
    return predict_step(costs, schedule_of(costs), choose(costs, stage_map))


def test_activations_on_the_host() -> None:
    """Copies lengthen forward and backward; boundaries and one layer's activations stay on the device."""
    plain, found = costs_of(), costs_of(activation_offload=True)
    before, after = plain.layers[0]["none"], found.layers[0]["none"]
    copied = round(6000 / (0.8 * _SPEED) * 1e9)
    assert copied == 7500
    assert (
        after.forward_ticks - before.forward_ticks
        == after.backward_ticks - before.backward_ticks
        == copied
    )
    first, last = predicted(found).memory
    assert (
        first.activations_bytes == 2 * (0 + 100) + 2 * 100
    )  # u = 2: nothing comes in; one buffer pair
    assert last.activations_bytes == 1 * (100 + 100) + 2 * 100
    assert first.temporary_bytes == last.temporary_bytes == 50 + 6000
    assert (first.host_bytes, last.host_bytes) == (2 * 2 * 6000, 1 * 2 * 6000)
    assert first.host_capacity_bytes == 40_000
    assert predicted(found).breakdown.offload_seconds == pytest.approx(
        8 * 2 * 2 * copied * 1e-9
    )
    assert predicted(plain).breakdown.offload_seconds == 0


def test_states_on_the_host() -> None:
    """AdamW's twelve bytes per parameter leave the device, but for those of the layer that is updated."""
    plain, found = costs_of(), costs_of(optimizer_offload=True)
    before, after = plain.layers[0]["none"], found.layers[0]["none"]
    assert before.optimizer_bytes == 12_000
    assert (
        after.optimizer_ticks - before.optimizer_ticks
        == 2 * 12_000 / (0.8 * _SPEED) * 1e9
    )
    for row, with_states in zip(
        predicted(found).memory, predicted(plain).memory, strict=True
    ):
        assert (with_states.optimizer_bytes, row.optimizer_bytes) == (24_000, 0)
        assert row.temporary_bytes == 12_000
        assert row.host_bytes == 24_000
        assert row.peak_bytes == with_states.peak_bytes - 24_000 - 50 + 12_000


def test_both_share_the_host() -> None:
    """What goes to the host adds up there; on the device the larger of both temporaries counts."""
    first, _ = predicted(
        costs_of(activation_offload=True, optimizer_offload=True)
    ).memory
    assert first.host_bytes == 24_000 + 24_000
    assert first.temporary_bytes == 12_000
    assert not first.fits, "40 000 bytes are its part of the host"


def test_zero_shares_states_out_before_they_go() -> None:
    """Two data ranks under ZeRO 1 bring half of the states each to their host."""
    layout = Layout(data_parallel_degree=2, zero_stage=1, optimizer_offload=True)
    costs = layout_costs(workload(_LAYERS, hosted(), job(8)), layout)
    assert costs.layers[0]["none"].host_optimizer_bytes == 6000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host_memory_bytes": None}, "is not given"),
        ({"device": None}, "the link of 'toy' to its host is not known"),
    ],
)
def test_hosts_that_are_not_known_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    """By what the cluster leaves out, and with what to write."""
    machines = (
        hosted(host_bandwidth_bytes_per_second=None)
        if "device" in changes
        else hosted()
    )
    group = machines.node_groups[0]
    if "device" not in changes:
        group = group.model_copy(update=changes)
    machines = machines.model_copy(update={"node_groups": (group,)})
    with pytest.raises(UnsupportedError, match=words) as caught:
        costs_of(machines, optimizer_offload=True)
    assert "host_bandwidth_bytes_per_second" in caught.value.problems[0].hint
    assert costs_of(machines).layers


def test_on_several_node_groups_every_rank_goes_by_its_own_host() -> None:
    """The second group's link to its host is half as fast, and its nodes have less memory; all must be known."""
    machines, slower = hosted(), hosted(host_bandwidth_bytes_per_second=_SPEED / 2)
    (first,), (second,) = machines.node_groups, slower.node_groups
    other = second.model_copy(
        update={"name": "other", "host_memory_bytes": _NODE_BYTES // 2}
    )
    both = machines.model_copy(update={"node_groups": (first, other)})
    layout = Layout(pipeline_parallel_degree=4, activation_offload=True)
    plain = layout_costs(
        workload(_LAYERS, both, job(8)),
        layout.model_copy(update={"activation_offload": False}),
    )
    found = layout_costs(workload(_LAYERS, both, job(8)), layout)
    for rank, times in enumerate((1, 1, 2, 2)):
        moving = times * 6000 / (_SPEED * 0.8) * 1e9
        before, after = (
            each.on_rank(rank).layers[rank]["none"] for each in (plain, found)
        )
        assert after.forward_ticks - before.forward_ticks == pytest.approx(
            moving, abs=1
        )
    rows = predict_step(
        found,
        schedule_of(found),
        choose(found, [[(layer, "none")] for layer in range(4)]),
    ).memory
    assert [row.host_bytes for row in rows] == [4 * 6000, 3 * 6000, 2 * 6000, 6000]
    assert [row.host_capacity_bytes for row in rows] == [_NODE_BYTES // 2] * 2 + [
        _NODE_BYTES // 4
    ] * 2
    unknown = both.model_copy(
        update={
            "node_groups": (first, other.model_copy(update={"host_memory_bytes": None}))
        }
    )
    with pytest.raises(
        UnsupportedError, match=r"node_groups\[1\].host_memory_bytes: is not given"
    ):
        layout_costs(workload(_LAYERS, unknown, job(8)), layout)
