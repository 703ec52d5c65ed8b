"""What sequence chunks cost besides: equations (Q3) and (Q4), by hand."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost import layout_costs, workload
from planner.cost.chunks import in_chunks
from planner.spec import Layout, ModelProfile
from planner.spec.calibration import DEFAULT
from planner.spec.cluster import DeviceSpec
from planner.spec.profile import Measurement, Operation
from tests.builders import cluster, job, layer, link, profile

DEVICE = DeviceSpec(
    id="toy",
    memory_bytes=10**9,
    peak_flops_per_second={"bf16": 1e15},
    memory_bandwidth_bytes_per_second=1e9 / DEFAULT.memory_fraction,
    launch_seconds=1e-6,
)
PRODUCT = Operation(kind="matmul", count=1, flops=240, bytes=401, m=8, n=3, k=5)
"""Bound by bytes, which move at 1 GB/s: 2 (8 x 5 + 8 x 3) = 128 of the tokens, 273 of weights."""


def row_of(*operations: Operation, **fields: Any) -> Measurement:
    """A counted row with these kernels."""
    told = {
        "micro_batch_size": 1,
        "sequence_length": 128,
        "forward_flops": 240,
        "source": "counted",
    }
    nothing = dict.fromkeys(
        (
            "backward_input_flops",
            "backward_weight_flops",
            "activation_bytes",
            "output_bytes",
            "temporary_bytes",
        ),
        0,
    )
    return Measurement.model_validate(
        told | nothing | {"operations": operations} | fields
    )


def forward(row: Measurement, chunks: int, device: DeviceSpec = DEVICE) -> float:
    """Seconds of a micro-batch."""
    return in_chunks(row, device, "bf16", DEFAULT, chunks).forward_seconds


def test_every_chunk_reads_the_weights_and_is_launched() -> None:
    """(Q3): of Q chunks Q (273 + 128 / Q) bytes and Q launches; of a kernel without weights the launches."""
    assert forward(row_of(PRODUCT), 1) == pytest.approx(401e-9 + 1e-6)
    assert forward(row_of(PRODUCT), 4) == pytest.approx(4 * 273e-9 + 128e-9 + 4e-6)
    plain = Operation(kind="memory", count=1, flops=0, bytes=401)
    assert forward(row_of(plain), 4) == pytest.approx(401e-9 + 4e-6)


def test_measured_seconds_grow_in_proportion() -> None:
    """(Q3): as the same kernels would; without kernels or a peak nothing is known, and nothing added."""
    seconds = {
        "forward_seconds": 7e-3,
        "backward_input_seconds": 7e-3,
        "backward_weight_seconds": 7e-3,
    }
    grown = forward(row_of(PRODUCT), 4) / forward(row_of(PRODUCT), 1)
    assert forward(row_of(PRODUCT, source="measured", **seconds), 4) == pytest.approx(
        7e-3 * grown
    )
    assert forward(row_of(source="measured", **seconds), 4) == 7e-3
    unknown = DEVICE.model_copy(update={"peak_flops_per_second": {}})
    assert forward(row_of(PRODUCT, source="measured", **seconds), 4, unknown) == 7e-3


def test_every_chunk_pays_the_latency_of_its_collectives() -> None:
    """(Q4): two ranks all-reduce 1000 bytes per layer: Q times 2 x (latency + 1000 / Q / 2 / bandwidth)."""
    model: ModelProfile = profile(layer(exchange=1000) * 4, degrees=(1, 2))
    work = workload(model, cluster(4, intra=link(1e9, 1e-6)), job(4))
    layout = Layout(
        tensor_parallel_degree=2,
        pipeline_parallel_degree=2,
        schedule="seqpipe",
        sequence_chunks=4,
    )
    whole, cut = (
        layout_costs(work, each)
        for each in (layout.model_copy(update={"sequence_chunks": 1}), layout)
    )
    ticks = [costs.layers[0]["none"].forward_ticks for costs in (whole, cut)]
    assert ticks[1] - ticks[0] == 3 * 2 * 1000
