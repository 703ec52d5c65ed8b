"""What layers cost at least, wherever their ranks stand."""

from __future__ import annotations

import pytest

from planner.cost import layout_costs, workload
from planner.cost.nearest import nearest_costs
from planner.spec import Layout
from tests.builders import cluster, job, layer, link, profile


@pytest.mark.parametrize(
    ("nodes", "per_node", "tensor", "is_exact"),
    [
        (2, 4, 2, True),
        (2, 4, 4, True),
        (2, 4, 8, True),
        (2, 6, 4, False),
        (4, 3, 4, False),
    ],
)
def test_no_placement_is_cheaper_than_the_nearest(
    nodes: int, per_node: int, tensor: int, is_exact: bool
) -> None:
    """Between nodes with latencies nearly as inside: exact where tensor-parallel groups divide a node or fill several;
    where some straddle two in equal parts, which has fewer hops than one ring, what is told is no more."""
    model, devices = profile(layer(exchange=1000), degrees=(tensor,)), nodes * per_node
    links = {"intra": link(latency=1e-3), "inter": link(latency=1.1e-3)}
    work = workload(model, cluster(devices, nodes=nodes, **links), job(devices))
    layout = Layout(
        data_parallel_degree=devices // tensor, tensor_parallel_degree=tensor
    )
    real, least = (
        layout_costs(work, layout).layers[0]["none"],
        nearest_costs(work, (1, tensor, 1, 1, False))[0]["none"],
    )
    assert least.forward_ticks <= real.forward_ticks
    assert least.backward_ticks <= real.backward_ticks
    assert not is_exact or least.communication_ticks == real.communication_ticks > 0
