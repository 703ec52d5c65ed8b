"""Scale-up domains of several nodes: which groups stay inside, and that the check finds the same."""

from __future__ import annotations

import pytest

from planner.check import check
from planner.cost import layout_costs, workload
from planner.cost.groups import groups_of
from planner.search import plan_layout
from planner.spec import Cluster, Layout, Link, NodeGroup, Plan, PredictionLayout
from planner.spec.profile import ModelProfile
from tests.builders import job, layer, profile, request

RACK = "gb200-nvl72-186gb"
BYTES = 10**9
NVLINK, NETWORK = 900e9, 50e9
"""Bytes per second."""
TWO_RACKS = Cluster(
    node_groups=(
        NodeGroup(
            device=RACK,
            nodes=36,
            devices_per_node=4,
            intra_node=Link(latency_seconds=4e-6, bandwidth_bytes_per_second=NVLINK),
            inter_node=Link(latency_seconds=1.2e-5, bandwidth_bytes_per_second=NETWORK),
        ),
    )
)


TWO_SEGMENTS = TWO_RACKS.model_copy(
    update={"node_groups": (TWO_RACKS.node_groups[0].model_copy(update={"nodes": 32}),)}
)
"""128 devices: 64 in each of two racks."""
RACK_AND_A_PART = TWO_RACKS.model_copy(
    update={"node_groups": (TWO_RACKS.node_groups[0].model_copy(update={"nodes": 20}),)}
)
"""80 devices: 72 in one rack, 8 in another."""


def model(degree: int = 8) -> ModelProfile:
    """Four layers that exchange a gigabyte per pass, split over so many devices."""
    drafts = layer(parameters=BYTES // 2, exchange=BYTES, flops=10**9) * 4
    return profile(drafts, degrees=(degree,)).model_copy(update={"device": RACK})


def planned(cluster: Cluster, batch: int, **degrees: int) -> Plan:
    """The plan of these degrees."""
    asked = request(
        known := model(degrees["tensor_parallel_degree"]), cluster, job(batch=batch)
    )
    found = plan_layout(asked, known, PredictionLayout(**degrees))
    assert isinstance(found, Plan)
    return found


def test_tensor_groups_of_eight_use_the_links_of_the_rack() -> None:
    """On 144 devices, two nodes of four that share a rack all-reduce over NVLink, not over the network."""
    layout = Layout(data_parallel_degree=18, tensor_parallel_degree=8)
    work = workload(model(), TWO_RACKS, job(batch=18))
    groups = groups_of(layout, work.domain_devices)
    assert (groups.tensor.nodes, groups.data.nodes, groups.data.ranks_per_node) == (
        1,
        2,
        9,
    )
    cost = layout_costs(work, layout).layers[0]["none"]
    hops = work.intra_node.latency_seconds + work.constants.collective_seconds
    assert cost.communication_ticks * 1e-9 == pytest.approx(
        2 * 2 * 7 / 8 * BYTES / NVLINK, abs=40 * hops
    )


def test_data_groups_over_two_racks_use_the_network_between_them() -> None:
    """Nine ranks of each rack sum their gradients over NVLink, then a ninth of them with their peer in the other."""
    found = planned(TWO_RACKS, 18, data_parallel_degree=18, tensor_parallel_degree=8)
    gradients = 4 * BYTES / 8
    seconds = 2 * (8 / 9 * gradients / NVLINK + 1 / 2 * gradients / 9 / NETWORK)
    assert found.prediction.breakdown.data_parallel_seconds == pytest.approx(
        seconds, rel=0.05
    )
    assert {row.node for row in found.placement} == set(range(36))


@pytest.mark.parametrize(
    "degrees",
    [
        {"data_parallel_degree": 18, "tensor_parallel_degree": 8},
        {
            "data_parallel_degree": 9,
            "tensor_parallel_degree": 8,
            "pipeline_parallel_degree": 2,
        },
        {
            "data_parallel_degree": 36,
            "tensor_parallel_degree": 1,
            "pipeline_parallel_degree": 4,
        },
        {"data_parallel_degree": 2, "tensor_parallel_degree": 72, "zero_stage": 1},
    ],
)
def test_the_check_agrees(degrees: dict[str, int]) -> None:
    """Plans on two racks hold: every price is the recomputed one, whatever crosses from rack to rack."""
    found = planned(TWO_RACKS, 36, **degrees)
    assert check(found, model(degrees["tensor_parallel_degree"])).problems == ()


@pytest.mark.parametrize(
    ("cluster", "degrees"),
    [
        (TWO_SEGMENTS, {"data_parallel_degree": 16, "tensor_parallel_degree": 8}),
        (TWO_SEGMENTS, {"data_parallel_degree": 2, "tensor_parallel_degree": 64}),
        (RACK_AND_A_PART, {"data_parallel_degree": 10, "tensor_parallel_degree": 8}),
        (RACK_AND_A_PART, {"data_parallel_degree": 1, "tensor_parallel_degree": 80}),
    ],
)
def test_the_check_agrees_on_segments(
    cluster: Cluster, degrees: dict[str, int]
) -> None:
    """Plans on segments of racks, and on unequal parts of racks, have the recomputed prices."""
    found = planned(cluster, 20 if cluster is RACK_AND_A_PART else 16, **degrees)
    assert check(found, model(degrees["tensor_parallel_degree"])).problems == ()


def test_power_of_two_groups_fill_a_segment() -> None:
    """On 128 devices, a tensor-parallel group of 64 stays inside a rack, and data groups have half in each."""
    work = workload(model(64), TWO_SEGMENTS, job(batch=16))
    layout = Layout(data_parallel_degree=2, tensor_parallel_degree=64)
    groups = groups_of(layout, work.domain_devices)
    assert (groups.tensor.nodes, groups.data.nodes) == (1, 2)


def test_data_groups_over_unequal_racks_wait_for_the_smaller_part() -> None:
    """Nine ranks in one rack and one in another: a ring of nine, then all gradients through one adapter."""
    found = planned(
        RACK_AND_A_PART, 20, data_parallel_degree=10, tensor_parallel_degree=8
    )
    gradients = 4 * BYTES / 8
    seconds = 2 * (8 / 9 * gradients / NVLINK + 1 / 2 * gradients / NETWORK)
    assert found.prediction.breakdown.data_parallel_seconds == pytest.approx(
        seconds, rel=0.05
    )


def test_one_rack_has_no_second_level() -> None:
    """Groups of a cluster inside one rack are as fast over several nodes as on one node of as many devices."""
    many, one = (
        Cluster(
            node_groups=(
                NodeGroup(device=RACK, nodes=nodes, devices_per_node=72 // nodes),
            )
        )
        for nodes in (18, 1)
    )
    layout = {"data_parallel_degree": 9, "tensor_parallel_degree": 8}
    predictions = [planned(cluster, 9, **layout).prediction for cluster in (many, one)]
    assert predictions[0] == predictions[1]
